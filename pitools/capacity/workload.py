"""Describe the workload of a trace per class: arrivals by hour and weekday, sizes, times, limits, growth, bursts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from pitools.core.record import Record
from pitools.place.simulate.metrics import size_name
from pitools.place.simulate.model import DAY_S, HOUR_S, Trace

_EPOCH_WEEKDAY = 3  # 1970-01-01 was a Thursday, 0 is Monday
_HOURS, _WEEKDAYS = 24, 7

ALL = "all"  # the group of all jobs

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
Bools = np.ndarray[tuple[int], np.dtype[np.bool_]]


class WorkloadClass(Record, frozen=True, kw_only=True, tag="pit.workload-class/1"):
    """The jobs of one team, tier and size.

    tier: the QOS, or queue. team: the account, "" if the trace has none. gpus: requested, as "8" or "2-7".
    jobs_per_day: until a mean gap after the last job. gpu_hours: by run time. share: of the GPU hours of all classes.
    limit_s: of the jobs that have a time limit, null if none has. limit_use: median of run time over limit. wait: real,
    of the jobs whose wait is known, null if of none. by_hour, by_weekday: share of the submissions, from midnight and
    from Monday on, on the trace's clock. growth_per_week: change of the weekly jobs, as a factor minus 1, from a line
    through the logarithms of the whole weeks; null with fewer than three, or fewer jobs than weeks. burstiness:
    variance over mean of the hourly submissions, 1 if they are independent. day_correlation: of the submissions of a
    day with the next day's, null with too few days or equal counts.
    """

    team: str
    tier: str
    gpus: str
    jobs: int
    jobs_per_day: float
    gpu_hours: float
    share: float
    run_p50_s: float
    run_p95_s: float
    limit_p50_s: float | None
    limit_p95_s: float | None
    limit_use: float | None
    wait_p50_s: float | None
    wait_p95_s: float | None
    by_hour: tuple[float, ...]
    by_weekday: tuple[float, ...]
    growth_per_week: float | None
    burstiness: float
    day_correlation: float | None


def describe_workload(trace: Trace) -> list[WorkloadClass]:
    """Return the classes of a trace, the one with the most GPU hours first."""
    groups: dict[tuple[str, str, str], list[int]] = {}
    for job, key in enumerate(zip(team_names(trace), trace.queue, map(size_name, trace.gpus), strict=True)):
        groups.setdefault(key, []).append(job)
    columns = _Columns(trace)
    classes = [_describe_class(columns, key, np.array(jobs)) for key, jobs in groups.items()]
    return sorted(classes, key=lambda each: (-each.gpu_hours, each.team, each.tier, each.gpus))


def clock_s(trace: Trace) -> Floats:
    """Return the submissions in seconds since a Monday, midnight."""
    monday_s = (trace.began_s // DAY_S + _EPOCH_WEEKDAY) % _WEEKDAYS * DAY_S + trace.began_s % DAY_S
    return np.asarray(trace.submit_s, np.float64) + monday_s


def without_early_jobs(trace: Trace) -> Trace:
    """Return the trace from its first day of usual traffic on: a tenth of that of the median job's day and week.

    `sacct -S` also lists jobs that were submitted long before, and then ran: their days are otherwise nearly empty.
    """
    day = ((np.asarray(trace.submit_s) + trace.began_s % DAY_S) // DAY_S).astype(int)
    daily = np.bincount(day)
    total = np.concatenate([[0], np.cumsum(daily)])
    weekly = total[np.minimum(np.arange(len(daily)) + _WEEKDAYS, len(daily))] - total[:-1]  # from each day on
    is_usual = (10 * daily >= np.median(daily[day])) & (10 * weekly >= np.median(weekly[day]))
    first = int(np.searchsorted(day, np.argmax(is_usual)))
    return take_jobs(trace, first, len(trace)) if first else trace


def take_jobs(trace: Trace, first: int, last: int) -> Trace:
    """Return the jobs from `first` on, before `last`; the first's submission is the new trace's start."""
    columns = {
        key: getattr(trace, key)[first:last]
        for key in trace.__struct_fields__
        if key not in ("name", "submit_s", "began_s", "skipped", "left_out")
    }
    from_s = trace.submit_s[first] if first < len(trace) else 0.0
    submit_s = [moment - from_s for moment in trace.submit_s[first:last]]
    return msgspec.structs.replace(trace, **columns, submit_s=submit_s, began_s=trace.began_s + from_s)


class TraceNames(msgspec.Struct, frozen=True):
    """The teams, and the tiers (QOS, or queues), of a trace's jobs, sorted."""

    teams: Sequence[str]
    tiers: Sequence[str]


def names_of(trace: Trace) -> TraceNames:
    """Return the names of a trace."""
    return TraceNames(sorted(set(team_names(trace))), sorted(set(trace.queue)))


