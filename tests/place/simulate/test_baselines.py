"""Which pool a job gets, by what others do, and what becomes of what a policy refuses or forgets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest

from pitools.place.policy.runtime_predictor import JobFeatures, RuntimePredictor
from pitools.place.simulate import baselines, engine, metrics
from pitools.place.simulate.model import Result
from pitools.place.types import PendingJob, PoolState, Submit, Ticket
from tests.place.simulate.small_scenario import scenario, trace


def starts(result: Result) -> list[float]:
    return list(result.start_s)


def test_rules_of_the_others() -> None:
    """Where each binder puts the second of two jobs, the first of which fills the first pool."""
    jobs = trace((0, 8, 100, 100), (1, 2, 10, 10))
    placed = {name: list(engine.simulate(jobs, scenario(8, 4, 6), name).pool) for name in baselines.BASELINES}
    del placed["random"]
    assert placed == {
        "slurm-m": [0, 1],
        "slurm-m-space": [0, 1],
        "federation": [0, 1],
        "skypilot": [0, 0],
        "most-free": [0, 2],
        "soonest-end": [0, 1],
        "round-robin": [0, 1],
    }


@pytest.mark.parametrize("name", ["slurm-m", "slurm-m-space"])
def test_a_plan_counts_those_who_wait_from_when_they_start(name: str) -> None:
    """j2 waits in a until 100 and holds it until 200, so j3 goes to b, which is free at 150."""
    jobs = trace((0, 4, 100, 100), (1, 4, 149, 149), (2, 4, 100, 100), (3, 4, 1, 1))
    result = engine.simulate(jobs, scenario(4, 4), name)
    assert (list(result.pool), starts(result)) == ([0, 1, 0, 1], [0, 1, 100, 150])


def test_what_a_policy_forgets_is_told() -> None:
    """Jobs that it never places are in no mean, but counted; those that no pool can hold are others."""
    jobs = trace((0, 4, 10, 10), (1, 4, 1000, 1000), (2, 64, 1, 1))

    def policy(
        now_s: float, jobs: Sequence[PendingJob], pools: Mapping[str, PoolState], tickets: Sequence[Ticket]
    ) -> list[object]:
        return [Submit(job_id=job.job_id, pool="a") for job in jobs if job.job_id == "j0"]

    summary = metrics.summarize(engine.simulate(jobs, scenario(8), policy, tick_s=0), jobs)  # type: ignore[arg-type]
    assert (summary.jobs, summary.starved, summary.unplaced, summary.mean_jct_s) == (1, 1, 1, 10)


def test_a_dark_pool_is_passed_over_and_refuses() -> None:
    """Who binds asks only those that answer; a policy's ticket for one that does not is refused, and counted."""
    jobs = trace((0, 8, 10, 10))
    plain = scenario(8, 8)
    dark = msgspec.structs.replace(plain.pools[0], unreachable_windows=((0.0, 50.0),))
    world = msgspec.structs.replace(plain, pools=(dark, plain.pools[1]))
    assert list(engine.simulate(jobs, world, "slurm-m").pool) == [1]

    def policy(
        now_s: float, jobs: Sequence[PendingJob], pools: Mapping[str, PoolState], tickets: Sequence[Ticket]
    ) -> list[object]:
        return [Submit(job_id=job.job_id, pool="a") for job in jobs]

    result = engine.simulate(jobs, world, policy, tick_s=0)  # type: ignore[arg-type]
    assert (result.refused, result.placed, starts(result)) == (1, 1, [50])


@pytest.mark.parametrize("kind", ["unreachable_windows", "outage_windows", "maintenance_windows"])
def test_a_federation_uses_a_pool_that_is_back(kind: str) -> None:
    """A job that is submitted while a pool is away starts there once it is back, if the others are busy."""
    jobs = trace((101, 4, 2000, 2000), (150, 4, 10, 10))
    plain = scenario(4, 4)
    away = msgspec.structs.replace(plain.pools[0], **{kind: ((100.0, 500.0),)})
    world = msgspec.structs.replace(plain, pools=(away, plain.pools[1]))
    result = engine.simulate(jobs, world, "federation")
    assert (list(result.pool), starts(result)) == ([1, 0], [101, 500])
    assert engine.simulate(jobs, world, "most-free").pool[0] == 1  # none of the idle units of a can be had


