"""Decide which nodes are drained and returned: a pure function of reports, Slurm's states and incidents.

What is missing decides nothing: a node without a fresh report, or that Slurm did not list, stays as it is. A drain that
is not ours, by its reason, is never touched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Literal, NamedTuple

import msgspec

from pitools.core import timestamps, units
from pitools.core.record import Record
from pitools.core.timestamps import seconds_between
from pitools.node.check.config import Control
from pitools.node.control.incidents import Incident, incident_of_reason
from pitools.node.types import ACTIONS, BENCH_CHECK, Action, Finding, NodeReport, age_s, draining

DRAINED = "9999"
"""Later than all times: of a node whose drain keeps jobs off."""

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


class Sight(NamedTuple):
    """What was last seen of a node while it was drained by us: its report's time, by its own clock, and when that was.

    read_at: when that report was first read. seen_at: the last poll that had the node drained. Both by our clock.
    """

    reported_at: str
    read_at: str
    seen_at: str

    @property
    def dealt_at(self) -> str:
        """The time of that poll by the node's clock, or up to a tick earlier; "" if the report has no time."""
        passed_s = seconds_between(self.read_at, self.seen_at)
        if passed_s is None or seconds_between(self.reported_at, self.seen_at) is None:
            return ""
        moment = datetime.fromisoformat(self.reported_at) + timedelta(seconds=max(0.0, passed_s))
        return timestamps.to_rfc3339(moment)


Act = Literal["drain", "adopt", "relapse", "recover", "bench", "return", "escalate", "release", "hold"]


class ActRow(Record, frozen=True, kw_only=True, tag="pit.node-act/1"):
    """One thing to do about a node, and whether it was done: false in a dry run, for a hold, or as why or error says.

    act: `drain`; `hold` (a limit, or old evidence, holds the drain back); `return`; `bench` (asked for once, and
    awaited for an hour). The others are only noted: `recover` (the check of a drained node passes, and none
    fails that drains), `relapse` (one fails again, or asks for more), `escalate` (left to a person), `release`
    (somebody else resumed the node, or drained it anew), `adopt` (it is drained with a reason of ours that no open
    incident has). incident: "" of a `hold`, and of a `drain` that is not begun. action, evidence_at, is_event, part
    (its table and subject): of the finding that drains, or that is to be seen to from now on; for other acts
    evidence_at is that of the journal's entry. held_by: the keys of [control] that hold it back, and why.
    """

    node: str
    act: Act
    incident: str = ""
    check: str = ""
    done: bool = False
    why: str = ""
    error: str = ""
    action: Action = "none"
    evidence_at: str = ""
    is_event: bool = False
    part: str = ""
    held_by: str = ""


def decide(
    now: str,
    nodes: Mapping[str, NodeView],
    reports: Mapping[str, NodeReport],
    incidents: Sequence[Incident],
    control: Control,
    sights: Mapping[str, Sight],
) -> list[ActRow]:
    """Return what is to be done, drains last. nodes: what one answer of Slurm listed. incidents: all, in order.

    sights: of the tick before, by node.
    """
    fresh = {name: one for name, one in reports.items() if name in nodes and not report_problem(one, now, control)}
    by_node: dict[str, list[Incident]] = {}
    for one in incidents:
        by_node.setdefault(one.node, []).append(one)
    open_by_node = {one.node: one for one in incidents if one.phase != "over"}
    decisions: list[ActRow] = []
    for name, view in nodes.items():
        if incident := open_by_node.get(name):
            decisions += _follow_incident(
                now, view, fresh.get(name), incident, by_node[name], control, sights.get(name)
            )
        elif is_ours(view):
            decisions += _adopt(view, by_node.get(name, ()))
    candidates: list[tuple[Finding, NodeView]] = []
    for name, report in fresh.items():
        if may_drain(nodes[name]) and name not in open_by_node:
            recent, old = _worst_findings(now, report, by_node.get(name, ()), control)
            if recent:
                candidates.append((recent, nodes[name]))
            elif old:
                limit = f"max_evidence_age = {control.max_evidence_age}: it is of {old.evidence_at}"
                decisions.append(_drain_or_hold(name, old, held_by=limit))
    # A node that is returned now counts until it is returned, as Slurm may refuse; so does one of a lost journal.
    counted = open_by_node.keys() - {one.node for one in decisions if one.act == "release"}
    counted |= {name for name, view in nodes.items() if is_ours(view)}
    return [*decisions, *_drain_within_limits(now, candidates, nodes, incidents, counted, control)]


