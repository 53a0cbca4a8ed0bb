"""Make a month of jobs with the shape of a trace, by whole days of the trace drawn anew.

The jobs of a day stay together: the same user's jobs of one evening resemble each other, and a draw class by class
would lose such bursts, which make the waits. Days follow each other in runs of a week on average, as they did (the
stationary bootstrap of Politis and Romano, 1994, with weekdays that match), so that busy days still follow busy days.
The first day follows the last, so that all days of a weekday are equally likely. A log that ends within a week is as if
filled up to whole weeks with days of any of its weeks: without them, its first day would follow fewer days than others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from math import ceil
from typing import Any

import numpy as np

from pitools.capacity.workload import Floats, clock_s, team_names
from pitools.core.errors import DataError
from pitools.place.simulate.model import DAY_S, HOUR_S, Trace

_MEAN_RUN_DAYS = 7
_WEEKDAYS = 7
_MONDAY_S = 4 * DAY_S  # Unix time of a Monday, midnight
_SHIFT_S = HOUR_S / 2  # further jobs come at most this much earlier or later than on their day
_MAX_JOBS = 5_000_000
_LEAST = 1e-6  # of a job; less is rounding


def synthesize(
    trace: Trace,
    *,
    days: int,
    seed: int = 0,
    team_factors: Mapping[str, float] | None = None,
    growth_per_week: float = 0.0,
    warm_up_days: int = 0,
) -> Trace:
    """Return jobs of so many days, from a Monday on, in order of submission. The same seed draws the same days.

    team_factors: account → factor of its jobs; "" → of all others. Jobs above their number are those of the same
    weekday in the weeks after, a day's all earlier or later by up to half an hour. growth_per_week: as a factor minus
    1; a day's jobs grow by the weeks from its place in the trace to its place here, where the trace's end is after the
    warm-up days. The real waits are not copied. A log with a long gap may make no job. Raises DataError for a trace of
    less than a day, or for too many jobs.
    """
    first_day, source_days = whole_days(trace)
    random = np.random.default_rng(seed)
    by_weekday = [
        [day for day in range(source_days) if (first_day + day) % _WEEKDAYS == weekday] or list(range(source_days))
        for weekday in range(_WEEKDAYS)
    ]
    drawn = _draw_days(random, by_weekday, first_day, source_days, days)
    moments = clock_s(trace)
    edges = np.searchsorted(moments, (first_day + np.arange(source_days + 1)) * DAY_S)
    weeks = (np.arange(days)[:, None] - warm_up_days + source_days - np.arange(source_days)) / _WEEKDAYS
    growth, factors = (1 + growth_per_week) ** weeks, _factors(trace, team_factors or {})
    teams, team = np.unique(team_names(trace), return_inverse=True)
    parts = []
    lacking, layer = np.ones(len(teams)), 0  # jobs of each team
    while (lacking > _LEAST).any():  # the first time, each job at most once
        source = np.array([_weeks_later(by_weekday[n % _WEEKDAYS], day, layer) for n, day in enumerate(drawn)])
        jobs = np.concatenate([np.arange(edges[day], edges[day + 1]) for day in source])
        target = np.repeat(np.arange(days), edges[source + 1] - edges[source])
        wanted = factors[jobs] * growth[target, source[target]]
        per_team: Callable[..., Any] = partial(np.bincount, team[jobs], minlength=len(teams))
        if not layer:
            if wanted.sum() > _MAX_JOBS:
                before = f", {warm_up_days} of them before the period" if warm_up_days else ""
                problem = f"{wanted.sum():.0f} jobs in {days} days{before} (expected at most {_MAX_JOBS})"
                raise DataError(problem, where=trace.name)
            lacking, share = per_team(wanted), np.minimum(wanted, 1.0)
        else:
            share = np.clip(wanted - layer, 0.0, 1.0) if layer < wanted.max(initial=0.0) else np.ones(len(jobs))
            share *= np.minimum(lacking / np.maximum(per_team(share), _LEAST), 1.0)[team[jobs]]
        lacking -= per_team(share)
        shift_s = random.uniform(-_SHIFT_S, _SHIFT_S, days)[target] if layer else 0.0
        is_drawn = random.random(len(jobs)) < share
        parts.append((jobs[is_drawn], ((moments[jobs] + shift_s) % DAY_S + target * DAY_S)[is_drawn]))
        layer += 1
    rows, submit_s = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.argsort(submit_s, kind="stable")
    return _take(trace, rows[order].tolist(), submit_s[order].tolist())


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


def _weeks_later(choices: list[int], day: int, weeks: int) -> int:
    """Return the day so many places after another, with the first after the last."""
    return choices[(choices.index(day) + weeks) % len(choices)]


def _draw_days(
    random: np.random.Generator, by_weekday: Sequence[list[int]], first_day: int, source_days: int, days: int
) -> list[int]:
    """Return the day of the trace for each day, of the same weekday if the trace has one; those are equally likely."""
    weeks, place, drawn = ceil(source_days / _WEEKDAYS), 0, list[int]()
    for day in range(days):
        choices = by_weekday[day % _WEEKDAYS]
        goes_on = day > 0 and random.random() >= 1 / _MEAN_RUN_DAYS
        if goes_on:
            place = (place + 1) % (weeks * _WEEKDAYS)
        else:
            place = (day - first_day) % _WEEKDAYS + _WEEKDAYS * int(random.integers(weeks))
        if place < source_days:
            drawn.append(place)
        elif goes_on and place > source_days and drawn[-1] + 1 in choices:
            drawn.append(drawn[-1] + 1)
        else:
            drawn.append(choices[random.integers(len(choices))])
    return drawn


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
