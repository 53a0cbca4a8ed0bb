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
    """The incidents of a node in numbers. open_incident: its id, "" for none.

    mtbi_s: median time from the start of an incident to the start of the next one; None for fewer than two. repair_s:
    median time from start to return, of incidents that ended with one; None without. drained_s: of all together.
    checks: how many incidents each check began. checked_at, failed: of the last report, "" and None without one.
    """

    node: str
    incidents: int
    open_incident: str = ""
    last_opened_at: str = ""
    mtbi_s: float | None = None
    repair_s: float | None = None
    drained_s: float = 0.0
    checks: dict[str, int] = {}
    checked_at: str = ""
    failed: int | None = None


def node_history(node: str, incidents: Iterable[Incident], report: NodeReport | None, now: str) -> NodeHistory:
    """Return a node's history: of its incidents, among those of a cluster, and its last report."""
    own = sorted((one for one in incidents if one.node == node), key=lambda one: one.opened_at)
    is_open = [one for one in own if one.phase != "over"]
    gaps = [_between_s(first.opened_at, second.opened_at) for first, second in pairwise(own)]
    repairs = [_between_s(one.opened_at, one.over_at) for one in own if one.outcome == EntryKind.RETURNED]
    checks: dict[str, int] = {}
    for one in own:
        checks[one.check] = checks.get(one.check, 0) + 1
    return NodeHistory(
        node=node,
        incidents=len(own),
        open_incident=is_open[-1].incident if is_open else "",
        last_opened_at=own[-1].opened_at if own else "",
        mtbi_s=median(gaps) if gaps else None,
        repair_s=median(repairs) if repairs else None,
        drained_s=sum(_between_s(one.drained_at, one.over_at or now) for one in own if one.drained_at),
        checks=checks,
        checked_at=report.checked_at if report else "",
        failed=sum(one.state == "failed" for one in report.findings) if report else None,
    )


def _between_s(earlier: str, later: str) -> float:
    """Return the seconds from one time to another; 0 where a clock went back."""
    return round(max(0.0, seconds_between(earlier, later) or 0.0), 3)
