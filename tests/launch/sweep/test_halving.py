"""Successive halving, over heaps of step logs: who is stopped depends on the losses at the rungs alone."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pitools.launch.sweep import halving
from pitools.run.steps import Step

LOSSES = st.one_of(st.none(), st.floats(0, 100, allow_nan=False))
LOGS = st.lists(st.lists(LOSSES, max_size=12), min_size=1, max_size=8)


def log(losses: list[float | None]) -> dict[int, Step]:
    common = {"t": "", "rank": 0, "wall_s": 0.1, "input_s": 0.0, "compute_s": 0.1, "comm_s": 0.0, "rank_samples": 1}
    return {number: Step(step=number, loss=loss, **common) for number, loss in enumerate(losses)}


def runs(logs: list[list[float | None]]) -> list[tuple[str, str, dict[int, Step]]]:
    return [(f"x-{number}", f"run-{number}", log(losses)) for number, losses in enumerate(logs)]


@given(LOGS, st.floats(0.1, 0.9))
def test_the_best_share_goes_on(logs: list[list[float | None]], keep: float) -> None:
    """At one rung: at least the share continues, each run that continues is better than each stopped one."""
    decisions = halving.decide(runs(logs), [5], keep)
    reached = [losses for losses in logs if len(losses) >= 5]
    assert len(decisions) == len(reached)
    continuing = [decision for decision in decisions if decision.action == "keep"]
    stopped = [decision for decision in decisions if decision.action == "stop"]
    assert len(continuing) >= min(len(reached), max(1, math.ceil(keep * len(reached))))

    def loss(decision: halving.HalvingDecision) -> float:
        return math.inf if decision.value is None else decision.value

    assert not stopped or max(map(loss, continuing)) < min(map(loss, stopped))
    assert all((decision.rank == 1) <= (decision.action == "keep") for decision in decisions)


@given(LOGS)
def test_a_stopped_run_stays_stopped(logs: list[list[float | None]]) -> None:
    """A later rung changes no decision to stop, and later steps change none of an earlier rung."""
    first = {one.run_id for one in halving.decide(runs(logs), [3], 0.5) if one.action == "stop"}
    both = {one.run_id for one in halving.decide(runs(logs), [3, 6], 0.5) if one.action == "stop"}
    assert first <= both
    shorter = [losses[:3] for losses in logs]
    assert {one.run_id for one in halving.decide(runs(shorter), [3], 0.5) if one.action == "stop"} == first


def test_a_metric_is_judged_by_its_last_value_before_the_rung() -> None:
    """The largest is best where that is asked for, NaN is the worst, and a run without one is left alone."""
    logged: list[dict[int, float | None]] = [{1: 0.9, 5: 0.0}, {0: 0.9, 2: 0.1}, {2: None}, {5: 0.3}]
    logs = [
        {
            number: replace(step, metrics={"success": values[number]} if number in values else {})
            for number, step in both
        }
        for values, both in ((values, log([1.0] * 6).items()) for values in logged)
    ]
    named = [(f"x-{number}", f"run-{number}", steps) for number, steps in enumerate(logs)]
    for is_largest_best, actions in ((True, ["keep", "stop", "stop"]), (False, ["stop", "keep", "stop"])):
        decisions = halving.decide(named, [4], 0.3, metric="success", is_largest_best=is_largest_best)
        assert [decision.action for decision in decisions] == actions
        assert [decision.value for decision in decisions] == [0.9, 0.1, None]


def test_a_loss_of_nan_is_the_worst() -> None:
    """NaN is logged as null; such a run is stopped before any other."""
    decisions = halving.decide(runs([[1.0, 1.0], [None, None], [9.0, 9.0]]), [2], 0.5)
    assert [decision.action for decision in decisions] == ["keep", "stop", "keep"]
