"""What a node's incidents say about it: how often it fails, and how long it takes until it is back."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from statistics import median

from pitools.core.record import Record
from pitools.core.timestamps import seconds_between
from pitools.node.control.incidents import EntryKind, Incident
from pitools.node.types import NodeReport


class NodeHistory(Record, frozen=True, kw_only=True, tag="pit.node-history/1"):
    """The incidents of a node in numbers. checked_at: of its last report, "" without one.

    median_between_s: from the start of an incident to the start of the next one; None for fewer than two.
    median_repair_s: from the start to the return, of incidents that ended with one; None without.
    """

    node: str
    incidents: int
    median_between_s: float | None = None
    median_repair_s: float | None = None
    checked_at: str = ""


def node_history(node: str, incidents: Iterable[Incident], report: NodeReport | None) -> NodeHistory:
    """Return a node's history: of its incidents, among those of a cluster, and its last report."""
    own = sorted((one for one in incidents if one.node == node), key=lambda one: one.opened_at)
    gaps = [_between_s(first.opened_at, second.opened_at) for first, second in pairwise(own)]
    repairs = [_between_s(one.opened_at, one.over_at) for one in own if one.outcome == EntryKind.RETURNED]
    return NodeHistory(
        node=node,
        incidents=len(own),
        median_between_s=median(gaps) if gaps else None,
        median_repair_s=median(repairs) if repairs else None,
        checked_at=report.checked_at if report else "",
    )


def _between_s(earlier: str, later: str) -> float:
    """Return the seconds from one time to another; 0 where a clock went back."""
    return round(max(0.0, seconds_between(earlier, later) or 0.0), 3)
