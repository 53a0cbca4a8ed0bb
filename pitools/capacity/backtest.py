"""Compare forecasts of waits with the real waits of the next period, and with "the same as last period".

The forecast of a period is the median wait of the three before: one period's wait scatters too much to be the next
one's. Both are as known when the period begins: a job that waits still counts by its wait until then, which is less
wrong than to leave out those that wait longest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median

import numpy as np

from pitools.capacity.workload import ALL, Bools, Floats, percentile, take_jobs
from pitools.core.errors import DataError
from pitools.core.record import Record
from pitools.place.simulate.model import DAY_S, Trace

WITHIN = 0.3  # a forecast of this relative error is good
MIN_JOBS = 100  # of a group in a period: minimum jobs for a meaningful p95
LEAST_WAIT_S = 60.0  # shorter waits count as 60 s
_REMEMBERED = 3  # periods

Waits = dict[str, float]  # group → p95 wait in s


class BacktestPeriod(Record, frozen=True, kw_only=True, tag="pit.backtest-period/1"):
    """One period of a trace and one group of its jobs: all, or those of a tier. period: from 1 on; 1 has no forecast.

    wait_p95_s: real. naive_s: that of the period before, as known when this one begins. forecast_s: the median of the
    last three, known then. error: relative.
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
    forecast_error: float
    naive_error: float


class BacktestSummary(Record, frozen=True, kw_only=True, tag="pit.backtest/1"):
    """All forecasts for a group of jobs. error: medians of the relative errors. better: share of the periods in which
    the forecast is nearer than naive; one in which both are equally near counts half. within: share with an error of at
    most 30 %.
    """

    trace: str
    group: str
    periods: int
    forecast_error: float
    naive_error: float
    better: float
    forecast_within: float
    naive_within: float


def backtest(trace: Trace, *, days: int) -> Iterator[BacktestPeriod]:
    """Yield a forecast for each period of a trace, and for each group of at least 100 jobs whose wait is known.

    A group that had fewer in the period before has none. Raises DataError for a
    trace without real waits, or of fewer than three whole periods: with two, the forecast is the naive one.
    """
    if not any(wait >= 0 for wait in trace.wait_s):
        hint = "give the output of sacct -P with the columns Submit and Start, SWF, or a published log with waits"
        raise DataError(
            "no real waits (expected a trace with times of submission and start)", where=trace.name, hint=hint
        )
    parts = list(split_periods(trace, days))
    if len(parts) < 3:
        problem = f"{len(parts)} whole periods of {days} days (expected three or more)"
        raise DataError(problem, where=trace.name, hint="give a longer trace, or fewer --days")
    groups = [ALL, *(f"tier {tier}" for tier in sorted(set(trace.queue)) if len(set(trace.queue)) > 1)]
    last_start_s = [float((_submitted_s(part) + np.maximum(part.wait_s, 0.0)).max(initial=0.0)) for part in parts]
    past: list[Waits] = []
    for number, now in enumerate(parts[1:], start=2):
        real, from_s = p95_by_group(now, now.wait_s), trace.began_s + (number - 1) * days * DAY_S
        past.append({})
        for each, part in enumerate(parts[: number - 1]):
            if last_start_s[each] >= from_s - days * DAY_S:  # more is known than when the period before began
                past[each] = p95_by_group(part, np.minimum(part.wait_s, from_s - _submitted_s(part)))
        for group in groups:
            if group not in real or group not in past[-1]:
                continue
            known = [waits[group] for waits in past if group in waits]
            forecast_s, naive_s = median(known[-_REMEMBERED:]), known[-1]
            yield BacktestPeriod(
                trace=now.name,
                period=number,
                group=group,
                from_day=(number - 1) * days,
                days=days,
                jobs=int(_members(now, group).sum()),
                wait_p95_s=real[group],
                forecast_s=forecast_s,
                naive_s=naive_s,
                forecast_error=relative_error(forecast_s, real[group]),
                naive_error=relative_error(naive_s, real[group]),
            )


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
        better=float((0.5 + 0.5 * np.sign(np.round(naive - forecast, 6))).mean()),
        forecast_within=float((forecast <= WITHIN).mean()),
        naive_within=float((naive <= WITHIN).mean()),
    )


def relative_error(forecast_s: float, real_s: float) -> float:
    """Return the relative error of a wait; both are at least LEAST_WAIT_S."""
    return abs(at_least(forecast_s) / at_least(real_s) - 1)


def at_least(wait_s: float) -> float:
    """Return a wait, LEAST_WAIT_S for a shorter one."""
    return max(wait_s, LEAST_WAIT_S)


def p95_by_group(jobs: Trace, wait_s: Sequence[float] | Floats, least: int = MIN_JOBS) -> Waits:
    """Return the p95 of the known waits of all jobs, and of each tier, with at least so many."""
    waits = np.asarray(wait_s, np.float64)
    groups = (ALL, *(f"tier {tier}" for tier in sorted(set(jobs.queue))))
    known = ((group, waits[_members(jobs, group) & (waits >= 0)]) for group in groups)
    return {group: percentile(values, 95) for group, values in known if len(values) >= least}


def _submitted_s(jobs: Trace) -> Floats:
    return np.asarray(jobs.submit_s, np.float64) + jobs.began_s


def _members(jobs: Trace, group: str) -> Bools:
    return np.array([group in (ALL, f"tier {tier}") for tier in jobs.queue], bool)


def split_periods(trace: Trace, days: int) -> Iterator[Trace]:
    """Yield the whole periods of a trace; it ends a pause after its last job, the longest of 1,000 or half a day."""
    pause_s = min(percentile(np.diff(trace.submit_s), 99.9), DAY_S / 2)
    edges = np.arange(0.0, trace.submit_s[-1] + pause_s, days * DAY_S)
    rows = np.searchsorted(trace.submit_s, edges)
    for first, last in pairwise(rows):
        yield take_jobs(trace, int(first), int(last))
