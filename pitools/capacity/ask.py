"""Answer what-ifs: synthetic months, the same for every what-if, replayed on the pools as changed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np

from pitools.capacity.synthesize import synthesize
from pitools.capacity.what_if import WhatIf, owned_cost, shift_windows
from pitools.capacity.workload import ALL, percentile, team_names
from pitools.core.errors import UsageError
from pitools.core.record import Record
from pitools.core.worker_pool import run_tasks
from pitools.place.simulate import replay
from pitools.place.simulate.metrics import gpu_time_shares
from pitools.place.simulate.model import DAY_S, HOUR_S, Result, Trace

_WEEK_DAYS = 7
_MAX_WARM_UP_WEEKS = 13  # which at most doubles the cost of a quarter
MAX_MISSING = 0.01
_ENDLESS_S = 1e12  # above any wait, and to interpolate with


class Period(msgspec.Struct, frozen=True, kw_only=True):
    """What each what-if is simulated for. growth_per_week: as for `synthesize`. policy: as of `pit place simulate`."""

    days: int = 91
    growth_per_week: float = 0.0
    policy: str = "federation"


class GroupWaits(msgspec.Struct, frozen=True):
    """The waits of a group's jobs, in s; that of a job which never ends is infinite."""

    jobs: int
    p50: float
    p95: float


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One what-if with one seed; see `CapacityAnswer`. load: the jobs' work over what all GPUs can do in the period."""

    what_if: str
    seed: int
    waits: dict[str, GroupWaits]
    utilisation: float
    goodput: float
    cost: float
    unfinished: int
    load: float


class CapacityAnswer(Record, frozen=True, kw_only=True, tag="pit.capacity-answer/1"):
    """One group of jobs under one what-if: medians over the seeds, with the lowest and highest.

    what_if: the changes, "" for today. group: all, "tier NAME" (QOS, or queue) or "team NAME" (account). wait: from
    submission to end, without the time in which the job ran, so also between the attempts of one that is continued;
    null: the job never ends. utilisation, goodput: as of `pit place simulate`, of the pools that are not rented. cost:
    those for the whole period, rented ones per hour of a job that starts in it. unfinished: jobs that no pool can hold,
    or that never end.
    """

    what_if: str
    group: str
    seeds: int
    jobs: float
    wait_p50_s: float
    wait_p50_low_s: float
    wait_p50_high_s: float
    wait_p95_s: float
    wait_p95_low_s: float
    wait_p95_high_s: float
    utilisation: float
    utilisation_low: float
    utilisation_high: float
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
                    where = f'"{world.text}"' if world.text else "pools of today"
                    raise UsageError(problem, where=where, hint="give more --days")


def simulate_all(
    trace: Trace,
    worlds: Sequence[WhatIf],
    period: Period,
    *,
    seeds: int,
    advance: Callable[[int], object] = lambda _: None,
) -> list[Outcome]:
    """Return the outcome of every world with every seed, on all cores. advance: called for each finished replay."""
    tasks = [(world, seed) for seed in range(seeds) for world in worlds]
    order = {(world.text, seed): number for number, (world, seed) in enumerate(tasks)}
    outcomes = replay_queue(trace, period, tasks, advance=advance)
    return sorted(outcomes, key=lambda outcome: order[outcome.what_if, outcome.seed])


def replay_queue(
    trace: Trace,
    period: Period,
    queue: list[tuple[WhatIf, int]],
    is_needed: Callable[[tuple[WhatIf, int]], bool] = lambda _: True,
    advance: Callable[[int], object] = lambda _: None,
) -> Iterator[Outcome]:
    """Yield the outcomes of worlds and seeds as they finish, on all cores, until the queue is empty: it may be extended
    meanwhile. is_needed: called before each; another is left out."""
    while queue:
        workers = min(len(queue), len(os.sched_getaffinity(0)))
        tasks = filter(is_needed, iter(lambda: queue.pop(0) if queue else None, None))
        for outcome in run_tasks(tasks, partial(_Replayer, trace, period), workers=workers, stop_timeout_s=0.0):
            advance(1)
            yield outcome


def summarize_outcomes(outcomes: Sequence[Outcome]) -> Iterator[CapacityAnswer]:
    """Yield an answer per what-if and group of jobs; not of a single tier or team, nor of tiers that are the teams."""
    by_what_if: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        by_what_if.setdefault(outcome.what_if, []).append(outcome)
    every = sorted({group for outcome in outcomes for group in outcome.waits}, key=lambda group: (group != ALL, group))
    tiers, teams = ({group[5:] for group in every if group.startswith(kind)} for kind in ("tier ", "team "))
    shown = [ALL, *(f"team {name}" for name in teams if len(teams) > 1)]
    shown += [f"tier {name}" for name in tiers if len(tiers) > 1 and tiers != teams]
    for what_if, same in by_what_if.items():
        for group in filter(shown.__contains__, every):
            waits = [outcome.waits[group] for outcome in same if group in outcome.waits]
            if not waits:
                continue
            yield CapacityAnswer(
                what_if=what_if,
                group=group,
                seeds=len(same),
                jobs=float(np.median([outcome.waits[group].jobs if group in outcome.waits else 0 for outcome in same])),
                goodput=float(np.median([outcome.goodput for outcome in same])),
                unfinished=float(np.median([outcome.unfinished for outcome in same])),
                **_band("wait_p50", [wait.p50 for wait in waits], "_s"),
                **_band("wait_p95", [wait.p95 for wait in waits], "_s"),
                **_band("utilisation", [outcome.utilisation for outcome in same]),
                **_band("cost", [outcome.cost for outcome in same]),
            )


