"""What incidents say about a node."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pitools.node.control.history import node_history
from pitools.node.control.incidents import Incident
from pitools.node.types import Finding, NodeReport


def at(hour: float) -> str:
    return f"2026-11-01T{int(hour):02}:{int(hour % 1 * 60):02}:00.000Z"


def incident(
    number: int, start: float, end: float | None = None, outcome: str = "returned", node: str = "n1"
) -> Incident:
    return Incident(
        incident=f"{node}-{number}",
        node=node,
        check=f"check-{number % 2}",
        action="drain",
        opened_at=at(start),
        evidence_at=at(start),
        message="",
        drained_at=at(start),
        phase="drained" if end is None else "over",
        over_at="" if end is None else at(end),
        outcome="" if end is None else outcome,
    )


def test_times_between_incidents_and_to_the_return() -> None:
    """Starts at 1, 3, 9 and 10 h: 2, 6 and 1 h apart; repairs are those that ended with a return."""
    one = [incident(1, 1, 2), incident(2, 3, 8, "taken-over"), incident(3, 9, 9.5), incident(4, 10)]
    report = NodeReport(
        node="n1",
        boot_id="",
        checked_at=at(11),
        findings=(
            Finding(node="n1", check="a", state="failed", level="warning", action="none", evidence_at=""),
            Finding(node="n1", check="b", state="unknown", level="warning", action="none", evidence_at=""),
        ),
    )
    history = node_history("n1", [*one, incident(1, 4, node="n2")], report, at(12))
    assert (history.incidents, history.open_incident, history.last_opened_at) == (4, "n1-4", at(10))
    assert (history.mtbi_s, history.repair_s) == (7200, 2700)
    assert history.drained_s == 3600 * (1 + 5 + 0.5 + 2)
    assert history.checks == {"check-1": 2, "check-0": 2}
    assert (history.checked_at, history.failed) == (at(11), 1)


def test_a_node_without_a_past_has_no_numbers() -> None:
    """None rather than zero."""
    history = node_history("n9", [incident(1, 1)], None, at(2))
    assert (history.incidents, history.mtbi_s, history.repair_s, history.failed) == (0, None, None, None)


@given(st.lists(st.floats(0, 23.9), max_size=8), st.randoms())
def test_order_does_not_matter(starts: list[float], dice: object) -> None:
    """The median is of the sorted starts, whatever the journal's order."""
    own = [incident(number, start) for number, start in enumerate(starts)]
    other = sorted(own, key=lambda _: dice.random())  # type: ignore[attr-defined]
    first, second = (node_history("n1", each, None, at(23.95)) for each in (own, other))
    assert (first.mtbi_s, first.drained_s) == (second.mtbi_s, pytest.approx(second.drained_s))


def test_a_clock_that_went_back_is_no_negative_time() -> None:
    """An end before the start is one at once."""
    history = node_history("n1", [incident(1, 5, 4)], None, at(6))
    assert (history.repair_s, history.drained_s) == (0, 0)
