"""What others do: a job gets its pool, or its pools, once, when it is submitted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from random import Random
from typing import NamedTuple

from pitools.core.errors import UsageError, suggest
from pitools.place.simulate.backfill import Backfill
from pitools.place.simulate.model import Scenario
from pitools.place.simulate.workload import Workload


class Arrival(NamedTuple):
    """A job that is submitted now. pools: indices of those that are large enough; pools_state: the state of every
    pool."""

    now_s: float
    job: int
    pools: Sequence[int]
    pools_state: Sequence[Backfill]
    work: Workload

    def demand(self, pool: int) -> tuple[int, float]:
        """Units and limit, in this pool."""
        return self.work.units_on(self.job, pool), self.work.limit_on(self.job, pool)


Baseline = Callable[[Arrival], Sequence[int]]


def make_baseline(name: str, scenario: Scenario) -> Baseline:
    """The binder of this name: an arrival → the pools whose queues it joins. Raises UsageError for no such name."""
    if name not in BASELINES:
        raise UsageError(f'no policy "{name}"', hint=suggest(name, BASELINES))
    return BASELINES[name](scenario)


class PlannedStart:
    """When a job would start if it came now, by everybody's limits: the queue is planned in order, none of it before
    one ahead of it, and the job behind it. A plan is kept and extended until the pool is another."""

    def __init__(self) -> None:
        self._plans: dict[int, tuple[int, int, int, float, list[tuple[float, int]]]] = {}

    def __call__(self, arrival: Arrival, pool: int) -> float:
        """That moment, in this pool."""
        site = arrival.pools_state[pool]
        version, count, free, start_s, ends = self._plans.get(pool, (-1, 0, 0, 0.0, []))
        if version != site.version:
            # Ascending, so it is a heap.
            count, free, start_s = 0, site.free, arrival.now_s
            ends = [(end_s, held) for end_s, _, held in site.running]
        for _, _, _, asked, limit_s in site.queue[count:]:
            while free < asked:
                start_s, freed = heappop(ends)
                free += freed
            free -= asked
            heappush(ends, (start_s + limit_s, asked))
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
    """When a job would start if it came now, by the rule of slurmctld's job_start_data: behind what runs, by limits,
    and later by what the queue asks for, as units x limit, over the pool's units."""
    site, (units, limit_s) = arrival.pools_state[pool], arrival.demand(pool)
    free, start_s = site.free, arrival.now_s
    for end_s, _, held in site.running:
        if free >= units:
            break
        start_s, free = end_s, free + held
    return site.opens_s(start_s + sum(asked * limit for *_, asked, limit in site.queue) / site.units, limit_s)


def _earliest_start(rule: Callable[[Arrival, int], float]) -> Baseline:
    """Slurm's -M: the cluster that says the earliest start; of equals, the first."""
    return lambda arrival: (min(arrival.pools, key=lambda pool: rule(arrival, pool)),)


def _earliest_end() -> Baseline:
    """The pool with the earliest end, by limits."""
    rule = PlannedStart()
    return lambda arrival: (min(arrival.pools, key=lambda pool: rule(arrival, pool) + arrival.demand(pool)[1]),)


def _federation(arrival: Arrival) -> Sequence[int]:
    """Slurm's federation: a sibling in every cluster's queue; the first that starts is the job."""
    return arrival.pools


def _most_free(arrival: Arrival) -> Sequence[int]:
    """The pool with the most idle units; of equals, the first."""
    return (max(arrival.pools, key=lambda pool: arrival.pools_state[pool].free),)


def _round_robin(arrival: Arrival) -> Sequence[int]:
    """One pool after the other."""
    return (arrival.pools[arrival.job % len(arrival.pools)],)


def _random(seed: int) -> Baseline:
    """Any pool that is large enough."""
    random = Random(f"pools {seed}")  # noqa: S311  a simulation is to be repeated
    return lambda arrival: (random.choice(arrival.pools),)


def _cheapest(scenario: Scenario) -> Baseline:
    """SkyPilot: the least price, always; where all cost the same, as Slurm's clusters do there, the first."""
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
