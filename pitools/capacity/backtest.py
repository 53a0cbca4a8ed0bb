"""Compare forecasts of waits with the real waits of the next period, and with "the same as last period".

The forecast of a period is the median wait of the three before: one period's wait scatters too much to be the next
one's. Beside it stands what the model of `ask` says: the simulator replays the last period's submissions on as many
GPUs as give its real wait (a trace does not say how many there were, nor what else slowed starts), and then synthetic
periods of the history's shape and growth on the same GPUs.

A replay of the period's real submissions, which nobody has before, tells the error of the cluster's model from that of
the jobs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from math import log
from statistics import median

import msgspec
import numpy as np

from pitools.capacity.synthesize import synthesize
from pitools.capacity.workload import ALL, Bools, Floats, percentile
from pitools.core.errors import DataError
from pitools.core.record import Record
from pitools.place.simulate import engine
from pitools.place.simulate.model import DAY_S, Scenario, SimPool, Trace

POLICY = "federation"
WITHIN = 0.3  # a forecast of this relative error is good
MIN_JOBS = 100  # of a group in a period, so that its p95 is one
LEAST_WAIT_S = 60.0  # a wait below it counts as it: nobody plans for seconds, and a ratio to zero says nothing
_REMEMBERED = 3  # periods
_CALIBRATION_STEPS = 10
_FIT = log(1.5)  # a calibrated wait further off than by this factor is not the real one
_WEEKDAYS = 7

Waits = dict[str, float]  # group → p95 wait in s


class BacktestPeriod(Record, frozen=True, kw_only=True, tag="pit.backtest-period/1"):
    """One period of a trace and one group of its jobs: all, or those of a queue. period: from 1 on; 1 has no forecast.

    wait_p95_s: real. forecast_s: the median of the last three real ones. naive_s: the real one of the period before.
    simulated_s: by the model of `ask`, with the lowest and highest of its seeds. given_jobs_s: by the same model on the
    real submissions, which nobody has before. gpus: with which the simulator gives about the last period's real p95
    wait of all jobs, 0 if with none: then both are the last period's wait. error: relative.
    """

    trace: str
    period: int
    group: str
    from_day: int
    days: int
    jobs: int
    wait_p95_s: float
    forecast_s: float
    naive_s: float
    simulated_s: float
    simulated_low_s: float
    simulated_high_s: float
    given_jobs_s: float
    gpus: int
    forecast_error: float
    naive_error: float
    simulated_error: float
    given_jobs_error: float


class BacktestSummary(Record, frozen=True, kw_only=True, tag="pit.backtest/1"):
    """All forecasts for a group of jobs. error: medians of the relative errors. better: share of the periods in which
    the forecast is nearer than naive; equally near counts half. within: share with an error of at most 30 %.
    """

    trace: str
    group: str
    periods: int
    forecast_error: float
    naive_error: float
    simulated_error: float
    given_jobs_error: float
    better: float
    forecast_within: float
    naive_within: float


def backtest(
    trace: Trace,
    *,
    days: int = 28,
    seeds: int = 5,
    depth: int = 500,
    advance: Callable[[int], object] = lambda _: None,
) -> Iterator[BacktestPeriod]:
    """Yield a forecast for each period of a trace, and for each group of at least 100 jobs whose wait is known.

    A group that had fewer in the period before has none. advance: called after each period. Raises DataError for a
    trace without real waits, or of fewer than two whole periods.
    """
    if not any(wait >= 0 for wait in trace.wait_s):
        hint = "give the output of sacct -P with the columns Submit and Start, SWF, or a published log with waits"
        raise DataError(
            "no real waits (expected a trace with times of submission and start)", where=trace.name, hint=hint
        )
    parts = list(_split(trace, days))
    if len(parts) < 2:
        raise DataError(f"{len(parts)} whole periods of {days} days (expected two or more)", where=trace.name)
    past: dict[str, list[float]] = {}
    queues = set(trace.queue)
    before, naive = parts[0], Waits()
    for number, now in enumerate(parts, start=1):
        real = _p95_by_group(now, now.wait_s)
        real = real if len(queues) > 1 else {group: wait_s for group, wait_s in real.items() if group == ALL}
        if groups := [group for group in real if group in naive]:
            history = _slice(trace, 0, int(np.searchsorted(trace.submit_s, (number - 1) * days * DAY_S)))
            gpus, simulations, given_jobs = _simulate(history, before, now, naive, (days, seeds, depth))
            for group in groups:
                yield _judge(
                    BacktestPeriod(
                        trace=now.name,
                        period=number,
                        group=group,
                        from_day=(number - 1) * days,
                        days=days,
                        jobs=int(_members(now, group).sum()),
                        wait_p95_s=real[group],
                        forecast_s=median(past[group][-_REMEMBERED:]),
                        naive_s=naive[group],
                        simulated_s=median(each[group] for each in simulations),
                        simulated_low_s=min(each[group] for each in simulations),
                        simulated_high_s=max(each[group] for each in simulations),
                        given_jobs_s=given_jobs[group],
                        gpus=gpus,
                        forecast_error=0.0,
                        naive_error=0.0,
                        simulated_error=0.0,
                        given_jobs_error=0.0,
                    )
                )
        for group, wait_s in real.items():
            past.setdefault(group, []).append(wait_s)
        before, naive = now, real
        advance(1)


def summarize_backtest(periods: Sequence[BacktestPeriod], trace: str) -> list[BacktestSummary]:
    """Return the figures of each group over all its forecasts, all jobs first. Raises DataError for none."""
    if not periods:
        raise DataError(f"no two neighbouring periods with {MIN_JOBS} jobs whose wait is known", where=trace)
    groups = sorted({each.group for each in periods}, key=lambda group: (group != ALL, group))
    return [_summarize([each for each in periods if each.group == group]) for group in groups]


def _summarize(periods: Sequence[BacktestPeriod]) -> BacktestSummary:
    forecast, naive = (np.array([getattr(each, key) for each in periods]) for key in ("forecast_error", "naive_error"))
    return BacktestSummary(
        trace=periods[0].trace,
        group=periods[0].group,
        periods=len(periods),
        forecast_error=float(np.median(forecast)),
        naive_error=float(np.median(naive)),
        simulated_error=median(each.simulated_error for each in periods),
        given_jobs_error=median(each.given_jobs_error for each in periods),
        better=float((0.5 + 0.5 * np.sign(np.round(naive - forecast, 6))).mean()),
        forecast_within=float((forecast <= WITHIN).mean()),
        naive_within=float((naive <= WITHIN).mean()),
    )


def _simulate(
    history: Trace, before: Trace, now: Trace, naive: Waits, numbers: tuple[int, int, int]
) -> tuple[int, list[Waits], Waits]:
    """Return the GPUs, the model's forecast by seed, and that given the jobs. numbers: days, seeds and depth."""
    days, seeds, depth = numbers
    gpus = _calibrate(before, naive[ALL], depth)
    if not gpus:
        return 0, [naive], naive
    fitted = _simulated(before, gpus, depth)
    growth = _growth(history, days)
    periods = [synthesize(history, days=days, seed=seed, growth_per_week=growth) for seed in range(seeds)]
    *simulations, given_jobs = (
        {
            group: wait_s * at_least(simulated.get(group, 0.0)) / at_least(fitted.get(group, 0.0))
            for group, wait_s in naive.items()
        }
        for simulated in (_simulated(jobs, gpus, depth) for jobs in (*periods, now))
    )
    return gpus, simulations, given_jobs