def see(
    now: str,
    nodes: Mapping[str, NodeView],
    reports: Mapping[str, NodeReport],
    drained: Iterable[str],
    before: Mapping[str, Sight],
) -> dict[str, Sight]:
    """Return the sights of this tick: of nodes with an open incident, or that are drained now; kept once resumed."""
    sights = {}
    for name in drained:
        sight, report = before.get(name), reports.get(name)
        if report and name in nodes and (sight is None or nodes[name].is_drained):
            is_same = sight and sight.reported_at == report.checked_at
            sight = Sight(report.checked_at, sight.read_at if sight and is_same else now, now)
        if sight:
            sights[name] = sight
    return sights


def is_ours(view: NodeView) -> bool:
    """Return whether a node is drained with a reason that names an incident of this node."""
    return view.is_drained and incident_of_reason(view.reason)[0].rpartition("-")[0] == view.node


def report_problem(report: NodeReport | None, now: str, control: Control) -> str:
    """Return why a node's report counts as none; "" if it counts."""
    if report is None:
        return "no report that can be used"
    age = age_s(report.checked_at, now)
    if age == float("inf"):
        return "its report is of the future, or of no time: a clock is wrong"
    is_old = age > units.parse_duration(control.max_report_age)
    return f"no report of the last {control.max_report_age}" if is_old else ""


def may_drain(view: NodeView) -> bool:
    """Return whether a node is neither drained, nor down for a reason of somebody else, which a drain would replace."""
    return not view.is_drained and not (view.is_down and view.reason)


def _worst_findings(
    now: str, report: NodeReport, past: Sequence[Incident], control: Control
) -> tuple[Finding | None, Finding | None]:
    """Return the severest finding that drains a node, the oldest of equals; and that of evidence which is too old."""
    by_age: tuple[list[Finding], list[Finding]] = [], []
    for one in _not_dealt_with(report, past):
        by_age[age_s(one.evidence_at, now) > units.parse_duration(control.max_evidence_age)].append(one)
    recent, old = (min(each, key=severest_first, default=None) for each in by_age)
    return recent, old


def _not_dealt_with(report: NodeReport, past: Sequence[Incident]) -> list[Finding]:
    """Return the findings that drain a node, but for evidence of before the end of its last incident."""
    ends = [one.dealt_at or one.over_at for one in past if one.drained_at or one.is_incomplete]
    dealt_with = max((one for one in ends if age_s(one, report.checked_at) < float("inf")), default="")
    return [one for one in draining(report.findings) if one.evidence_at > dealt_with]


def handled(now: str, incidents: Sequence[Incident], control: Control) -> dict[str, str]:
    """Return by node the time before which its evidence was dealt with: the end of its last incident.

    DRAINED while it is drained by one that is open; not in here without an incident that young evidence may be of.
    """
    oldest_s = units.parse_duration(control.max_evidence_age)
    return {
        one.node: (one.dealt_at or one.over_at) if one.over_at else DRAINED
        for one in incidents
        if one.phase != "opening"
        and (one.drained_at or one.is_incomplete)
        and (not one.over_at or age_s(one.over_at, now) <= oldest_s)
    }


def severest_first(finding: Finding) -> tuple[bool, int, str, str]:
    """Return a key that sorts findings: the severest first, then the oldest; those that are never acted upon last."""
    return finding.is_shadow, -ACTIONS.index(finding.action), finding.evidence_at, finding.check


