"""Stop the worst runs of a sweep early, by successive halving: Li et al., "A System for Massively Parallel
Hyperparameter Tuning" (MLSys 2020), in the variant that stops runs instead of promoting them.

At each rung, a number of steps, a run continues if its loss there is among the best share of the runs that have reached
the rung. Pure: `decide` reads records and stops nothing.
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
    """What is to be done with a run at a rung. loss: at the rung. rank: from 1, the best, among the `reached` runs."""

    name: str
    run_id: str
    action: Literal["stop", "keep"]
    rung: int
    loss: float | None
    rank: int
    reached: int


def rung_loss(logs: Mapping[int, Step], rung: int) -> float | None:
    """Return a run's loss at a rung, the mean of the steps before it; None if it has not reached it.

    Infinity for a loss that was NaN or infinite: such a run is the worst.
    """
    if not logs or max(logs) + 1 < rung:
        return None
    first = rung - max(1, round(rung * _WINDOW))
    losses = [step.loss for number, step in logs.items() if first <= number < rung]
    if not losses:
        return None
    finite = [loss for loss in losses if loss is not None]
    return sum(finite) / len(finite) if len(finite) == len(losses) else math.inf


def decide(
    runs: Sequence[tuple[str, str, Mapping[int, Step]]], rungs: Sequence[int], keep: float
) -> list[HalvingDecision]:
    """Return the decision on each run that has reached a rung, at the last rung that it has reached.

    runs: name, run id and step log of each. keep: share of the runs that continue at each rung, 0 to 1, rounded up; of
    equal losses all continue. A run that is to be stopped has no later decision.
    """
    decisions: dict[str, HalvingDecision] = {}
    stopped: set[str] = set()
    for rung in sorted(rungs):
        losses = {run_id: loss for _, run_id, logs in runs if (loss := rung_loss(logs, rung)) is not None}
        survivors = max(1, math.ceil(keep * len(losses)))
        ordered = sorted(losses.values())
        for name, run_id, _ in runs:
            if run_id not in losses or run_id in stopped:
                continue
            loss = losses[run_id]
            is_stopped = loss > ordered[survivors - 1]
            stopped |= {run_id} if is_stopped else set()
            decisions[run_id] = HalvingDecision(
                name=name,
                run_id=run_id,
                action="stop" if is_stopped else "keep",
                rung=rung,
                loss=loss if math.isfinite(loss) else None,
                rank=ordered.index(loss) + 1,
                reached=len(losses),
            )
    return list(decisions.values())
