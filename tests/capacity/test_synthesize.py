"""Synthetic months have the shape of the trace that they are made from."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pitools.capacity import workload
from pitools.capacity.synthesize import as_sacct, synthesize
from pitools.core.errors import DataError
from pitools.place.simulate.model import DAY_S, HOUR_S
from pitools.place.simulate.trace import read_trace
from tests.capacity.made_month import DAYS, month
from tests.capacity.test_ask import daily


def distance(one: object, other: object) -> float:
    """The largest difference of two cumulative distributions (Kolmogorov and Smirnov)."""
    first, second = np.sort(np.asarray(one)), np.sort(np.asarray(other))
    grid = np.concatenate([first, second])
    sides = (np.searchsorted(each, grid, side="right") / len(each) for each in (first, second))
    return float(np.abs(np.subtract(*sides)).max())


@pytest.mark.parametrize("made", [1, 2, 3, 193871])
def test_synthetic_quarters_have_the_shape_of_their_trace(made: int) -> None:
    """Jobs a day, hours, weekdays, sizes, run times and the likeness of neighbouring days, over eight quarters."""
    trace = month(made)
    copies = [synthesize(trace, days=91, seed=seed) for seed in range(8)]
    assert np.mean([len(copy) for copy in copies]) / 91 == pytest.approx(len(trace) / DAYS, rel=0.25)
    for by, kinds in ((HOUR_S, 24), (DAY_S, 7)):
        actual, *drawn = (
            np.bincount((workload.clock_s(each) // by % kinds).astype(int), minlength=kinds) / len(each)
            for each in (trace, *copies)
        )
        assert np.abs(np.mean(drawn, axis=0) - actual).max() < 0.05
    assert distance(trace.gpus, np.concatenate([copy.gpus for copy in copies])) < 0.05
    assert distance(trace.run_s, np.concatenate([copy.run_s for copy in copies])) < 0.05
    likeness, *of_copies = (
        workload.day_correlation(workload.counts(workload.clock_s(each), 0.0, days * DAY_S, DAY_S))
        for each, days in ((trace, DAYS), *((copy, 91) for copy in copies))
    )
    assert likeness - 0.35 < np.mean(of_copies) < likeness + 0.05  # a run of days ends once a week
    for copy in copies:
        assert list(copy.submit_s) == sorted(copy.submit_s)
        assert copy.submit_s[0] >= 0
        assert copy.submit_s[-1] < 91 * DAY_S


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10**6), st.floats(0, 4))
def test_a_team_grows_by_its_factor_and_no_other_changes(seed: int, factor: float) -> None:
    """A factor multiplies the jobs of its team; the days drawn for the other teams stay the same."""
    trace = month(1)
    before, after = (synthesize(trace, days=28, seed=seed, team_factors={"vision": f}) for f in (1.0, factor))
    jobs = [sum(team == "vision" for team in each.account) for each in (before, after)]
    assert jobs[1] == pytest.approx(jobs[0] * factor, rel=0.3, abs=4 * math.sqrt(jobs[0]))  # others' days differ
    others = [
        sorted((s, g) for s, g, team in zip(t.submit_s, t.gpus, t.account, strict=True) if team != "vision")
        for t in (before, after)
    ]
    assert others[0] == others[1]


def test_further_jobs_are_those_of_other_days() -> None:
    """Twice the jobs are no pairs: none is there twice in a day, and hours, days and bursts have the same shape."""
    trace = month(3, days=28)
    once, twice = (
        [synthesize(trace, days=28, seed=seed, team_factors={"": factor}) for seed in range(8)] for factor in (1.0, 2.0)
    )
    for jobs in twice:
        drawn = [(int(moment // DAY_S), run_s) for moment, run_s in zip(jobs.submit_s, jobs.run_s, strict=True)]
        assert len(set(drawn)) == len(drawn)
    assert sum(map(len, twice)) == pytest.approx(2 * sum(map(len, once)), rel=0.05)
    for by, kinds in ((HOUR_S, 24), (DAY_S, 7)):
        shares = [
            np.bincount(np.concatenate([workload.clock_s(each) // by % kinds for each in copies]).astype(int))
            for copies in (once, twice)
        ]
        assert np.abs(shares[0] / shares[0].sum() - shares[1] / shares[1].sum()).max() < 0.05
    bursts = [[workload.describe_workload(each)[0].burstiness for each in copies] for copies in (once, twice)]
    assert np.mean(bursts[1]) == pytest.approx(np.mean(bursts[0]), rel=0.2)


@pytest.mark.parametrize("warm_up_days", [0, 7])
def test_a_week_that_fills_the_pools_is_the_last_of_the_log(warm_up_days: int) -> None:
    """Growth counts from the first day after it."""
    jobs = synthesize(daily(), days=14, growth_per_week=1.0, warm_up_days=warm_up_days)
    first_day = sum(warm_up_days <= moment / DAY_S < warm_up_days + 7 for moment in jobs.submit_s)
    assert first_day == pytest.approx(7 * 2**1.5, rel=0.4)


def test_growth_goes_on_from_the_end_of_the_trace() -> None:
    """With 10 % a week, a month after four weeks has about 1.1 to the fourth of the jobs."""
    trace = month(3, days=28, correlation=0.0)
    same, grown = (synthesize(trace, days=28, growth_per_week=growth) for growth in (0.0, 0.1))
    assert len(grown) / len(same) == pytest.approx(1.1**4, rel=0.15)


def test_a_trace_of_an_hour_has_no_shape() -> None:
    """A trace without a whole day is an error that says what to give."""
    with pytest.raises(DataError, match="no whole day"):
        synthesize(month(1, days=1, per_day=1.0), days=7)
    assert len(synthesize(month(1), days=7, team_factors={"": 0.0})) == 0


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 400), st.integers(1, 2), st.sampled_from([4.0, 40.0]))
def test_jobs_of_long_before_are_left_out(days_before: int, jobs: int, per_day: float) -> None:
    """What `sacct -S` lists of weeks before, as it ran on, makes no days; a trace of usual days stays whole."""
    trace = month(2, days=28, per_day=per_day)
    assert workload.without_early_jobs(trace) == trace
    rows = [0] * jobs + list(range(len(trace)))
    columns = {
        key: [getattr(trace, key)[row] for row in rows]
        for key in trace.__struct_fields__
        if key not in ("name", "began_s", "skipped", "left_out") and getattr(trace, key)
    }
    columns["submit_s"] = [0.0] * jobs + [moment + days_before * DAY_S for moment in trace.submit_s]
    strayed = msgspec.structs.replace(trace, began_s=trace.began_s - days_before * DAY_S, **columns)
    left = workload.without_early_jobs(strayed)
    assert left.submit_s[-1] <= 35 * DAY_S
    if days_before >= 7:
        assert (list(left.run_s), left.submit_s[0]) == (trace.run_s, 0.0)
        assert left.began_s == pytest.approx(trace.began_s + trace.submit_s[0])


def test_jobs_as_the_output_of_sacct_are_read_back(tmp_path: Path) -> None:
    """A time limit is up to a minute longer, and no name splits a line."""
    jobs = msgspec.structs.replace(daily(), limit_s=[90.0, *[0.0] * 13], owner=["a|b"] * 14, account=["x"] * 14)
    (tmp_path / "q").write_text("\n".join(as_sacct(jobs)) + "\n")
    back = read_trace(tmp_path / "q")
    assert list(back.limit_s) == [120.0, *[0.0] * 13]
    for key in ("submit_s", "gpus", "run_s", "account", "began_s"):
        assert getattr(back, key) == getattr(jobs, key)


def test_load_is_of_all_teams_and_a_trace_of_some_weekdays_makes_every_day() -> None:
    """The factor of "" is that of each team without one of its own; a day that the trace lacks is drawn from all."""
    trace = msgspec.structs.replace(daily(days=5), account=["a"] * 5)
    assert len(synthesize(trace, days=28, team_factors={"": 3.0})) == 3 * len(synthesize(trace, days=28)) == 3 * 28


def test_a_class_of_the_workload_is_described() -> None:
    """The one of more GPU hours first; shares, limits, known waits, hours; no growth from less than three weeks."""
    trace = msgspec.structs.replace(daily(days=21, hours=9.0), account=["a"] * 7 + ["b"] * 14)
    trace = msgspec.structs.replace(trace, gpus=[3] * 7 + [1] * 14, wait_s=[-1.0] * 20 + [3600.0])
    trace = msgspec.structs.replace(trace, limit_s=[18 * HOUR_S] * 7 + [0.0] * 14)
    first, second = workload.describe_workload(trace)
    assert (first.team, first.gpu_hours, first.share) == ("a", 189, 0.6)
    assert (first.limit_use, second.limit_use, second.limit_p95_s) == (0.5, None, None)
    assert (first.jobs_per_day, workload.day_correlation(np.ones(9))) == (pytest.approx(7 / 21), None)
    assert (first.wait_p95_s, second.wait_p50_s, second.wait_p95_s) == (None, 3600.0, 3600.0)
    assert (first.by_hour[10], first.growth_per_week, second.growth_per_week) == (1.0, None, None)
    assert (first.by_weekday[0], second.burstiness) == (0.1429, pytest.approx(1, abs=0.1))
    weekly = np.repeat(np.arange(3) * 7 * DAY_S, [100, 200, 400])
    assert workload.growth_per_week(weekly, 0.0, 21 * DAY_S) == pytest.approx(1.0, abs=0.02)
    assert workload.growth_per_week(weekly[:2], 0.0, 21 * DAY_S) is None


@pytest.mark.parametrize("days", [5, 8, 14, 18, 27])
def test_each_day_of_the_trace_is_drawn_as_often_as_the_others_of_its_weekday(days: int) -> None:
    """The first after the log's start is as likely as the last, also where the log ends within a week."""
    trace = msgspec.structs.replace(daily(days=days + 1), account=list(map(str, range(days + 1))), began_s=4 * DAY_S)
    drawn = Counter(synthesize(trace, days=70_000).account)
    for weekday in range(7):
        same = [drawn[str(day)] for day in range(weekday, days, 7)]
        assert same == pytest.approx([sum(same) / max(len(same), 1)] * len(same), rel=0.05)
    runs = [int(day) for day in synthesize(trace, days=700).account]
    assert days < 8 or sum(a + 1 == b for a, b in pairwise(runs)) / 700 > 0.75 - 1 / days  # days stay in runs
