"""The simulator against arithmetic by hand, a slow twin, and what must always hold."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from math import inf, isnan
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pitools.place.simulate import baselines, engine, metrics
from pitools.place.simulate.model import Failures, Result, Trace
from pitools.place.simulate.pool_scheduler import PoolScheduler
from pitools.place.types import PendingJob, PoolState, Submit, Ticket, Withdraw
from tests.place.simulate.small_scenario import scenario, trace
from tests.place.simulate.test_trace import HELIOS

# (submit_s, gpus, run_s, how many times as long the limit is), all on a coarse grid so that much happens at once
JOBS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 9), st.integers(1, 30), st.sampled_from([1, 1.5, 4])),
    min_size=1,
    max_size=40,
).map(lambda jobs: trace(*sorted((float(at), n, float(run), run * more) for at, n, run, more in jobs)))


def starts(result: Result) -> list[float]:
    return list(result.start_s)


def check(result: Result, jobs: Trace) -> None:
    """Every job that fits somewhere ran once, whole, where it fits, and no pool held more than it has."""
    pools = result.scenario.pools
    assert sorted(result.spans.job) == [n for n in range(len(jobs)) if jobs.gpus[n] <= max(p.gpus for p in pools)]
    for job, pool, start_s, end_s in zip(
        result.spans.job, result.spans.pool, result.spans.start_s, result.spans.end_s, strict=True
    ):
        assert start_s >= result.submit_s[job]
        assert end_s - start_s == jobs.run_s[job] / pools[pool].speed
        assert jobs.gpus[job] <= pools[pool].gpus
    _, used = metrics.timeline(result)
    assert (used <= [pool.gpus for pool in pools]).all()


def test_an_example_by_hand() -> None:
    """Eight GPUs: the second job waits for the first, a short one passes it, a long one may not, a small long one may.

    j0 holds 6 until 100 at the latest, and ends at 60. j1 asks for 7: its shadow is 100, with one GPU to spare. j2 (2
    GPUs, limit 80) fits before the shadow: at once. j3 (2, limit 95) would reach beyond it with two: not before j1. j4
    (1 GPU, limit 500) fits beside j1 when j2 has ended at 50. At 60 j1 starts; its 7 end at 80, then j3 runs.
    """
    jobs = trace((0, 6, 60, 100), (10, 7, 20, 50), (20, 2, 30, 80), (30, 2, 95, 95), (40, 1, 500, 500))
    result = engine.simulate(jobs, scenario(8), "federation")
    assert starts(result) == [0, 60, 20, 80, 50]
    assert list(result.end_s) == [60, 80, 50, 175, 550]
    summary = metrics.summarize(result, jobs)
    assert summary.mean_jct_s == (60 + 70 + 30 + 145 + 510) / 5
    assert summary.mean_wait_s == (0 + 50 + 0 + 50 + 10) / 5
    assert summary.makespan_s == 550
    assert summary.utilisation == (6 * 60 + 7 * 20 + 2 * 30 + 2 * 95 + 500) / (8 * 550)


def slow_twin(jobs: Trace, gpus: int) -> list[float]:
    """EASY backfill on one pool as its definition reads: everything looked at, at every moment."""
    start: dict[int, float] = {}
    queue: list[int] = []
    now, arrived = 0.0, 0
    while len(start) < len(jobs):
        while arrived < len(jobs) and jobs.submit_s[arrived] <= now:
            # Whoever comes at one moment is seen one after the other, as Slurm sees them.
            if jobs.gpus[arrived] <= gpus:
                queue.append(arrived)
                sweep(jobs, gpus, start, queue, now)
            else:
                start[arrived] = inf
            arrived += 1
        ends = [start[job] + jobs.run_s[job] for job in start if start[job] < inf]
        later = [*jobs.submit_s[arrived:], *(end for end in ends if end > now)]
        if not later:
            break
        now = min(later)
        sweep(jobs, gpus, start, queue, now)
    return [start[job] for job in range(len(jobs))]


def sweep(jobs: Trace, gpus: int, start: dict[int, float], queue: list[int], now: float) -> None:
    running = [job for job in start if start[job] < inf and start[job] + jobs.run_s[job] > now]
    free = gpus - sum(jobs.gpus[job] for job in running)
    ends = {job: start[job] + jobs.limit_s[job] for job in running}
    while queue and jobs.gpus[queue[0]] <= free:
        job = queue.pop(0)
        start[job], ends[job], free = now, now + jobs.limit_s[job], free - jobs.gpus[job]
    if not queue:
        return
    room, shadow = free, now
    for end, job in sorted((end, job) for job, end in ends.items()):
        if room >= jobs.gpus[queue[0]] and end > shadow:
            break
        room, shadow = room + jobs.gpus[job], end
    spare = room - jobs.gpus[queue[0]]
    for job in queue[1:]:
        beyond = now + jobs.limit_s[job] > shadow
        if jobs.gpus[job] <= free and (not beyond or jobs.gpus[job] <= spare):
            queue.remove(job)
            start[job], free = now, free - jobs.gpus[job]
            spare -= jobs.gpus[job] * beyond


@settings(max_examples=200, deadline=None)
@given(JOBS)
def test_backfill_is_that_of_its_slow_twin(jobs: Trace) -> None:
    """Looking only at what changed starts every job when looking at everything does."""
    actual = starts(engine.simulate(jobs, scenario(8), "federation"))
    assert [inf if isnan(start) else start for start in actual] == slow_twin(jobs, 8)


@settings(max_examples=100, deadline=None)
@given(JOBS, st.sampled_from(sorted(baselines.BASELINES)), st.integers(1, 5))
def test_every_job_runs_once_where_there_is_room(jobs: Trace, name: str, depth: int) -> None:
    """Whatever the policy and however short-sighted the schedulers: once, whole, within capacity."""
    check(engine.simulate(jobs, scenario(3, 8, 5, backfill_depth=depth), name), jobs)


@settings(max_examples=100, deadline=None)
@given(JOBS)
def test_nobody_is_held_up_beyond_the_shadow(jobs: Trace) -> None:
    """With exact limits, the first of the queue starts by its shadow as it was when it became first, or sooner."""
    site, promised, now = PoolScheduler(9, depth=100), {}, 0.0
    arrivals = [(position, number) for number, position in enumerate(jobs.submit_s)]
    ends: list[tuple[float, int]] = []
    while arrivals or ends:
        now = min(([arrivals[0][0]] if arrivals else []) + [end for end, _ in ends])
        for end, job in [item for item in ends if item[0] == now]:
            site.release(job, jobs.gpus[job], end)
            ends.remove((end, job))
        while arrivals and arrivals[0][0] == now:
            _, job = arrivals.pop(0)
            site.enqueue((0, job, job, jobs.gpus[job], jobs.run_s[job]))
        for entry in site.startable(now):
            assert now <= promised.get(entry[2], inf)
            ends.append((now + entry[4], entry[2]))
        if site.queue:
            promised.setdefault(site.queue[0][2], site.shadow)
    assert not site.running
    assert site.free == 9


def test_a_fast_pool_has_shorter_limits() -> None:
    """At speed 2 the first may last until 50; a job of 46 s there that comes at 5 would last longer, and waits."""
    plain = scenario(8)
    world = msgspec.structs.replace(plain, pools=(msgspec.structs.replace(plain.pools[0], speed=2.0),))
    jobs = trace((0, 6, 100, 100), (1, 7, 10, 10), (5, 2, 90, 92))
    assert starts(engine.simulate(jobs, world, "federation")) == [0, 50, 55]


def test_ends_at_one_moment_count_together() -> None:
    """Two jobs may last until 47, six GPUs are asked for: what is left over then, two, may be used beyond."""
    jobs = trace((0, 4, 20, 20), (1, 6, 1, 1), (2, 1, 5, 18), (3, 2, 6, 24))
    assert starts(engine.simulate(jobs, scenario(8), "federation")) == [0, 20, 2, 3]


def test_one_node_of_a_large_job_is_away() -> None:
    """Of 16 GPUs that fail, 8 are repaired, and the others may be used meanwhile."""
    failures = Failures(per_gpu_day=1.0, checkpoint_s=10.0, repair_s=1e6)
    jobs = trace((0, 16, 86400, 86400), (86000, 8, 1, 1))
    result = engine.simulate(jobs, scenario(16, failures=failures), "federation")
    assert result.spans.end_s[0] < 86000
    assert result.start_s[1] == 86000


def test_siblings_vanish_when_one_starts() -> None:
    """A federation's job starts where there is room first, and delays nobody elsewhere."""
    # Both pools are busy, b for less long. j2's siblings wait in both; it starts in b at 50, and j3 gets a at 100.
    jobs = trace((0, 4, 100, 100), (1, 4, 49, 49), (2, 4, 1000, 1000), (3, 4, 10, 10))
    result = engine.simulate(jobs, scenario(4, 4), "federation")
    assert list(result.pool) == [0, 1, 1, 0]
    assert starts(result) == [0, 1, 50, 100]
    check(result, jobs)


