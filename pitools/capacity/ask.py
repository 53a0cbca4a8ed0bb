"""Answer what-ifs: synthetic months, the same for every what-if, replayed on the pools as changed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np

from pitools.capacity.what_if import WhatIf, owned_cost, shift_windows
from pitools.capacity.synthesize import synthesize
from pitools.capacity.workload import ALL, percentile, team_names
from pitools.core.errors import UsageError
from pitools.core.record import Record
from pitools.core.worker_pool import run_tasks
from pitools.place.simulate import replay
from pitools.place.simulate.model import DAY_S, HOUR_S, Result, Trace

WARM_UP_DAYS = 7  # from a Monday on, before the period, so that its first jobs do not find empty pools


class Period(msgspec.Struct, frozen=True, kw_only=True):
    """What each what-if is simulated for. growth_per_week: as for `synthesize`. policy: as of `pit place simulate`."""

    days: int = 91
    growth_per_week: float = 0.0
    policy: str = "federation"


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One what-if with one seed. waits: group → jobs, p50 and p95 of the wait in s. cost: of the period."""

    what: str
    seed: int
    waits: dict[str, tuple[int, float, float]]
    use: float
    goodput: float
    cost: float
    unfinished: int


class CapacityAnswer(Record, frozen=True, kw_only=True, tag="pit.capacity-answer/1"):
    """One group of jobs under one what-if: medians over the seeds, with the lowest and highest.

    what: the changes, "" for today. group: all, "tier 1", "queue NAME" or "team NAME". wait: to the first start. use:
    GPU time held over GPU time there was; goodput: the part of the GPU time held that no failure, outage or preemption
    undid; cost: owned pools for the whole period, rented ones by the started hour of a job. unfinished: jobs that no
    pool can hold, or never started.
    """

    what: str
    group: str
    seeds: int
    jobs: float
    wait_p50_s: float
    wait_p50_low_s: float
    wait_p50_high_s: float
    wait_p95_s: float
    wait_p95_low_s: float
    wait_p95_high_s: float
    use: float
    use_low: float
    use_high: float
    goodput: float
    cost: float
    cost_low: float
    cost_high: float
    unfinished: float


def require_inside(worlds: Sequence[WhatIf], period: Period) -> None:
    """Raise UsageError for a what-if with a pool that is away only after the period."""
    for world in worlds:
        for pool in world.scenario.pools:
            for from_s, _ in (*pool.maintenance_windows, *pool.unreachable_windows, *pool.outage_windows):
                if from_s >= period.days * DAY_S:
                    problem = f"{pool.pool} is away from day {from_s / DAY_S:g} on (expected before day {period.days})"
                    raise UsageError(problem, where=f'"{world.text}"', hint="give more --days")


def simulate_all(
    trace: Trace,
    worlds: Sequence[WhatIf],
    period: Period,
    *,
    seeds: int,
    first_seed: int = 0,
    advance: Callable[[int], object] = lambda _: None,
) -> list[Outcome]:
    """Return the outcome of every world with every seed, on all cores. advance: called for each finished replay."""
    tasks = [(world, seed) for seed in range(first_seed, first_seed + seeds) for world in worlds]
    make_worker = partial(_Replayer, trace, period)
    outcomes = []
    for outcome in run_tasks(tasks, make_worker, workers=min(len(tasks), len(os.sched_getaffinity(0)))):
        outcomes.append(outcome)
        advance(1)
    order = {(world.text, seed): number for number, (world, seed) in enumerate(tasks)}
    return sorted(outcomes, key=lambda outcome: order[outcome.what, outcome.seed])


def summarize_outcomes(outcomes: Sequence[Outcome]) -> Iterator[CapacityAnswer]:
    """Yield an answer per what-if and group of jobs."""
    by_what: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        by_what.setdefault(outcome.what, []).append(outcome)
    for what, same in by_what.items():
        groups = sorted({group for outcome in same for group in outcome.waits}, key=lambda group: (group != ALL, group))
        for group in groups:
            waits = [outcome.waits[group] for outcome in same if group in outcome.waits]
            p50, p95 = _band([wait[1] for wait in waits]), _band([wait[2] for wait in waits])
            use, cost = _band([outcome.use for outcome in same]), _band([outcome.cost for outcome in same])
            yield CapacityAnswer(
                what=what,
                group=group,
                seeds=len(same),
                jobs=_band([wait[0] for wait in waits])[0],
                wait_p50_s=p50[0],
                wait_p50_low_s=p50[1],
                wait_p50_high_s=p50[2],
                wait_p95_s=p95[0],
                wait_p95_low_s=p95[1],
                wait_p95_high_s=p95[2],
                use=use[0],
                use_low=use[1],
                use_high=use[2],
                goodput=_band([outcome.goodput for outcome in same])[0],
                cost=cost[0],
                cost_low=cost[1],
                cost_high=cost[2],
                unfinished=_band([outcome.unfinished for outcome in same])[0],
            )