def warm_up(trace: Trace) -> tuple[int, float]:
    """Return the days before the period, from a Monday on, in which the pools fill, and what is then still missing.

    That is the share of the jobs' GPU time which lies further from their submission, by their run times and known
    waits: at most MAX_MISSING, unless that takes more than a quarter.
    """
    run_s, gpus = np.asarray(trace.run_s), np.asarray(trace.gpus)
    from_submission_s = run_s + np.maximum(trace.wait_s, 0.0) if trace.wait_s else run_s
    days, missing = 0, 1.0
    while missing > MAX_MISSING and days < _MAX_WARM_UP_WEEKS * _WEEK_DAYS:
        days += _WEEK_DAYS
        later_s = np.clip(from_submission_s - days * DAY_S, 0.0, run_s)
        missing = float((gpus * later_s).sum() / (gpus * run_s).sum())
    return days, missing


class _Replayer:
    """Replays worlds in a worker process; keeps the last synthetic jobs, which most worlds share."""

    def __init__(self, trace: Trace, period: Period) -> None:
        self.trace, self.period, self.warm_up_days = trace, period, warm_up(trace)[0]
        self.kept: tuple[object, Trace] | None = None

    def __call__(self, task: tuple[WhatIf, int]) -> Outcome:
        world, seed = task
        jobs = self._jobs(world, seed)
        from_s = self.warm_up_days * DAY_S
        scenario = msgspec.structs.replace(shift_windows(world.scenario, from_s), seed=seed)
        result, _ = replay.replay(jobs, scenario, self.period.policy)
        return summarize_replay(result, jobs, world, seed, (from_s, from_s + self.period.days * DAY_S))

    def close(self) -> None:
        """Forget the jobs."""
        self.kept = None

    def _jobs(self, world: WhatIf, seed: int) -> Trace:
        key = (seed, tuple(sorted(world.team_factors.items())))
        if self.kept is None or self.kept[0] != key:
            jobs = synthesize(
                self.trace,
                days=self.warm_up_days + self.period.days,
                seed=seed,
                team_factors=world.team_factors,
                growth_per_week=self.period.growth_per_week,
                warm_up_days=self.warm_up_days,
            )
            self.kept = key, jobs
        return self.kept[1]


def summarize_replay(result: Result, jobs: Trace, world: WhatIf, seed: int, within_s: tuple[float, float]) -> Outcome:
    """Return the outcome over the jobs submitted, and the GPU time, within the period."""
    from_s, to_s = within_s
    submit_s, end_s = np.frombuffer(result.submit_s), np.frombuffer(result.end_s)
    spans, pools = result.spans, result.scenario.pools
    span_s = np.frombuffer(spans.end_s) - np.frombuffer(spans.start_s)
    ran_s = np.bincount(np.frombuffer(spans.job, np.int32), span_s, minlength=len(jobs))
    wait_s = np.where(np.isfinite(end_s), np.maximum(end_s - submit_s - ran_s, 0.0), np.inf)
    work = np.asarray(jobs.gpus) * np.asarray(jobs.run_s)
    is_inside = (submit_s >= from_s) & (submit_s < to_s)
    groups = {group: wait_s[is_inside & members] for group, members in _groups(jobs)}
    owned = [number for number, pool in enumerate(pools) if pool.pool not in world.rented]
    utilisation, goodput = gpu_time_shares(result, jobs, within_s, owned)
    return Outcome(
        what_if=world.text,
        seed=seed,
        waits={
            group: GroupWaits(len(waits), *(_percentile(waits, share) for share in (50, 95)))
            for group, waits in groups.items()
            if len(waits)
        },
        utilisation=utilisation,
        goodput=goodput,
        cost=owned_cost(world, (to_s - from_s) / DAY_S) + _rent(result, world, within_s),
        unfinished=int(np.isinf(groups[ALL]).sum()),
        load=float(work[is_inside].sum()) / (sum(pool.gpus * pool.speed for pool in pools) * (to_s - from_s)),
    )


def _percentile(waits: Any, share: float) -> float:
    """Return a percentile as everywhere, between two waits; infinite if the longer one is."""
    is_endless = np.isinf(np.percentile(waits, share, method="higher"))
    return np.inf if is_endless else percentile(np.minimum(waits, _ENDLESS_S), share)


def _groups(jobs: Trace) -> Iterator[tuple[str, Any]]:
    yield ALL, np.ones(len(jobs), bool)
    for name, values in (("tier", np.array(jobs.queue)), ("team", np.array(team_names(jobs)))):
        kinds, number = np.unique(values, return_inverse=True)
        yield from ((f"{name} {kind}", number == each) for each, kind in enumerate(kinds) if kind)


def _rent(result: Result, world: WhatIf, within_s: tuple[float, float]) -> float:
    """Return the cost of the hours of attempts in rented pools that start within the period."""
    spans = result.spans
    start_s, end_s = np.frombuffer(spans.start_s), np.frombuffer(spans.end_s)
    pool, gpus = np.frombuffer(spans.pool, np.int32), np.frombuffer(spans.gpus, np.int32)
    before, until = (np.ceil((np.clip(edge, start_s, end_s) - start_s) / HOUR_S - 1e-6) for edge in within_s)
    price = np.array([each.price if each.pool in world.rented else 0.0 for each in world.scenario.pools])
    return float((price[pool] * gpus * (until - before)).sum())


def _band(name: str, values: Sequence[float], unit: str = "") -> dict[str, float]:
    low, middle, high = min(values), float(np.median(values)), max(values)
    return {f"{name}{unit}": middle, f"{name}_low{unit}": low, f"{name}_high{unit}": high}
