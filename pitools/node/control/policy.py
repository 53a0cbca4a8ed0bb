"""Decide which nodes are drained and returned: a pure function of reports, Slurm's states and incidents.

What is missing decides nothing: a node without a fresh report, or that Slurm did not list, stays as it is. A drain that
is not ours, by its reason, is never touched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Literal, NamedTuple

from pitools.core import units
from pitools.core.record import Record
from pitools.node.check.config import Control
from pitools.node.control.incidents import Incident, incident_of_reason
from pitools.node.types import ACTIONS, Finding, NodeReport

_DRAINING = ACTIONS.index("drain-after-job")  # this action and those after it drain the node
_HOUR_S = 3600.0


class NodeView(NamedTuple):
    """A node as Slurm has it. groups: the leaf switches and partitions that it belongs to, as `leaf:s1`, `partition:a`.

    has_jobs: jobs run, or complete, there.
    """

    node: str
    is_drained: bool
    is_down: bool
    has_jobs: bool
    reason: str
    groups: tuple[str, ...] = ()


Act = Literal["drain", "adopt", "fail", "recover", "return", "escalate", "take-over", "hold"]


class Decision(Record, frozen=True, kw_only=True, tag="pit.node-decision/1"):
    """One thing to do about a node. incident: "" for one that is to be opened. why: for people.

    act: `drain`; `return`; `hold` (a limit holds the drain back). The others are only noted: `fail`, `recover` (checks
    of a drained node fail, or pass again), `escalate` (left to a person), `take-over` (somebody else drained or resumed
    it), `adopt` (it is drained with a reason of ours that no open incident has).
    """

    act: Act
    node: str
    incident: str = ""
    check: str = ""
    finding: Finding | None = None
    why: str = ""


def decide(
    now: str,
    nodes: Mapping[str, NodeView],
    reports: Mapping[str, NodeReport],
    incidents: Sequence[Incident],
    control: Control,
) -> list[Decision]:
    """Return what is to be done, drains last. nodes: what one answer of Slurm listed. incidents: all, in order."""
    fresh = {
        name: report
        for name, report in reports.items()
        if name in nodes and age_s(report.checked_at, now) <= units.parse_duration(control.max_report_age)
    }
    by_node: dict[str, list[Incident]] = {}
    for one in incidents:
        by_node.setdefault(one.node, []).append(one)
    open_by_node = {one.node: one for one in incidents if one.phase != "over"}
    decisions: list[Decision] = []
    for name, view in nodes.items():
        if incident := open_by_node.get(name):
            decisions += _follow_incident(now, view, fresh.get(name), incident, by_node[name], control)
        elif view.is_drained and incident_of_reason(view.reason)[0]:
            decisions += _adopt(view, by_node.get(name, ()))
    closed = {one.node for one in decisions if one.act in ("return", "take-over")}
    candidates = [
        (finding, view)
        for name, report in fresh.items()
        if (view := nodes[name]) and may_drain(view) and name not in open_by_node
        if (finding := _worst_finding(now, report, by_node.get(name, ()), control))
    ]
    still_open = open_by_node.keys() - closed
    return [*decisions, *_drain_within_limits(now, candidates, nodes, incidents, still_open, control)]


def may_drain(view: NodeView) -> bool:
    """Return whether a node is neither drained, nor down for a reason of somebody else, which a drain would replace."""
    return not view.is_drained and not (view.is_down and view.reason)


def _worst_finding(now: str, report: NodeReport, past: Sequence[Incident], control: Control) -> Finding | None:
    """Return the severest finding that drains a node, the oldest of equals; None without one.

    Evidence of before the end of the node's last incident was dealt with.
    """
    dealt_with = max((one.over_at for one in past), default="")
    findings = [
        one
        for one in _draining(report)
        if one.evidence_at > dealt_with
        and age_s(one.evidence_at, now) <= units.parse_duration(control.max_evidence_age)
    ]
    return min(findings, key=lambda one: (-ACTIONS.index(one.action), one.evidence_at, one.check), default=None)


def _drain_within_limits(
    now: str,
    candidates: Sequence[tuple[Finding, NodeView]],
    nodes: Mapping[str, NodeView],
    incidents: Sequence[Incident],
    open_nodes: set[str],
    control: Control,
) -> Iterator[Decision]:
    """Yield a drain for each candidate, the severest and oldest first, or a hold that names the limit."""
    sizes = Counter(group for view in nodes.values() for group in view.groups)
    used = Counter(group for name in open_nodes if name in nodes for group in nodes[name].groups)
    shares = {"leaf": control.max_share_leaf, "partition": control.max_share_partition}
    in_hour = sum(1 for one in incidents if age_s(one.opened_at, now) < _HOUR_S)
    hourly = max(1, int(control.max_share_hour * len(nodes)))
    ordered = sorted(candidates, key=lambda pair: (-ACTIONS.index(pair[0].action), pair[0].evidence_at, pair[1].node))
    for finding, view in ordered:
        limits = {group: max(1, int(shares[group.partition(":")[0]] * sizes[group])) for group in view.groups}
        full = next((group for group in view.groups if used[group] >= limits[group]), "")
        if full or in_hour >= hourly:
            limit = (
                f"{used[full]} of {sizes[full]} nodes of {full.replace(':', ' ')}" if full else f"{in_hour} in an hour"
            )
            why = f"{finding.message}; not drained: {limit} are drained already, the most that [control] allows"
            yield Decision(act="hold", node=view.node, check=finding.check, finding=finding, why=why)
            continue
        used.update(view.groups)
        in_hour += 1
        yield Decision(act="drain", node=view.node, check=finding.check, finding=finding, why=finding.message)


def _adopt(view: NodeView, of_node: Sequence[Incident]) -> Iterator[Decision]:
    """Yield the adoption of a node that is drained with our reason, but without an open incident.

    One that the journal does not know is left to a person: what its check asked for is lost.
    """
    incident, check = incident_of_reason(view.reason)
    why = f"drained with our reason, but without an open incident: {view.reason}"
    yield Decision(act="adopt", node=view.node, incident=incident, check=check, why=why)
    if incident not in {one.incident for one in of_node}:
        why = f"the journal has nothing of its drain: a person returns it, with `pit node return {view.node}`"
        yield Decision(act="escalate", node=view.node, incident=incident, check=check, why=why)


def _follow_incident(
    now: str,
    view: NodeView,
    report: NodeReport | None,
    incident: Incident,
    of_node: Sequence[Incident],
    control: Control,
) -> Iterator[Decision]:
    """Yield what an open incident needs now: at most a note and an act."""

    def decision(act: Act, why: str) -> Decision:
        return Decision(act=act, node=view.node, incident=incident.incident, check=incident.check, why=why)

    is_ours = incident_of_reason(view.reason)[0] == incident.incident
    if incident.phase == "opening":
        # A drain that was begun, and perhaps not made: only while a fresh report still asks for it.
        if not is_ours and not may_drain(view):
            yield decision("take-over", f"drained or down by somebody else: {view.reason}")
        elif is_ours or (report and any(one.check == incident.check for one in _draining(report))):
            yield decision("drain", incident.message)
        elif report:
            yield decision("take-over", "it was not drained, and its check fails no more")
        return
    if not view.is_drained:
        yield decision("return" if incident.phase == "returning" else "take-over", "resumed")
        return
    if not is_ours:
        yield decision("take-over", f"its reason was changed: {view.reason}")
        return
    if incident.phase == "returning":
        yield decision("return", "its return was begun")
        return
    if report is None or report.checked_at <= incident.drained_at:
        return
    failure = _failure(report) or ("" if incident.check in report.passed else f"{incident.check} is unknown")
    if failure:
        if incident.phase == "recovered":
            yield decision("fail", failure)
        return
    if incident.phase == "drained":
        yield decision("recover", "all its checks pass")
        if not _is_over_at_once(incident, report):
            return
    if incident.is_escalated or view.is_down or view.has_jobs:
        return
    needs = _missing_remedy(incident, report)
    returns = [
        one
        for one in of_node
        if one.outcome == "returned" and age_s(one.over_at, now) <= units.parse_duration(control.returns_within)
    ]
    if needs or len(returns) >= control.max_returns:
        why = needs or f"it returned {len(returns)} times within {control.returns_within}"
        yield decision("escalate", f"{why}: a person returns it, with `pit node return {view.node}`")
    elif _is_over_at_once(incident, report) or age_s(incident.recovered_at, now) >= units.parse_duration(
        control.stable_for
    ):
        yield decision("return", "all its checks pass")


def why_not_returned(
    now: str, view: NodeView, report: NodeReport | None, incident: Incident | None, control: Control
) -> str:
    """Return why a person cannot return a node as ours; "" if nothing speaks against it.

    incident: the node's open one. A check that is unknown, or is no more, a missing remedy and frequent returns do not
    hold a person back.
    """
    if incident is None or incident.phase == "opening" or not view.is_drained:
        return f"it is not drained by pit node{f': {view.reason}' if view.is_drained else ''}"
    if incident_of_reason(view.reason)[0] != incident.incident:
        return f"its reason was changed: {view.reason}"
    if report is None or age_s(report.checked_at, now) > units.parse_duration(control.max_report_age):
        return f"it has no report of the last {control.max_report_age}"
    if report.checked_at <= incident.drained_at:
        return f"it was not checked since it was drained, at {incident.drained_at}"
    return _failure(report)


def _draining(report: NodeReport) -> list[Finding]:
    """Return the findings of a report that drain a node."""
    return [
        one
        for one in report.findings
        if one.state == "failed" and not one.is_shadow and ACTIONS.index(one.action) >= _DRAINING
    ]


def _failure(report: NodeReport) -> str:
    """Return the first finding of a report that drains a node, as text; "" for none."""
    return next((f"{one.check}: {one.message}" for one in _draining(report)), "")


def _missing_remedy(incident: Incident, report: NodeReport) -> str:
    """Return what the incident's action demands and has not happened; "" if nothing."""
    if incident.action == "reboot" and report.boot_id == incident.boot_id:
        return "it was not rebooted"
    if incident.action == "repair" and not _has_new_part(incident, report):
        return "no part was replaced"
    return ""


def _is_over_at_once(incident: Incident, report: NodeReport) -> bool:
    """Return whether the node booted again or has a new part: then its checks need not pass for a while."""
    booted = bool(incident.boot_id and report.boot_id and report.boot_id != incident.boot_id)
    return booted or _has_new_part(incident, report)


def _has_new_part(incident: Incident, report: NodeReport) -> bool:
    """Return whether a device has a serial number that none had. One that is gone, back or renamed is no new part."""
    before = set(incident.hardware.values())
    return any(device in incident.hardware and one not in before for device, one in report.hardware.items())


def age_s(at: str, now: str) -> float:
    """Return how long ago a time was, in seconds; infinity for one that cannot be read or is in the future by 5 min."""
    try:
        passed_s = (datetime.fromisoformat(now) - datetime.fromisoformat(at)).total_seconds()
    except (ValueError, TypeError):
        return float("inf")
    return passed_s if passed_s >= -300.0 else float("inf")