def _drain_or_hold(node: str, finding: Finding, *, held_by: str = "") -> ActRow:
    return ActRow(
        act="hold" if held_by else "drain",
        node=node,
        check=finding.check,
        held_by=held_by,
        why=f"{finding.message}; held back by [control] {held_by}" if held_by else finding.message,
        action=finding.action,
        evidence_at=finding.evidence_at,
        is_event=finding.is_event,
        part=_part(finding),
    )


def _part(finding: Finding) -> str:
    return f"{finding.table} {finding.subject}"


def _drain_within_limits(
    now: str,
    candidates: Sequence[tuple[Finding, NodeView]],
    nodes: Mapping[str, NodeView],
    incidents: Sequence[Incident],
    open_nodes: set[str],
    control: Control,
) -> Iterator[ActRow]:
    """Yield a drain for each candidate, the severest and oldest first, or a hold that names the limits."""
    sizes = Counter(group for view in nodes.values() for group in view.groups)
    used = Counter(group for name in open_nodes if name in nodes for group in nodes[name].groups)
    in_hour = {one.node for one in incidents if age_s(one.opened_at, now, of_future=0.0) < _HOUR_S}
    hourly = max(1, int(control.max_share_hour * len(nodes)))
    for finding, view in sorted(candidates, key=lambda pair: (severest_first(pair[0]), pair[1].node)):
        full = []
        for group in view.groups:
            kind, _, name = group.partition(":")
            share: float = getattr(control, f"max_share_{kind}")
            if used[group] >= max(1, int(share * sizes[group])):
                full.append(f"max_share_{kind} = {share:g}, with {used[group]} of {sizes[group]} nodes of {name}")
        if len(in_hour) >= hourly and view.node not in in_hour:
            full.append(f"max_share_hour = {control.max_share_hour:g}, with {len(in_hour)} of {len(nodes)} nodes")
        if full:
            yield _drain_or_hold(view.node, finding, held_by=" and ".join(full))
            continue
        used.update(view.groups)
        in_hour.add(view.node)
        yield _drain_or_hold(view.node, finding)


def _adopt(view: NodeView, of_node: Sequence[Incident]) -> Iterator[ActRow]:
    """Yield the adoption of a node that is drained with our reason, but without an open incident.

    It is left to a person: what its check asked for is lost, or the drain is another controller's. One whose reason
    differs from the incident's was taken over.
    """
    incident, check = incident_of_reason(view.reason)
    known = [one for one in of_node if one.incident == incident]
    if known and not known[0].owns(view.reason):
        return
    why = f"drained with our reason, but without an open incident: {view.reason}"
    yield ActRow(act="adopt", node=view.node, incident=incident, check=check, why=why)
    problem = "is over" if known else "is not there"
    why = f"in the journal its incident {problem}: a person returns it, with `pit node return NODE`"
    yield ActRow(act="escalate", node=view.node, incident=incident, check=check, why=why)


