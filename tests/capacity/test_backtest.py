"""A back-test reads real waits, judges fairly, and says where it cannot."""

from __future__ import annotations

from bisect import bisect

import msgspec
import pytest

from pitools.capacity.backtest import backtest, relative_error, summarize_backtest
from pitools.capacity.workload import take_jobs
from pitools.core.errors import DataError
from pitools.place.simulate.model import Trace
from tests.capacity.made_month import month


def waited(days: int = 56) -> Trace:
    """A made trace with waits that differ by the day."""
    jobs = month(11, days=days)
    return msgspec.structs.replace(jobs, wait_s=[moment // 86400 * 100 for moment in jobs.submit_s])


def test_each_tier_has_its_forecast_once_it_has_jobs() -> None:
    """A tier's forecast is the median of its own last three waits; one with few jobs, or new ones, has none."""
    level_s = {0: 600.0, 1: 6000.0, 2: 60000.0, 3: 1200.0, 4: 3600.0}
    trace = month(3, days=35, per_day=60.0)
    queues = ["new" if moment >= 28 * 86400 and job % 2 else "old" for job, moment in enumerate(trace.submit_s)]
    waits = [level_s[int(moment // (7 * 86400))] for moment in trace.submit_s]
    periods = list(backtest(msgspec.structs.replace(trace, queue=queues, wait_s=waits), days=7))
    assert [(p.period, p.forecast_s) for p in periods if p.group == "all"] == [
        (2, 600.0), (3, 3300.0), (4, 6000.0), (5, 6000.0)
    ]  # fmt: skip
    assert {p.group for p in periods} == {"all", "tier old"}
    assert [each.group for each in summarize_backtest(periods, "x")] == ["all", "tier old"]


def test_no_future_is_used() -> None:
    """Waits of a later period do not change the forecast of an earlier one."""
    trace = waited()
    late = [wait if moment < 28 * 86400 else 7.0 for moment, wait in zip(trace.submit_s, trace.wait_s, strict=True)]
    first, other = (next(iter(backtest(t, days=14))) for t in (trace, msgspec.structs.replace(trace, wait_s=late)))
    assert first == other


def test_a_job_that_waits_still_counts_by_its_wait_until_then() -> None:
    """Who is submitted in one period and starts in the next, or after, is known to have waited up to its beginning."""
    trace = month(3, days=28)
    is_late = [12 <= moment // 86400 < 14 for moment in trace.submit_s]
    waits = [864_000.0 if late else 60.0 for late in is_late]
    first, second, third = backtest(msgspec.structs.replace(trace, wait_s=waits), days=7)
    until_s = sorted(14 * 86400 - moment for moment, late in zip(trace.submit_s, is_late, strict=True) if late)
    assert first.wait_p95_s == 864_000.0
    assert 60.0 < second.naive_s < until_s[-1]
    assert second.forecast_s == pytest.approx((60.0 + second.naive_s) / 2)
    assert (third.period, third.naive_s, third.forecast_s) == (4, 60.0, 60.0)
    started = msgspec.structs.replace(trace, wait_s=[min(wait, 604_800.0) for wait in waits])
    assert next(each for each in backtest(started, days=7) if each.period == 3).naive_s == second.naive_s


@pytest.mark.parametrize(("whole_days", "periods"), [(56.0, 4), (55.4, 3)])
def test_a_period_that_the_log_does_not_cover_is_left_out(whole_days: float, periods: int) -> None:
    """The log may end with a night's pause, but not in the middle of a day."""
    trace = waited()
    cut = take_jobs(trace, 0, bisect(trace.submit_s, whole_days * 86400))
    assert max(period.period for period in backtest(cut, days=14)) == periods


def test_a_trace_without_real_waits_is_refused() -> None:
    """Nothing simulated is taken for real."""
    with pytest.raises(DataError, match="no real waits"):
        list(backtest(month(1), days=7))


def test_short_waits_are_equal() -> None:
    """Nobody plans for seconds: waits below a minute are a minute."""
    assert relative_error(0.0, 59.0) == 0.0
    assert relative_error(120.0, 1.0) == 1.0


def test_only_known_waits_count() -> None:
    """To the p95, and to the hundred that a group needs."""
    from pitools.capacity.backtest import p95_by_group

    jobs = month(1)
    known, few = ([float(job) if job < most else -1.0 for job in range(len(jobs))] for most in (200, 99))
    assert p95_by_group(jobs, known)["all"] == pytest.approx(189.05)
    assert p95_by_group(jobs, few) == {}


def test_a_summary_of_whole_periods() -> None:
    """One that lacks a day is none; of four forecasts two are nearer, one as near, which is half; 30 % is within."""
    first, *others = backtest(waited(days=55), days=14)
    assert (first.from_day, [each.period for each in others]) == (14, [3])
    errors = [(0.1, 0.3), (0.3, 0.5), (0.4, 0.4), (0.2, 0.1)]
    periods = [msgspec.structs.replace(first, forecast_error=ours, naive_error=naive) for ours, naive in errors]
    (found,) = summarize_backtest(periods, "x")
    assert (found.better, found.forecast_within, found.naive_within) == (0.625, 0.75, 0.5)
    with pytest.raises(DataError):
        next(backtest(waited(days=41), days=28))
