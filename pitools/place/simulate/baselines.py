"""Baseline policies: a job is bound to one or several pools once, when it is submitted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from random import Random
from typing import NamedTuple

from pitools.core.errors import UsageError, suggest
from pitools.place.simulate.model import Scenario
from pitools.place.simulate.pool_scheduler import PoolScheduler
from pitools.place.simulate.workload import Workload


class Arrival(NamedTuple):
    """A job that is submitted now.

    pools: indices of the pools that are large enough and answer, if any does; every: also of those that do not.
    schedulers: the state of every pool.
    """

    now_s: float
    job: int
    pools: Sequence[int]
    every: Sequence[int]
    schedulers: Sequence[PoolScheduler]
    work: Workload

    def demand(self, pool: int) -> tuple[int, float]:
        """Return the job's units and time limit in a pool."""
        return self.work.units_on(self.job, pool), self.work.limit_on(self.job, pool)


Baseline = Callable[[Arrival], Sequence[int]]


def make_baseline(name: str, scenario: Scenario) -> Baseline:
    """Return the named policy: arrival → the pools whose queues the job joins. Raises UsageError."""
    if name not in BASELINES:
        raise UsageError(f'no policy "{name}"', hint=suggest(name, BASELINES))
    return BASELINES[name](scenario)


class PlannedStart:
    """Computes the start of a job if it were submitted now, by the time limits of all jobs.

    The queue is planned in order, without overtaking, and the job after it. The plan is kept and extended until the
    pool's version changes.
    """

    def __init__(self) -> None:
        self._plans: dict[int, tuple[int, int, int, float, list[tuple[float, int]]]] = {}

    def __call__(self, arrival: Arrival, pool: int) -> float:
        """Return the start in this pool."""
        site = arrival.schedulers[pool]
        version, count, free, start_s, ends = self._plans.get(pool, (-1, 0, 0, 0.0, []))
        if version != site.version:
            # Ascending, so it is a heap.
            count, free, start_s = 0, site.free, arrival.now_s
            ends = [(end_s, held_units) for end_s, _, held_units in site.running]
        for _, _, _, units, limit_s in site.queue[count:]:
            while free < units:
                start_s, freed = heappop(ends)
                free += freed
            free -= units
            heappush(ends, (start_s + limit_s, units))
        self._plans[pool] = site.version, len(site.queue), free, start_s, ends
        units, limit_s = arrival.demand(pool)
        if free >= units:
            return site.opens_s(max(start_s, arrival.now_s), limit_s)
        for end_s, freed in sorted(ends):
            free += freed
            if free >= units:
                start_s = end_s
                break
        return site.opens_s(start_s, limit_s)


def free_space_start(arrival: Arrival, pool: int) -> float:
    """Return a job's start if it were submitted now, as slurmctld's job_start_data estimates it.

    That is after the running jobs, by their limits, and later by the queue's units x limit over the pool's units.
    """
    site, (units, limit_s) = arrival.schedulers[pool], arrival.demand(pool)
    free, start_s = site.free, arrival.now_s
    for end_s, _, freed in site.running:
        if free >= units:
            break
        start_s, free = end_s, free + freed
    return site.opens_s(
        start_s + sum(queued_units * limit for *_, queued_units, limit in site.queue) / site.units, limit_s
    )


def _earliest_start(rule: Callable[[Arrival, int], float]) -> Baseline:
    """Bind a job as Slurm's -M does: to the cluster with the earliest start; of equals, the first."""
    return lambda arrival: (min(arrival.pools, key=lambda pool: rule(arrival, pool)),)


def _earliest_end() -> Baseline:
    """Bind a job to the pool with the earliest end, by time limits."""
    rule = PlannedStart()
    return lambda arrival: (min(arrival.pools, key=lambda pool: rule(arrival, pool) + arrival.demand(pool)[1]),)


def _federation(arrival: Arrival) -> Sequence[int]:
    """Queue a sibling job in every cluster, as Slurm's federation does; the first to start runs.

    slurmctld repeats the submission to a cluster that does not answer until it does (_queue_rpc in fed_mgr.c).
    """
    return arrival.every


def _most_free(arrival: Arrival) -> Sequence[int]:
    """Bind a job to the pool with the most idle units, none in a maintenance window; of equals, the first."""
    sites, now_s = arrival.schedulers, arrival.now_s
    return (max(arrival.pools, key=lambda pool: sites[pool].free * (sites[pool].opens_s(now_s, 0.0) <= now_s)),)


def _round_robin(arrival: Arrival) -> Sequence[int]:
    """Bind each job to the next pool."""
    return (arrival.pools[arrival.job % len(arrival.pools)],)


def _random(seed: int) -> Baseline:
    """Bind a job to a random pool that is large enough."""
    random = Random(f"pools {seed}")  # noqa: S311  a simulation is to be repeated
    return lambda arrival: (random.choice(arrival.pools),)


def _cheapest(scenario: Scenario) -> Baseline:
    """Bind a job to the cheapest pool, as SkyPilot does; of equals, the first."""
    return lambda arrival: (min(arrival.pools, key=lambda pool: scenario.pools[pool].price),)


BASELINES: dict[str, Callable[[Scenario], Baseline]] = {
    "slurm-m": lambda _: _earliest_start(PlannedStart()),
    "slurm-m-space": lambda _: _earliest_start(free_space_start),
    "federation": lambda _: _federation,
    "skypilot": _cheapest,
    "most-free": lambda _: _most_free,
    "soonest-end": lambda _: _earliest_end(),
    "round-robin": lambda _: _round_robin,
    "random": lambda scenario: _random(scenario.seed),
}