def _follow_incident(
    now: str,
    view: NodeView,
    report: NodeReport | None,
    incident: Incident,
    of_node: Sequence[Incident],
    control: Control,
    sight: Sight | None,
) -> Iterator[ActRow]:
    """Yield what an open incident needs now: at most a note and an act."""

    def decision(act: Act, why: str) -> ActRow:
        of_report = report.checked_at if report and act in ("recover", "return") and view.is_drained else ""
        at = sight.dealt_at if sight and act == "release" else of_report
        return ActRow(
            act=act, node=view.node, incident=incident.incident, check=incident.check, why=why, evidence_at=at
        )

    to_person = "a person returns it, with `pit node return NODE`"
    is_unchanged = incident.owns(view.reason)
    if incident.phase == "opening":
        # A drain that was begun, and perhaps not made: only while a fresh report still asks for it, and not where the
        # journal may have lost its end, since when others used the limits.
        if not is_unchanged and not may_drain(view):
            yield decision("release", f"drained or down by somebody else: {view.reason}")
        elif is_unchanged:
            yield decision("drain", incident.message)
        elif incident.is_incomplete:
            yield decision("release", "it was not drained, and the journal is damaged where it tells of it")
        elif report and any(one.check == incident.check for one in draining(report.findings)):
            yield decision("drain", incident.message)
        elif report:
            yield decision("release", "it was not drained, and its check fails no more")
        return
    if not view.is_drained:
        yield decision("return" if incident.phase == "returning" else "release", "resumed")
        return
    if not is_unchanged:
        yield decision("release", f"its reason was changed: {view.reason}")
        return
    if incident.is_incomplete and not incident.is_escalated:
        yield decision("escalate", f"the journal is damaged where it tells of it: {to_person}")
        return
    # A return that was begun, and not made, is decided anew: the node may have failed since.
    if report is None or not _is_of_since(report, incident, now):
        return
    failure, is_for_person = _why_not_well(incident, report)
    if failure:
        if demand := _new_demand(incident, report, of_node):
            relapse = decision("relapse", f"{demand.check}: {demand.message}")
            more = {"action": demand.action, "is_event": demand.is_event, "part": _part(demand)}
            yield msgspec.structs.replace(relapse, **more)
        elif incident.phase != "drained":
            yield decision("relapse", failure)
        if is_for_person and not incident.is_escalated:
            yield decision("escalate", f"{failure}: {to_person}")
        return
    is_at_once = _is_over_at_once(incident, report)
    stable_s = age_s(incident.recovered_at, report.checked_at)  # by the node's clock, infinite if that was set back
    silent_s = age_s(sight.reported_at, report.checked_at) if sight else float("inf")
    is_anew = stable_s == float("inf") or silent_s > units.parse_duration(control.max_report_age)
    if incident.phase == "drained" or is_anew:
        yield decision("recover", f"{incident.check} passes, and no check fails that drains")
        if not is_at_once:
            return
    if incident.is_escalated or view.is_down or view.has_jobs:
        return
    within_s = units.parse_duration(control.returns_within)
    returns = sum(one.outcome == "returned" and age_s(one.over_at, now, of_future=0.0) <= within_s for one in of_node)
    often = f"it returned {returns} times within {control.returns_within}" if returns >= control.max_returns else ""
    if why := _missing_remedy(incident, report) or often:
        yield decision("escalate", f"{why}: {to_person}")
    elif is_at_once or stable_s >= units.parse_duration(control.stable_for):
        if not control.bench_before_return or BENCH_CHECK in report.passed:
            bench = ", nor its bench" if control.bench_before_return else ""
            yield decision("return", f"{incident.check} passes, and no check fails that drains{bench}")
        elif incident.asked_at and age_s(incident.asked_at, now, of_future=0.0) >= _HOUR_S:
            problem = "".join(f" ({one.message})" for one in report.findings if _is_bench(one))
            yield decision("escalate", f"its bench has had no result for an hour{problem}: {to_person}")
        else:
            yield decision("bench", "its next report is to have its bench")


def shown_state(incident: Incident, report: NodeReport) -> str:
    """Return what an operator reads first of a node with an open incident: its own check's state, else what fails."""
    for one in sorted(report.findings, key=lambda one: one.state != "failed"):
        if one.check == incident.check:
            return f"{one.check}{'' if one.state == 'failed' else f' is {one.state}'}: {one.message}"
    return _why_not_well(incident, report)[0] or f"{incident.check} passes"


def _why_not_well(incident: Incident, report: NodeReport) -> tuple[str, bool]:
    """Return why a drained node does not recover, "" if it does; and whether only a person can change that."""
    if failure := _failure(report):
        return failure, False
    for one in report.findings:
        if _is_bench(one) and one.state == "failed":
            return f"its bench: {one.message}", True
    if incident.check in report.passed:
        gone = min(incident.hardware.keys() - report.hardware.keys(), default="")
        is_lost = gone and not _is_over_at_once(incident, report)  # what is not there fails no check
        return f"{gone} is not there, as it was when the node was drained" if is_lost else "", False
    if any(one.check == incident.check for one in report.findings):
        return f"{incident.check} is unknown", False
    return f"it has no check {incident.check} any more", True