class _Replayer:
    """Replays worlds in a worker process; keeps the last synthetic jobs, which most worlds share."""

    def __init__(self, trace: Trace, period: Period) -> None:
        self.trace, self.period = trace, period
        self.kept: tuple[object, Trace] | None = None

    def __call__(self, task: tuple[WhatIf, int]) -> Outcome:
        world, seed = task
        jobs = self._jobs(world, seed)
        scenario = msgspec.structs.replace(shift_windows(world.scenario, WARM_UP_DAYS * DAY_S), seed=seed)
        result, _ = replay.replay(jobs, scenario, self.period.policy)
        return summarize_replay(result, jobs, world, seed, WARM_UP_DAYS * DAY_S)

    def close(self) -> None:
        """Forget the jobs."""
        self.kept = None

    def _jobs(self, world: WhatIf, seed: int) -> Trace:
        key = (seed, tuple(sorted(world.team_factors.items())))
        if self.kept is None or self.kept[0] != key:
            jobs = synthesize(
                self.trace,
                days=WARM_UP_DAYS + self.period.days,
                seed=seed,
                team_factors=world.team_factors,
                growth_per_week=self.period.growth_per_week,
            )
            self.kept = key, jobs
        return self.kept[1]


def summarize_replay(result: Result, jobs: Trace, world: WhatIf, seed: int, from_s: float) -> Outcome:
    """Return the outcome over the jobs submitted, and the GPU time held, from `from_s` to the last day's end."""
    submit_s, start_s, end_s = (np.frombuffer(column) for column in (result.submit_s, result.start_s, result.end_s))
    to_s = float(np.ceil(submit_s[-1] / DAY_S)) * DAY_S
    is_inside, has_ended = submit_s >= from_s, np.isfinite(end_s)
    wait_s = start_s - submit_s
    waits = {}
    for group, members in _groups(result, jobs):
        waited = wait_s[is_inside & has_ended & members]
        if len(waited):
            waits[group] = (len(waited), percentile(waited, 50), percentile(waited, 95))
    spans, pools = result.spans, result.scenario.pools
    span_start, span_end = np.frombuffer(spans.start_s), np.frombuffer(spans.end_s)
    job, pool, gpus = (np.frombuffer(column, np.int32) for column in (spans.job, spans.pool, spans.gpus))
    held_s = gpus * np.clip(np.minimum(span_end, to_s) - np.maximum(span_start, from_s), 0.0, None)
    speed = np.array([each.speed for each in pools])
    held = float((gpus * (span_end - span_start) * speed[pool])[has_ended[job]].sum())
    work = float((np.asarray(jobs.gpus) * np.asarray(jobs.run_s))[has_ended].sum())
    return Outcome(
        what=world.text,
        seed=seed,
        waits=waits,
        use=float(held_s.sum()) / (sum(each.gpus for each in pools) * (to_s - from_s)),
        goodput=min(1.0, work / held) if held else 1.0,
        cost=owned_cost(world, (to_s - from_s) / DAY_S)
        + _rent(world, span_start, span_end, pool, gpus, (from_s, to_s)),
        unfinished=int((is_inside & ~has_ended).sum()),
    )


def _groups(result: Result, jobs: Trace) -> Iterator[tuple[str, Any]]:
    yield ALL, np.ones(len(jobs), bool)
    columns = {"tier": np.frombuffer(result.tier, np.int32), "team": np.array(team_names(jobs))}
    if any(jobs.account):
        columns["queue"] = np.array(jobs.queue)  # else the queues are the teams
    for name, values in columns.items():
        kinds = np.unique(values)
        if len(kinds) > 1:
            yield from ((f"{name} {kind}", values == kind) for kind in kinds)


def _rent(world: WhatIf, start_s: Any, end_s: Any, pool: Any, gpus: Any, within_s: tuple[float, float]) -> float:
    """Return the cost of the attempts that start within the period in rented pools."""
    is_within = (start_s >= within_s[0]) & (start_s < within_s[1])
    total = 0.0
    for number, each in enumerate(world.scenario.pools):
        if each.pool in world.rented:
            here = is_within & (pool == number)
            total += each.price * float((gpus[here] * np.ceil((end_s - start_s)[here] / HOUR_S)).sum())
    return total


def _band(values: Sequence[float]) -> tuple[float, float, float]:
    return float(np.median(values)), float(min(values)), float(max(values))
