"""Make a month of jobs with the shape of a trace, by whole days of the trace drawn anew.

The jobs of a day stay together: the same user's jobs of one evening resemble each other, and a draw class by class
would lose such bursts, which make the waits. Days follow each other in runs of a week on average, as they did (the
stationary bootstrap of Politis and Romano, 1994, with weekdays that match), so that busy days still follow busy days.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from math import ceil
from typing import Any

import numpy as np

from pitools.capacity.workload import Floats, clock_s, team_names
from pitools.core.errors import DataError
from pitools.place.simulate.model import DAY_S, HOUR_S, Trace

Whole = np.ndarray[tuple[int], np.dtype[np.int64]]

_MEAN_RUN_DAYS = 7
_WEEKDAYS = 7
_MONDAY_S = 4 * DAY_S  # Unix time of a Monday, midnight
_SHIFT_S = HOUR_S / 2  # a further copy of a job is submitted within this time of the first
_MAX_JOBS = 5_000_000


def synthesize(
    trace: Trace,
    *,
    days: int,
    seed: int = 0,
    team_factors: Mapping[str, float] | None = None,
    growth_per_week: float = 0.0,
) -> Trace:
    """Return jobs of so many days, from a Monday on, in order of submission. The same seed draws the same days.

    team_factors: account, or queue in a trace without accounts → factor of its jobs; "" → of all others.
    growth_per_week: as a factor minus 1; a day's jobs grow by the weeks from its place in the trace to its place here,
    counted from the trace's end. The real waits are not copied. Raises DataError for a trace of less than a day, for
    too many jobs, or for none.
    """
    first_day, source_days = whole_days(trace)
    random = np.random.default_rng(seed)
    drawn = _draw_days(random, first_day, source_days, days)
    moments = clock_s(trace)
    edges = np.searchsorted(moments, (first_day + np.arange(source_days + 1)) * DAY_S)
    jobs = np.concatenate([np.arange(edges[day], edges[day + 1]) for day in drawn])
    target = np.repeat(np.arange(days), edges[drawn + 1] - edges[drawn])
    source = np.repeat(drawn, edges[drawn + 1] - edges[drawn])
    factors = _factors(trace, team_factors or {})[jobs]
    factors *= (1 + growth_per_week) ** ((target + source_days - source) / _WEEKDAYS)
    if factors.sum() > _MAX_JOBS:
        raise DataError(f"{factors.sum():.0f} jobs in {days} days (expected at most {_MAX_JOBS})", where=trace.name)
    copies = factors.astype(int) + (random.random(len(jobs)) < factors % 1)
    rows = np.repeat(np.arange(len(jobs)), copies)
    if not len(rows):
        raise DataError(
            f"no jobs in {days} days",
            where=trace.name,
            hint="give more --days; a log with a long gap has days without jobs",
        )
    jobs, target = jobs[rows], target[rows]
    is_first = np.diff(rows, prepend=-1) != 0
    shift_s = np.where(is_first, 0.0, random.uniform(-_SHIFT_S, _SHIFT_S, len(jobs)))
    submit_s = np.clip(moments[jobs] % DAY_S + shift_s, 0.0, DAY_S - 1) + target * DAY_S
    order = np.argsort(submit_s, kind="stable")
    return _take(trace, jobs[order].tolist(), submit_s[order].tolist())


def whole_days(trace: Trace) -> tuple[int, int]:
    """Return the first whole day, counted from a Monday, and the number of whole days."""
    moments = clock_s(trace)
    first, last = int(np.ceil(moments[0] / DAY_S)), int(moments[-1] // DAY_S)
    if moments[0] % DAY_S < HOUR_S:  # the first job of a log that begins at midnight
        first = int(moments[0] // DAY_S)
    if moments[-1] % DAY_S > DAY_S - HOUR_S:
        last += 1
    if last <= first:
        hint = "give a trace of a week or more"
        raise DataError("no whole day between the first and the last submission", where=trace.name, hint=hint)
    return first, last - first


def _draw_days(random: np.random.Generator, first_day: int, source_days: int, days: int) -> Whole:
    """Return the day of the trace for each day, of the same weekday if the trace has one."""
    by_weekday = [
        [day for day in range(source_days) if (first_day + day) % _WEEKDAYS == weekday] or list(range(source_days))
        for weekday in range(_WEEKDAYS)
    ]
    drawn: list[int] = []
    for day in range(days):
        choices = by_weekday[day % _WEEKDAYS]
        follows = drawn[-1] + 1 if drawn else -1
        if follows in choices and random.random() >= 1 / _MEAN_RUN_DAYS:
            drawn.append(follows)
        else:
            drawn.append(choices[random.integers(len(choices))])
    return np.array(drawn)


def _factors(trace: Trace, team_factors: Mapping[str, float]) -> Floats:
    others = team_factors.get("", 1.0)
    return np.array([team_factors.get(team, others) for team in team_names(trace)], np.float64)


def _take(trace: Trace, jobs: list[int], submit_s: list[float]) -> Trace:
    columns: dict[str, Any] = {
        key: [column[job] for job in jobs]
        for key in ("gpus", "run_s", "limit_s", "owner", "job_name", "queue", "rank_score", "account")
        if (column := getattr(trace, key))
    }
    job_id = [f"s{number}" for number in range(len(jobs))]
    return Trace(name=f"{trace.name}-synthetic", job_id=job_id, submit_s=submit_s, began_s=_MONDAY_S, **columns)


def as_sacct(trace: Trace) -> Iterator[str]:
    """Yield the lines of a trace as the output of `sacct -P`, with the columns that `read_trace` reads."""
    account = trace.account or [""] * len(trace)
    yield "JobID|JobName|User|Account|QOS|Submit|State|ElapsedRaw|TimelimitRaw|AllocTRES"
    for job, submit_s in enumerate(trace.submit_s):
        submit = datetime.fromtimestamp(trace.began_s + submit_s, UTC).strftime("%Y-%m-%dT%H:%M:%S")
        names = (trace.job_name[job], trace.owner[job], account[job], trace.queue[job])
        times = f"{max(1, round(trace.run_s[job]))}|{ceil(trace.limit_s[job] / 60)}"
        row = (trace.job_id[job], *(name.replace("|", "_") for name in names), submit, "COMPLETED", times)
        yield "|".join((*row, f"gres/gpu={trace.gpus[job]}"))
