"""What our policy promises against a federation, over whole traces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from pitools.place.policy import PolicyParams, decide
from pitools.place.simulate import engine
from pitools.place.simulate.model import Result, Scenario, Trace
from pitools.place.types import PendingJob, PoolState, Submit, Ticket, Withdraw
from tests.place.simulate.small_scenario import scenario, trace

# (submit_s, gpus, run_s, how many times as long the limit is), on a grid far coarser than the minute of a decision
JOBS = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 8), st.integers(1, 30), st.sampled_from([1, 1, 1.5])),
    min_size=10,
    max_size=30,
    unique_by=lambda job: job[0],
).map(lambda jobs: trace(*sorted((at * 500.0, n, run * 1000.0, run * more * 1000.0) for at, n, run, more in jobs)))


def sites(*speeds: float) -> Scenario:
    """Pools of 3, 8 and 5 GPUs, of these speeds."""
    pools = scenario(3, 8, 5).pools
    return scenario(
        pools=tuple(replace(pool, speed=speed) for pool, speed in zip(pools, speeds, strict=True)),
    )


SITES = st.sampled_from([sites(1.0, 1.0, 1.0), sites(4.0, 2.0, 1.0)])


def replayed(jobs: Trace, where: Scenario) -> Result:
    return engine.simulate(jobs, where, partial(decide, policy=PolicyParams()), tick_s=0)


@settings(max_examples=100, deadline=None)
@given(JOBS, SITES)
def test_the_oldest_due_job_starts_by_its_first_promise(jobs: Trace, where: Scenario) -> None:
    """From when it is the oldest: by the first time at which any site would have its units, if all use their limits."""
    promised: dict[str, float] = {}

    def watched(
        now_s: float, pending: Sequence[PendingJob], pools: Mapping[str, PoolState], tickets: Sequence[Ticket]
    ) -> Sequence[Submit | Withdraw]:
        first = min(pending, key=lambda job: job.submit_s)
        soonest_s = min(_units_free_s(now_s, option.units, pools[option.pool]) for option in first.options)
        promised.setdefault(first.job_id, soonest_s)
        return decide(now_s, pending, pools, tickets, PolicyParams(due_share=0.0))

    result = engine.simulate(jobs, where, watched, tick_s=0)
    for job_id, by_s in promised.items():
        assert result.start_s[jobs.job_id.index(job_id)] <= by_s


def _units_free_s(now_s: float, units: int, pool: PoolState) -> float:
    free = pool.free
    for end_s, ends in ((now_s, 0), *pool.running):
        free += ends
        if free >= units:
            return end_s
    return inf


@settings(max_examples=100, deadline=None)
@given(JOBS)
def test_where_nobody_waits_equal_sites_are_a_federation(jobs: Trace) -> None:
    """A job that a federation starts at once starts at once, and there, as long as that holds for all before it."""
    where = sites(1.0, 1.0, 1.0)
    ours, theirs = replayed(jobs, where), engine.simulate(jobs, where, "federation")
    for job in range(len(jobs)):
        if theirs.start_s[job] != jobs.submit_s[job]:
            break
        assert (ours.start_s[job], ours.pool[job]) == (theirs.start_s[job], theirs.pool[job])