def team_names(trace: Trace) -> list[str]:
    """Return the team of each job: its account, "" in a trace without accounts."""
    return list(trace.account) or [""] * len(trace)


class _Columns:
    """The columns of a trace as arrays."""

    def __init__(self, trace: Trace) -> None:
        self.clock_s = clock_s(trace)
        self.gpus, self.run_s = np.asarray(trace.gpus, np.float64), np.asarray(trace.run_s, np.float64)
        self.limit_s = np.asarray(trace.limit_s, np.float64)
        self.wait_s = np.asarray(trace.wait_s or [-1.0] * len(trace), np.float64)
        self.gpu_hours = self.gpus * self.run_s / HOUR_S
        per_gap = len(trace) / max(len(trace) - 1, 1)  # each job has a gap after it, the last, too
        self.days = max(float(trace.submit_s[-1]) / DAY_S * per_gap, 1.0)


def _describe_class(columns: _Columns, key: Sequence[str], jobs: Any) -> WorkloadClass:
    moments, run_s, limit_s, wait_s = (
        column[jobs] for column in (columns.clock_s, columns.run_s, columns.limit_s, columns.wait_s)
    )
    is_limited, gpu_hours = limit_s > 0, float(columns.gpu_hours[jobs].sum())
    from_s, to_s = columns.clock_s[0], columns.clock_s[-1]
    daily = counts(moments, from_s, to_s, DAY_S)
    team, tier, gpus = key
    return WorkloadClass(
        team=team,
        tier=tier,
        gpus=gpus,
        jobs=len(jobs),
        jobs_per_day=len(jobs) / columns.days,
        gpu_hours=gpu_hours,
        share=gpu_hours / float(columns.gpu_hours.sum()),
        run_p50_s=percentile(run_s, 50),
        run_p95_s=percentile(run_s, 95),
        limit_p50_s=_percentile(limit_s[is_limited], 50),
        limit_p95_s=_percentile(limit_s[is_limited], 95),
        limit_use=_percentile(run_s[is_limited] / limit_s[is_limited], 50),
        wait_p50_s=_percentile(wait_s[wait_s >= 0], 50),
        wait_p95_s=_percentile(wait_s[wait_s >= 0], 95),
        by_hour=_shares(moments // HOUR_S % _HOURS, _HOURS),
        by_weekday=_shares(moments // DAY_S % _WEEKDAYS, _WEEKDAYS),
        growth_per_week=growth_per_week(moments, from_s, to_s),
        burstiness=_dispersion(counts(moments, from_s, to_s, HOUR_S)),
        day_correlation=day_correlation(daily),
    )


def growth_per_week(moments: Floats, from_s: float, to_s: float) -> float | None:
    """Return the weekly change of the number of jobs, as a factor minus 1; None with too few whole weeks, or jobs."""
    weeks = int((to_s - from_s) / (_WEEKDAYS * DAY_S))
    inside = moments[moments < from_s + weeks * _WEEKDAYS * DAY_S]
    if weeks < 3 or len(inside) < weeks:
        return None
    weekly = np.bincount(((inside - from_s) // (_WEEKDAYS * DAY_S)).astype(int), minlength=weeks)
    slope = np.polyfit(np.arange(weeks), np.log(weekly + 0.5), 1)[0]  # +0.5: a week without a job
    return round(float(np.expm1(slope)), 6)


def counts(moments: Floats, from_s: float, to_s: float, step_s: float) -> Floats:
    """Return the submissions of each step that lies wholly between the two times; at least one step."""
    first = int(np.ceil(from_s / step_s))
    steps = max(int(to_s // step_s) - first, 1)
    numbers = (moments // step_s).astype(int) - first
    return np.bincount(numbers[(numbers >= 0) & (numbers < steps)], minlength=steps).astype(np.float64)


def day_correlation(daily: Floats) -> float | None:
    """Return the correlation of a day's count with the next day's; None with too few days or equal counts."""
    if len(daily) < 4 or not daily[1:].std() or not daily[:-1].std():
        return None
    return float(np.corrcoef(daily[1:], daily[:-1])[0, 1])


def percentile(values: Any, share: float) -> float:
    """Return a percentile, 0 of no values."""
    return float(np.percentile(values, share)) if len(values) else 0.0


def _percentile(values: Any, share: float) -> float | None:
    return percentile(values, share) if len(values) else None


def _shares(numbers: Floats, kinds: int) -> tuple[float, ...]:
    per_kind = np.bincount(numbers.astype(int), minlength=kinds)
    return tuple(float(count) for count in np.round(per_kind / max(per_kind.sum(), 1), 4))


def _dispersion(hourly: Floats) -> float:
    return float(hourly.var() / hourly.mean()) if hourly.any() else 0.0
