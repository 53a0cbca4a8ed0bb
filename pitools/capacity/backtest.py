"""Compare forecasts of waits with the real waits of the next period, and with "the same as last period".

The forecast of a period is made from the periods before it alone, in one of two ways. Smoothed: the waits of the
periods so far, exponentially smoothed in the logarithm, as one period's wait scatters too much to be the next one's.
Simulated: the simulator replays the last period's submissions on as many GPUs as give its real wait (a trace does not
say how many there were, nor what else slowed starts), and then synthetic periods of the history's shape and growth on
the same GPUs; half of the change that it sees, in the logarithm, is applied to the smoothed wait. The second is used
once its forecasts of the earlier periods were nearer; where waits are not made by one queue they are not.

A replay of the period's real submissions, which nobody has before, tells the error of the cluster's model from that of
the jobs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import exp, log
from typing import Literal

import msgspec
import numpy as np

from pitools.capacity.synthesize import synthesize
from pitools.capacity.workload import percentile
from pitools.core.errors import DataError
from pitools.core.record import Record
from pitools.place.simulate import engine
from pitools.place.simulate.model import DAY_S, Scenario, SimPool, Trace

POLICY = "federation"
WITHIN = 0.3  # a forecast of this relative error is good
MIN_JOBS = 100  # of a period, so that its p95 is one
LEAST_WAIT_S = 60.0  # a wait below it counts as it: nobody plans for seconds, and a ratio to zero says nothing
_CALIBRATION_STEPS = 10
_FIT = log(1.5)  # a calibrated wait further off than by this factor is not the real one
_SHRINK = 0.5
_SMOOTHING = 0.5  # weight of the last period
_LEAST_FORECASTS = 2  # before the simulator's are used
_WEEKDAYS = 7


class BacktestPeriod(Record, frozen=True, kw_only=True, tag="pit.backtest-period/1"):
    """One period of a trace. period: from 1 on; the first has no forecast. wait_p95_s: real.

    method: smoothed or simulated. forecast_s: by that method, from the periods before. simulated_s: by the simulator,
    with the lowest and highest of its seeds. naive_s: the real p95 of the period before. given_jobs_s: by the simulator
    on the real submissions, which nobody has before. gpus: with which the simulator gives about the last period's real
    p95 wait, 0 if with none: then its forecast is the smoothed one. error: relative.
    """

    trace: str
    period: int
    from_day: int
    days: int
    jobs: int
    wait_p95_s: float
    method: Literal["smoothed", "simulated"]
    forecast_s: float
    simulated_s: float
    simulated_low_s: float
    simulated_high_s: float
    naive_s: float
    given_jobs_s: float
    gpus: int
    forecast_error: float
    simulated_error: float
    naive_error: float
    given_jobs_error: float


class BacktestSummary(Record, frozen=True, kw_only=True, tag="pit.backtest/1"):
    """All forecasts of a trace. error: medians of the relative errors. better: share of the periods in which the
    forecast is nearer than naive; equally near counts half. within: share with an error of at most 30 %.
    """

    trace: str
    periods: int
    forecast_error: float
    simulated_error: float
    naive_error: float
    given_jobs_error: float
    better: float
    forecast_within: float
    naive_within: float


def backtest(trace: Trace, *, days: int = 28, seeds: int = 5, depth: int = 500) -> Iterator[BacktestPeriod]:
    """Yield the periods of a trace that have a forecast, from its first whole period on.

    Periods with fewer than 100 jobs whose wait is known have no forecast, nor has the one after. Raises DataError for a
    trace without real waits, or of fewer than two periods.
    """
    if not trace.wait_s or not any(wait >= 0 for wait in trace.wait_s):
        hint = "give the output of sacct -P with the columns Submit and Start, SWF with waits, or alibaba's trace"
        raise DataError(
            "no real waits (expected a trace with times of submission and start)", where=trace.name, hint=hint
        )
    parts = list(_split(trace, days))
    if len(parts) < 2:
        raise DataError(f"{len(parts)} periods of {days} days (expected two or more)", where=trace.name)
    level = _SmoothedLevel()
    before: Trace | None = None
    off: dict[str, list[float]] = {"smoothed": [], "simulated": []}
    for number, now in enumerate(parts, start=1):
        if _known(now) < MIN_JOBS:
            before = None
            continue
        if before is not None:
            history = _slice(trace, 0, int(np.searchsorted(trace.submit_s, (number - 1) * days * DAY_S)))
            method = _nearer_so_far(off)
            period = _forecast(history, before, now, level.wait_s, method, (number, days, seeds, depth))
            yield period
            off["smoothed"].append(abs(_log_ratio(level.wait_s, period.wait_p95_s)))
            off["simulated"].append(abs(_log_ratio(period.simulated_s, period.wait_p95_s)))
        level.add(_real_p95(now))
        before = now


class _SmoothedLevel:
    """The exponentially smoothed wait, in the logarithm."""

    def __init__(self) -> None:
        self.wait_s = 0.0

    def add(self, wait_s: float) -> None:
        """Add the wait of a period; the first is the level."""
        new_s = max(wait_s, LEAST_WAIT_S)
        self.wait_s = exp((1 - _SMOOTHING) * log(self.wait_s) + _SMOOTHING * log(new_s)) if self.wait_s else new_s


def _nearer_so_far(off: dict[str, list[float]]) -> Literal["smoothed", "simulated"]:
    """Return the method whose forecasts were nearer on average; smoothed until there are some."""
    simulated, smoothed = off["simulated"], off["smoothed"]
    return "simulated" if len(simulated) >= _LEAST_FORECASTS and sum(simulated) < sum(smoothed) else "smoothed"


def summarize_backtest(periods: Sequence[BacktestPeriod], trace: str) -> BacktestSummary:
    """Return the figures over all periods with a forecast. Raises DataError for none."""
    if not periods:
        raise DataError(f"no two neighbouring periods with {MIN_JOBS} jobs whose wait is known", where=trace)
    forecast, naive = (np.array([getattr(each, key) for each in periods]) for key in ("forecast_error", "naive_error"))
    return BacktestSummary(
        trace=trace,
        periods=len(periods),
        forecast_error=float(np.median(forecast)),
        simulated_error=float(np.median([each.simulated_error for each in periods])),
        naive_error=float(np.median(naive)),
        given_jobs_error=float(np.median([each.given_jobs_error for each in periods])),
        better=float((0.5 + 0.5 * np.sign(np.round(naive - forecast, 6))).mean()),
        forecast_within=float((forecast <= WITHIN).mean()),
        naive_within=float((naive <= WITHIN).mean()),
    )


def _forecast(
    history: Trace,
    before: Trace,
    now: Trace,
    level_s: float,
    method: Literal["smoothed", "simulated"],
    numbers: tuple[int, int, int, int],
) -> BacktestPeriod:
    """Return one period. numbers: of the period, its days, the seeds and the depth."""
    number, days, seeds, depth = numbers
    naive, real = _real_p95(before), _real_p95(now)
    gpus, fitted = _calibrate(before, naive, depth)
    simulations, given_jobs = [level_s], level_s
    if gpus:
        growth = _growth(history, days)
        months = [synthesize(history, days=days, seed=seed, growth_per_week=growth) for seed in range(seeds)]
        changes = [_log_ratio(_simulated_p95(month, gpus, depth), fitted) for month in months]
        simulations = [level_s * exp(_SHRINK * change) for change in changes]
        given_jobs = naive * exp(_log_ratio(_simulated_p95(now, gpus, depth), fitted))
    simulated = float(np.median(simulations))
    forecast = simulated if method == "simulated" else level_s
    return BacktestPeriod(
        trace=now.name,
        period=number,
        from_day=(number - 1) * days,
        days=days,
        jobs=len(now),
        wait_p95_s=real,
        method=method,
        forecast_s=forecast,
        simulated_s=simulated,
        simulated_low_s=min(simulations),
        simulated_high_s=max(simulations),
        naive_s=naive,
        given_jobs_s=given_jobs,
        gpus=gpus,
        forecast_error=relative_error(forecast, real),
        simulated_error=relative_error(simulated, real),
        naive_error=relative_error(naive, real),
        given_jobs_error=relative_error(given_jobs, real),
    )


def relative_error(forecast_s: float, real_s: float) -> float:
    """Return the relative error of a wait; both are at least LEAST_WAIT_S."""
    real_s = max(real_s, LEAST_WAIT_S)
    return abs(max(forecast_s, LEAST_WAIT_S) - real_s) / real_s


def _log_ratio(wait_s: float, other_s: float) -> float:
    return log(max(wait_s, LEAST_WAIT_S) / max(other_s, LEAST_WAIT_S))


def _calibrate(jobs: Trace, target_s: float, depth: int) -> tuple[int, float]:
    """Return the GPUs with which the simulated p95 wait of these jobs is nearest to the target, and that wait.

    By bisection. Both are 0 if it is not near.
    """
    busy = float(np.dot(jobs.gpus, jobs.run_s)) / max(jobs.submit_s[-1] - jobs.submit_s[0], DAY_S)
    low, high = max(max(jobs.gpus), 1), max(int(4 * busy), 2 * max(jobs.gpus))
    nearest, distance = (0, 0.0), _FIT
    for _ in range(_CALIBRATION_STEPS):
        middle = round((low * high) ** 0.5)
        simulated_s = _simulated_p95(jobs, middle, depth)
        off = abs(_log_ratio(simulated_s, target_s))
        if off < distance:
            nearest, distance = (middle, simulated_s), off
        if high - low < 2:
            break
        low, high = (middle, high) if simulated_s > max(target_s, LEAST_WAIT_S) else (low, middle)
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


def _simulated_p95(jobs: Trace, gpus: int, depth: int) -> float:
    scenario = Scenario(name="back-test", pools=(SimPool(pool="all", gpus=gpus),), backfill_depth=depth)
    result = engine.simulate(jobs, scenario, POLICY)
    wait_s = np.frombuffer(result.start_s) - np.frombuffer(result.submit_s)
    return percentile(wait_s[np.isfinite(wait_s)], 95, 0.0)


def _real_p95(jobs: Trace) -> float:
    return percentile([wait for wait in jobs.wait_s if wait >= 0], 95, 0.0)


def _known(jobs: Trace) -> int:
    return sum(wait >= 0 for wait in jobs.wait_s)


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