def test_a_policy_sees_its_world_and_is_obeyed() -> None:
    """Jobs, pools by limits and tickets are as they should be; what is placed starts, what is withdrawn does not."""
    observed: list[tuple[float, list[str], int, list[tuple[float, int]], list[str]]] = []

    def policy(
        now_s: float, jobs: Sequence[PendingJob], pools: Mapping[str, PoolState], tickets: Sequence[Ticket]
    ) -> list[object]:
        observed.append(
            (
                now_s,
                [job.job_id for job in jobs],
                pools["a"].free,
                list(pools["a"].running),
                [f"{ticket.job_id}@{ticket.pool}" for ticket in tickets],
            )
        )
        if now_s == 2:
            return [Submit(job_id=job.job_id, pool="a") for job in jobs]
        if now_s == 130:
            return [Withdraw(job_id="j1", pool="a"), Submit(job_id="j1", pool="b")]
        return []

    jobs = trace((1, 6, 600, 900), (2, 4, 50, 70), (130, 1, 1, 1))
    result = engine.simulate(jobs, scenario(8, 4), policy)  # type: ignore[arg-type]
    assert observed[:3] == [
        (1, ["j0"], 8, [], []),
        (2, ["j0", "j1"], 8, [], []),
        (130, ["j1", "j2"], 2, [(902, 6)], ["j1@a"]),
    ]
    assert starts(result)[:2] == [2, 130]
    assert (result.placed, result.withdrawn) == (3, 1)
    assert isnan(result.start_s[2])  # nobody placed it: what a policy forgets does not run


