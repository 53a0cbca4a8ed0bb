"""What incidents say about a node."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pitools.node.control.history import node_history
from pitools.node.control.incidents import Incident
from pitools.node.types import NodeReport


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
    one = [incident(1, 1, 2), incident(2, 3, 8, "released"), incident(3, 9, 9.5), incident(4, 10)]
    report = NodeReport(node="n1", boot_id="", checked_at=at(11))
    history = node_history("n1", [*one, incident(1, 4, node="n2")], report)
    assert (history.incidents, history.checked_at) == (4, at(11))
    assert (history.median_between_s, history.median_repair_s) == (7200, 2700)


def test_a_node_without_a_past_has_no_numbers() -> None:
    """None rather than zero."""
    history = node_history("n9", [incident(1, 1)], None)
    assert (history.incidents, history.median_between_s, history.median_repair_s) == (0, None, None)


@given(st.lists(st.floats(0, 23.9), max_size=8), st.randoms())
def test_order_does_not_matter(starts: list[float], dice: object) -> None:
    """The median is of the sorted starts, whatever the journal's order."""
    own = [incident(number, start) for number, start in enumerate(starts)]
    other = sorted(own, key=lambda _: dice.random())  # type: ignore[attr-defined]
    first, second = (node_history("n1", each, None) for each in (own, other))
    assert first == second


def test_a_clock_that_went_back_is_no_negative_time() -> None:
    """An end before the start is one at once."""
    assert node_history("n1", [incident(1, 5, 4)], None).median_repair_s == 0