def _judge(period: BacktestPeriod) -> BacktestPeriod:
    names = ("forecast", "naive", "simulated", "given_jobs")
    errors = {f"{name}_error": relative_error(getattr(period, f"{name}_s"), period.wait_p95_s) for name in names}
    return msgspec.structs.replace(period, **errors)


def relative_error(forecast_s: float, real_s: float) -> float:
    """Return the relative error of a wait; both are at least LEAST_WAIT_S."""
    return abs(at_least(forecast_s) / at_least(real_s) - 1)


def at_least(wait_s: float) -> float:
    """Return a wait, LEAST_WAIT_S for a shorter one."""
    return max(wait_s, LEAST_WAIT_S)


def _calibrate(jobs: Trace, target_s: float, depth: int) -> int:
    """Return the GPUs with which the simulated p95 wait of all jobs is nearest to the target, 0 if that is not near.

    By bisection.
    """
    busy = float(np.dot(jobs.gpus, jobs.run_s)) / max(jobs.submit_s[-1] - jobs.submit_s[0], DAY_S)
    low, high = max(max(jobs.gpus), 1), max(int(4 * busy), 2 * max(jobs.gpus))
    nearest, distance = 0, _FIT
    for _ in range(_CALIBRATION_STEPS):
        middle = round((low * high) ** 0.5)
        simulated_s = _simulated(jobs, middle, depth)[ALL]
        off = abs(log(at_least(simulated_s) / at_least(target_s)))
        if off < distance:
            nearest, distance = middle, off
        if high - low < 2:
            break
        low, high = (middle, high) if simulated_s > at_least(target_s) else (low, middle)
    return nearest


