"""What the simulator of `pit capacity ask` says of a period's waits when it is told the real jobs of the period.

The simulator replays the last period's submissions on as many GPUs as give its real p95 wait: a trace does not say how
many there were, nor what else slowed starts. Then it replays the period's own submissions on the same GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import log

import numpy as np

from pitools.capacity.backtest import BacktestPeriod, at_least, p95_by_group, relative_error, split_periods
from pitools.capacity.workload import ALL
from pitools.place.simulate import engine
from pitools.place.simulate.model import DAY_S, Scenario, SimPool, Trace

STEPS = 10  # of the bisection
FIT = log(1.5)  # a calibrated wait further off than by this factor is not the real one


def given_jobs_errors(jobs: Trace, days: int, forecasts: Sequence[BacktestPeriod]) -> Iterator[float]:
    """Errors of the simulator for the periods and groups of these forecasts; of the last wait, if it does not fit."""
    parts = list(split_periods(jobs, days))
    real_s = {(each.period, each.group): each.naive_s for each in forecasts}
    for number in sorted({each.period for each in forecasts}):
        before, now = parts[number - 2], parts[number - 1]
        target_s = real_s.get((number, ALL), p95_by_group(before, before.wait_s)[ALL])
        gpus = calibrate(before, target_s)
        fitted, simulated = (simulate(part, gpus) if gpus else {} for part in (before, now))
        for each in forecasts:
            if each.period == number:
                factor = at_least(simulated.get(each.group, 0.0)) / at_least(fitted.get(each.group, 0.0))
                yield relative_error(each.naive_s * factor, each.wait_p95_s)


def calibrate(jobs: Trace, target_s: float) -> int:
    """GPUs with which the simulated p95 wait of all jobs is nearest to the target, 0 if that is not near; bisects."""
    busy = float(np.dot(jobs.gpus, jobs.run_s)) / max(jobs.submit_s[-1] - jobs.submit_s[0], DAY_S)
    low, high = max(max(jobs.gpus), 1), max(int(4 * busy), 2 * max(jobs.gpus))
    nearest, distance = 0, FIT
    for _ in range(STEPS):
        middle = round((low * high) ** 0.5)
        simulated_s = simulate(jobs, middle)[ALL]
        off = abs(log(at_least(simulated_s) / at_least(target_s)))
        if off < distance:
            nearest, distance = middle, off
        if high - low < 2:
            break
        low, high = (middle, high) if simulated_s > at_least(target_s) else (low, middle)
    return nearest


def simulate(jobs: Trace, gpus: int) -> dict[str, float]:
    """Simulated p95 waits by group, on one pool of so many GPUs."""
    result = engine.simulate(jobs, Scenario(name="x", pools=(SimPool(pool="all", gpus=gpus),)), "federation")
    wait_s = np.frombuffer(result.start_s) - np.frombuffer(result.submit_s)
    return p95_by_group(jobs, np.where(np.isfinite(wait_s), wait_s, -1.0), least=1)