def _is_bench(finding: Finding) -> bool:
    return finding.check == BENCH_CHECK


def why_not_returned(
    now: str, view: NodeView, report: NodeReport | None, incident: Incident | None, control: Control
) -> str:
    """Return why a person cannot return a node as ours; "" if nothing speaks against it.

    incident: the node's open one. A check that is unknown, or is no more, a missing remedy and frequent returns do not
    hold a person back.
    """
    if incident is None or incident.phase == "opening" or not view.is_drained:
        return f"it is not drained by pit node{f': {view.reason}' if view.is_drained else ''}"
    if not incident.owns(view.reason):
        return f"its reason was changed: {view.reason}"
    if view.is_down:
        return "it is down, for lack of slurmd or by a person"
    if report is None or report_problem(report, now, control):
        return report_problem(report, now, control)
    if not _is_of_since(report, incident, now):
        return f"it was not checked since it was drained, at {incident.drained_at}"
    return _failure(report)


def _is_of_since(report: NodeReport, incident: Incident, now: str) -> bool:
    """Return whether a report is of after the drain, whose time says nothing where the clock was set back since."""
    return report.checked_at > incident.drained_at or age_s(incident.drained_at, now) == float("inf")


def _failure(report: NodeReport) -> str:
    """Return the first finding of a report that drains a node, as text; "" for none."""
    return next((f"{one.check}: {one.message}" for one in draining(report.findings)), "")


def _new_demand(incident: Incident, report: NodeReport, of_node: Sequence[Incident]) -> Finding | None:
    """Return the severest finding that drains, if an incident is to see to it from now on; else None.

    It asks for more than the incident does, or fails after the boot or the new part that the incident asked for.
    """

    def severity(one: Finding | Incident) -> tuple[int, bool]:
        return ACTIONS.index(one.action), one.is_event

    worst = max(_not_dealt_with(report, of_node), key=severity, default=None)
    if worst is None or severity(worst) > severity(incident):
        return worst
    return worst if _is_over_at_once(incident, report) and not _missing_remedy(incident, report) else None


def _missing_remedy(incident: Incident, report: NodeReport) -> str:
    """Return what the incident's action demands and has not happened; "" if nothing."""
    if incident.action == "reboot" and not _has_booted(incident, report):
        return "it was not rebooted"
    if incident.action == "repair" and not _has_new_part(incident, report):
        return f"no part was replaced of {incident.part.strip()}"
    if incident.is_event and not _is_over_at_once(incident, report):
        return (
            f"{incident.check} is of an event, which passes once that is old: it was not rebooted, nor a part replaced"
        )
    return ""


def _is_over_at_once(incident: Incident, report: NodeReport) -> bool:
    """Return whether the node booted again or has a new part, and no check failed since: none need pass for long."""
    return _has_booted(incident, report) or _has_new_part(incident, report)


def _has_booted(incident: Incident, report: NodeReport) -> bool:
    """Return whether the node booted since the demand. A boot id that could not be read says nothing."""
    return bool(incident.boot_id and report.boot_id and report.boot_id != incident.boot_id)


def _has_new_part(incident: Incident, report: NodeReport) -> bool:
    """Return whether the part in question has a serial number that none had: the device of the finding's subject, else
    all of its table. One that is gone, back or renamed is no new part.
    """
    words, before = incident.part.split(), set(incident.hardware.values())
    named = {key for key in incident.hardware if not set(words).isdisjoint(key.split()[1:2])}
    parts = named or {key for key in incident.hardware if words[:1] == key.split()[:1]}
    return any(key in parts and one not in before for key, one in report.hardware.items())
