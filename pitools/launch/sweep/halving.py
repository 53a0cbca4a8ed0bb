"""Stop the worst runs of a sweep early, by successive halving: Li et al., "A System for Massively Parallel
Hyperparameter Tuning" (MLSys 2020), in the variant that stops runs instead of promoting them.

At each rung, a number of steps, a run continues if its loss, or metric, there is among the best share of the runs that
have reached the rung. Pure: `decide` reads records and stops nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from pitools.core.record import Record
from pitools.run.steps import Step

# The loss at a rung is the mean of this share of the steps before it: single batches are noisy.
_WINDOW = 0.1


class HalvingDecision(Record, frozen=True, kw_only=True, tag="pit.halving-decision/1"):
    """What is to be done with a run at a rung.

    metric, value: by which it is judged, at the rung; None for NaN. rank: from 1, the best, among the `reached` runs.
    """

    name: str
    run_id: str
    action: Literal["stop", "keep"]
    rung: int
    metric: str
    value: float | None
    rank: int
    reached: int


def rung_value(logs: Mapping[int, Step], rung: int, metric: str = "loss") -> float | None:
    """Return a run's value at a rung; None if it has not reached it, or logged no such metric by then.

    The loss is the mean of the steps before the rung, a metric its last value before it. NaN for one that was NaN or
    infinite.
    """
    if not logs or max(logs) + 1 < rung:
        return None
    if metric == "loss":
        first = rung - max(1, round(rung * _WINDOW))
        values = [step.loss for number, step in logs.items() if first <= number < rung]
    else:
        values = [
            logs[number].metrics[metric] for number in sorted(logs) if number < rung and metric in logs[number].metrics
        ]
        values = values[-1:]
    if not values:
        return None
    finite = [value for value in values if value is not None]
    return sum(finite) / len(finite) if len(finite) == len(values) else math.nan


def decide(
    runs: Sequence[tuple[str, str, Mapping[int, Step]]],
    rungs: Sequence[int],
    keep: float,
    *,
    metric: str = "loss",
    is_largest_best: bool = False,
) -> list[HalvingDecision]:
    """Return the decision on each run that has reached a rung, at the last rung that it has reached.

    runs: name, run id and step log of each. keep: share of the runs that continue at each rung, 0 to 1, rounded up; of
    equal values all continue, and one of NaN is the worst. A run that is to be stopped has no later decision.
    """
    decisions: dict[str, HalvingDecision] = {}
    stopped: set[str] = set()
    for rung in sorted(rungs):
        values = {run_id: value for _, run_id, logs in runs if (value := rung_value(logs, rung, metric)) is not None}
        costs = {
            run_id: math.inf if math.isnan(value) else -value if is_largest_best else value
            for run_id, value in values.items()
        }
        survivors = max(1, math.ceil(keep * len(costs)))
        ordered = sorted(costs.values())
        for name, run_id, _ in runs:
            if run_id not in costs or run_id in stopped:
                continue
            is_stopped = costs[run_id] > ordered[survivors - 1]
            stopped |= {run_id} if is_stopped else set()
            decisions[run_id] = HalvingDecision(
                name=name,
                run_id=run_id,
                action="stop" if is_stopped else "keep",
                rung=rung,
                metric=metric,
                value=values[run_id] if math.isfinite(values[run_id]) else None,
                rank=ordered.index(costs[run_id]) + 1,
                reached=len(costs),
            )
    return list(decisions.values())