@settings(max_examples=50, deadline=None)
@given(JOBS, st.randoms(use_true_random=False), st.sampled_from([0.0, 7.0]))
def test_siblings_of_any_policy_run_once(jobs: Trace, random: object, tick_s: float) -> None:
    """Tickets put and withdrawn at random, several for a job: each job still runs once, whole, within capacity."""

    def policy(
        now_s: float, jobs: Sequence[PendingJob], pools: Mapping[str, PoolState], tickets: Sequence[Ticket]
    ) -> list[object]:
        held = {(ticket.job_id, ticket.pool) for ticket in tickets}
        moves: list[object] = []
        for job in jobs:
            own_part = [option.pool for option in job.options if (job.job_id, option.pool) in held]
            others = [option.pool for option in job.options if option.pool not in own_part]
            if others and (not own_part or random.random() < 0.5):  # type: ignore[attr-defined]
                moves.append(Submit(job_id=job.job_id, pool=random.choice(others)))  # type: ignore[attr-defined]
            elif len(own_part) > 1:
                moves.append(Withdraw(job_id=job.job_id, pool=own_part[0]))
        return moves

    check(engine.simulate(jobs, scenario(3, 8, 5), policy, tick_s=tick_s), jobs)  # type: ignore[arg-type]


@pytest.mark.parametrize("tick_s", [0.0, 60.0])
def test_a_withdrawn_job_is_decided_on_again(tick_s: float) -> None:
    """The policy is called after its withdrawal, though no job arrives or ends: it can place the job again."""

    def policy(
        now_s: float, jobs: Sequence[PendingJob], pools: Mapping[str, PoolState], tickets: Sequence[Ticket]
    ) -> list[object]:
        if now_s < 100:
            return [Submit(job_id=job.job_id, pool="a") for job in jobs]
        if tickets:
            return [Withdraw(job_id="j1", pool="a")]
        return [Submit(job_id="j1", pool="b")] if jobs[0].job_id == "j1" else []

    jobs = trace((1, 4, 600, 600), (1, 4, 600, 600), (130, 1, 1, 1))
    result = engine.simulate(jobs, scenario(4, 4), policy, tick_s=tick_s)  # type: ignore[arg-type]
    assert starts(result)[1] == (190 if tick_s else 131)