def test_a_bound_job_stays_where_it_is() -> None:
    """Under -M a job waits where the plan by limits said, though another pool is free long before."""
    jobs = trace((0, 4, 10, 1000), (1, 4, 900, 900), (2, 4, 5, 5), (3, 4, 5, 5))
    result = engine.simulate(jobs, scenario(4, 4), "slurm-m")
    # j0 could take until 1000, so j2 goes behind j1, until 901; then a is planned to be free first, and is at 10.
    assert list(result.pool) == [0, 1, 1, 1]
    assert starts(result) == [0, 1, 901, 906]


def test_a_policy_is_told_of_speeds_and_closed_windows() -> None:
    """Run times and limits are those of the pool; in a window nothing is free before its end, after it all is."""
    plain = scenario(8)
    pool = msgspec.structs.replace(plain.pools[0], speed=2.0, maintenance_windows=((0.0, 100.0),))
    observed: list[tuple[float, float, float, int, list[tuple[float, int]]]] = []

    def policy(
        now_s: float, jobs: Sequence[PendingJob], pools: Mapping[str, PoolState], tickets: Sequence[Ticket]
    ) -> list[object]:
        option = jobs[0].options[0]
        observed.append((now_s, option.run_s, option.limit_s, pools["a"].free, list(pools["a"].running)))
        return []

    world = msgspec.structs.replace(plain, pools=(pool,))
    engine.simulate(trace((10, 4, 50, 80)), world, policy, tick_s=0)  # type: ignore[arg-type]
    assert observed == [(10, 40, 40, 0, [(100, 8)]), (100, 40, 40, 8, [])]


def test_a_job_that_ran_beyond_its_limit_had_a_longer_one() -> None:
    """Schedulers let some run on: what counts is that no plan ends before the job does."""
    result = engine.simulate(trace((0, 4, 100, 60), (1, 8, 1, 1), (10, 4, 80, 80)), scenario(8), "federation")
    assert list(result.limit_s) == [100, 1, 80]
    assert starts(result) == [0, 100, 10]


def test_a_predictor_hears_of_what_ended_and_only_then() -> None:
    """The second job is guessed at when the first has ended, the third while the second runs."""
    reported: list[float] = []

    class Counts(RuntimePredictor):
        def mean_s(self, known: JobFeatures) -> float:
            reported.append(-1.0)
            return 1.0

        def add_run(self, known: JobFeatures, run_s: float) -> None:
            reported.append(run_s)

    def policy(
        now_s: float, jobs: Sequence[PendingJob], pools: Mapping[str, PoolState], tickets: Sequence[Ticket]
    ) -> list[object]:
        return [Submit(job_id=job.job_id, pool="a") for job in jobs]

    jobs = trace((0, 4, 50, 80), (60, 4, 30, 30), (70, 4, 5, 5))
    engine.simulate(jobs, scenario(8), policy, tick_s=0, predictor=Counts())  # type: ignore[arg-type]
    assert reported == [-1, 50, -1, -1, 5, 30]


def test_free_space_counts_what_ends() -> None:
    """A job starts when as many units are free as it needs, whatever the running jobs hold each."""
    pool = SimpleNamespace(free=0, units=4, running=[(10.0, 0, 1), (20.0, 1, 1), (30.0, 2, 2)], queue=[])
    pool.opens_s = lambda start_s, _: start_s
    arrival = SimpleNamespace(schedulers=[pool], now_s=0.0, demand=lambda _: (4, 60.0))
    assert baselines.free_space_start(cast(baselines.Arrival, arrival), 0) == 30