def _growth(history: Trace, days: int) -> float:
    """Return the weekly growth of the GPU hours by a line through the logarithms of the periods, half of it.

    Half: with few periods a line follows their scatter, and growth goes on less often than it stops.
    """
    periods = int(history.submit_s[-1] // (days * DAY_S)) + 1
    if periods < 3:
        return 0.0
    number = (np.asarray(history.submit_s) // (days * DAY_S)).astype(int)
    work = np.bincount(number, np.asarray(history.gpus) * np.asarray(history.run_s), minlength=periods)
    slope = float(np.polyfit(np.arange(periods), np.log(work + 1), 1)[0]) * _WEEKDAYS / days / 2
    return float(np.clip(np.expm1(slope), -0.1, 0.1))


def _simulated(jobs: Trace, gpus: int, depth: int) -> Waits:
    scenario = Scenario(name="back-test", pools=(SimPool(pool="all", gpus=gpus),), backfill_depth=depth)
    result = engine.simulate(jobs, scenario, POLICY)
    wait_s = np.frombuffer(result.start_s) - np.frombuffer(result.submit_s)
    return _p95_by_group(jobs, np.where(np.isfinite(wait_s), wait_s, -1.0), least=1)


def _p95_by_group(jobs: Trace, wait_s: Sequence[float] | Floats, least: int = MIN_JOBS) -> Waits:
    """Return the p95 of the known waits of all jobs, and of each queue, with at least so many."""
    waits = np.asarray(wait_s, np.float64)
    groups = (ALL, *(f"queue {queue}" for queue in sorted(set(jobs.queue))))
    known = ((group, waits[_members(jobs, group) & (waits >= 0)]) for group in groups)
    return {group: percentile(values, 95) for group, values in known if len(values) >= least}


def _members(jobs: Trace, group: str) -> Bools:
    return np.array([group in (ALL, f"queue {queue}") for queue in jobs.queue], bool)


def _split(trace: Trace, days: int) -> Iterator[Trace]:
    """Yield the whole periods of a trace."""
    edges = np.arange(0.0, trace.submit_s[-1] + DAY_S, days * DAY_S)
    rows = np.searchsorted(trace.submit_s, edges)
    for first, last in pairwise(rows):
        yield _slice(trace, int(first), int(last))


def _slice(trace: Trace, first: int, last: int) -> Trace:
    changed = {
        key: getattr(trace, key)[first:last]
        for key in trace.__struct_fields__
        if key not in ("name", "began_s", "skipped", "unallocated")
    }
    return msgspec.structs.replace(trace, **changed)