def test_failures_cost_what_was_not_saved() -> None:
    """A job that loses nodes ends after its run time and whatever the failures cost; its node stays away."""
    jobs = trace(*((0.0, 8, 86400.0, 100000.0) for _ in range(20)))
    lossy = {"failures": Failures(per_gpu_day=0.05, checkpoint_s=3600.0, repair_s=600.0), "seed": 3}
    result = engine.simulate(jobs, scenario(8 * 20, **lossy), "federation")
    failures = len(result.spans.job) - 20
    assert failures > 3
    assert not np.isnan(result.end_s).any()
    for job in range(20):
        spans = [n for n, item in enumerate(result.spans.job) if item == job]
        held = sum(result.spans.end_s[n] - result.spans.start_s[n] for n in spans)
        lost = held - 86400.0
        assert -1e-6 <= lost <= 3600.0 * (len(spans) - 1)  # at most one checkpoint's time each
    first = min(n for n in range(20) if result.spans.end_s[n] < 86400.0)
    again = next(n for n, job in enumerate(result.spans.job) if n > first and job == result.spans.job[first])
    assert (
        result.spans.start_s[again] == result.spans.end_s[first] + 600.0
    )  # all else was in use: it waited for its node
    item = metrics.summarize(result, jobs)
    assert item.failures == failures
    assert item.goodput < item.utilisation


def test_windows_are_kept() -> None:
    """No job reaches into a closed window; a dark pool starts nothing; both go on afterwards."""
    world = scenario(8, 8)
    pools = (
        msgspec.structs.replace(world.pools[0], maintenance_windows=((100.0, 200.0),)),
        msgspec.structs.replace(world.pools[1], unreachable_windows=((100.0, 300.0),)),
    )
    world = msgspec.structs.replace(world, pools=pools)
    jobs = trace((0, 8, 90, 95), (1, 8, 120, 120), (2, 8, 50, 99), (150, 1, 1, 1))
    result = engine.simulate(jobs, world, "federation")
    assert list(result.pool) == [0, 1, 0, 0]
    assert starts(result) == [0, 1, 200, 250]  # b is free from 121 on, but dark until 300


def test_a_higher_tier_preempts_the_latest_started_where_none_has_room() -> None:
    """The urgent job takes the place of the scavenger that lost least, which goes on from its last checkpoint."""
    jobs = trace(
        (0, 4, 900, 1000), (50, 4, 900, 1000), (170, 4, 100, 100), (180, 8, 50, 50), queues=("s", "s", "u", "n")
    )
    rules = {"tiers": {"u": 2, "n": 1}, "preempts": {"u": frozenset("s")}, "failures": Failures(checkpoint_s=60.0)}
    result = engine.simulate(jobs, scenario(8, **rules), "federation")
    assert starts(result) == [0, 50, 170, 900]
    spans = result.spans
    of_second = [(spans.start_s[n], spans.end_s[n]) for n, job in enumerate(spans.job) if job == 1]
    assert of_second == [(50, 170), (950, 1730)]  # 120 of its 900 s are done; the job of 8 GPUs is of a higher tier
    elsewhere = engine.simulate(jobs, scenario(8, 4, **rules), "federation")
    assert starts(elsewhere)[2] == 170
    assert len(elsewhere.spans.job) == 4  # there was room in the other pool


