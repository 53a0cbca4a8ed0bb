"""A back-test reads real waits, judges fairly, and says where it cannot."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from pitools.capacity.backtest import backtest, relative_error, summarize_backtest
from pitools.core.errors import DataError
from pitools.place.simulate import engine
from pitools.place.simulate.model import Scenario, SimPool, Trace
from tests.capacity.made_month import month


def waited(gpus: int, days: int = 56) -> Trace:
    """A made trace, its waits those of the simulator on so many GPUs: what the model can know."""
    jobs = month(11, days=days)
    result = engine.simulate(jobs, Scenario(name="x", pools=(SimPool(pool="a", gpus=gpus),)), "federation")
    return msgspec.structs.replace(jobs, wait_s=[s - t for s, t in zip(result.start_s, result.submit_s, strict=True)])


def test_a_cluster_that_is_as_the_model_is_modelled() -> None:
    """On waits that the simulator made, the replay of the real jobs finds them again nearly."""
    periods = list(backtest(waited(100), days=14, seeds=2))
    assert [period.period for period in periods] == [2, 3, 4]
    assert all(period.gpus for period in periods)
    assert all(period.simulated_low_s <= period.simulated_s <= period.simulated_high_s for period in periods)
    assert np.median([period.given_jobs_error for period in periods]) < 0.5


def test_waits_that_no_queue_explains_are_not_simulated() -> None:
    """Waits of a day for jobs that always fit are not queueing: no number of GPUs gives them; equally near is half."""
    trace = month(11, days=28, per_day=20.0)
    trace = msgspec.structs.replace(trace, run_s=[1.0] * len(trace), wait_s=[86400.0] * len(trace))
    periods = list(backtest(trace, days=14, seeds=2))
    assert [(period.gpus, period.simulated_s) for period in periods] == [(0, 86400.0)]
    assert [each.better for each in summarize_backtest(periods, "x")] == [0.5]


def test_each_queue_has_its_forecast_once_it_has_jobs() -> None:
    """A queue's forecast is the median of its own last three waits; one with few jobs, or new ones, has none."""
    level_s = {0: 600.0, 1: 6000.0, 2: 60000.0, 3: 1200.0, 4: 3600.0}
    trace = month(3, days=35, per_day=60.0)
    queues = ["new" if moment >= 28 * 86400 and job % 2 else "old" for job, moment in enumerate(trace.submit_s)]
    waits = [level_s[int(moment // (7 * 86400))] for moment in trace.submit_s]
    periods = list(backtest(msgspec.structs.replace(trace, queue=queues, wait_s=waits), days=7, seeds=1))
    assert [(p.period, p.forecast_s) for p in periods if p.group == "all"] == [
        (2, 600.0), (3, 3300.0), (4, 6000.0), (5, 6000.0)
    ]  # fmt: skip
    assert {p.group for p in periods} == {"all", "queue old"}
    assert [each.group for each in summarize_backtest(periods, "x")] == ["all", "queue old"]


def test_no_future_is_used() -> None:
    """Waits of a later period do not change the forecast of an earlier one."""
    trace = waited(100)
    late = [wait if moment < 28 * 86400 else 7.0 for moment, wait in zip(trace.submit_s, trace.wait_s, strict=True)]
    first, other = (
        next(iter(backtest(t, days=14, seeds=2))) for t in (trace, msgspec.structs.replace(trace, wait_s=late))
    )
    assert first == other


def test_a_trace_without_real_waits_is_refused() -> None:
    """The simulator is never compared with itself unsaid."""
    with pytest.raises(DataError, match="no real waits"):
        list(backtest(month(1)))


def test_short_waits_are_equal() -> None:
    """Nobody plans for seconds: waits below a minute are a minute."""
    assert relative_error(0.0, 59.0) == 0.0
    assert relative_error(120.0, 1.0) == 1.0