def test_a_queue_of_the_same_tier_that_nobody_may_preempt_is_left_alone() -> None:
    """Of two queues of one tier only the one that is named is preempted."""
    jobs = trace((0, 4, 900, 1000), (50, 4, 900, 1000), (170, 4, 100, 100), queues=("s", "b", "u"))
    world = scenario(8, tiers={"u": 1}, preempts={"u": frozenset("s")})
    result = engine.simulate(jobs, world, "federation")
    assert starts(result) == [0, 50, 170]
    assert list(result.spans.job) == [0, 1, 2, 0]


def test_an_outage_ends_what_runs_and_starts_nothing() -> None:
    """Running jobs lose the work since their checkpoints and go on elsewhere, or when the pool is back."""
    world = scenario(8, 4, failures=Failures(checkpoint_s=60.0))
    pools = (msgspec.structs.replace(world.pools[0], outage_windows=((100.0, 500.0),)), world.pools[1])
    jobs = trace((0, 8, 200, 300), (1, 4, 20, 20), (150, 8, 10, 10))
    result = engine.simulate(jobs, msgspec.structs.replace(world, pools=pools), "federation")
    assert starts(result) == [0, 1, 640]
    assert list(result.spans.start_s) == [0, 1, 500, 640]
    assert list(result.end_s) == [640, 21, 650]  # 60 of its 200 s were saved


@settings(max_examples=40, deadline=None)
@given(JOBS, st.lists(st.sampled_from("sun"), min_size=12, max_size=12), st.booleans())
def test_what_is_evicted_runs_to_its_end(jobs: Trace, queues: list[str], is_down: bool) -> None:
    """Every job ends, holds its GPUs for at least its run time, and no pool ever holds more than it has."""
    jobs = msgspec.structs.replace(jobs, queue=(queues * len(jobs))[: len(jobs)])
    world = scenario(8, 12, tiers={"u": 2, "n": 1}, preempts={"u": frozenset("sn"), "n": frozenset("s")})
    if is_down:
        down = msgspec.structs.replace(world.pools[1], outage_windows=((10.0, 25.0), (40.0, 41.0)))
        world = msgspec.structs.replace(world, pools=(world.pools[0], down))
    result = engine.simulate(jobs, world, "federation")
    held = [0.0] * len(jobs)
    for job, start_s, end_s in zip(result.spans.job, result.spans.start_s, result.spans.end_s, strict=True):
        held[job] += end_s - start_s
    fits = [job for job in range(len(jobs)) if jobs.gpus[job] <= 12]
    assert not result.starved
    assert not [job for job in fits if isnan(result.end_s[job]) or held[job] < jobs.run_s[job] - 1e-6]
    _, used = metrics.timeline(result)
    assert (used.max(0) <= (8, 12)).all()


def test_the_same_twice_and_under_any_hash_seed(repo: Path) -> None:
    """A replay depends on trace, scenario and seed alone."""
    code = (
        "from tests.place.simulate.small_scenario import scenario, trace;"
        "from pitools.place.simulate import engine; from pitools.place.simulate.model import Failures;"
        "jobs = trace(*((n * 7 % 50.0, n % 9 + 1, n * 13 % 40 + 1.0, 0.0) for n in range(300)));"
        "jobs.submit_s.sort();"
        "world = scenario(9, 12, 9, seed=5, failures=Failures(per_gpu_day=500.0), tier_shares={1: 0.3});"
        "print([[list(r.end_s), list(r.pool)] for name in ('random', 'federation', 'slurm-m')"
        " for r in [engine.simulate(jobs, world, name)]])"
    )
    output = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, cwd=repo, stdout=-1, text=True, check=True
        ).stdout
        for seed in ("0", "1", "7")
    }
    assert len(output) == 1
    assert len(output.pop()) > 5000


def test_the_example_of_the_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The docstring's way to tune a policy runs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trace.csv").write_text(HELIOS)
    example = str(engine.__doc__).partition("::\n")[2]
    exec(textwrap.dedent(example), {})
