"""One tick of the controller: poll Slurm once, read the reports, decide, and carry it out. For cron; no daemon.

Before each act the node is looked at again, so that a drain that a person made meanwhile is kept. A tick may be killed
anywhere: intents are in the journal, and the next tick resolves them first. A failed poll changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import NamedTuple

from pitools.core import hostlist, timestamps
from pitools.core.errors import ConfigError, PitError, UsageError, suggest
from pitools.core.locks import lock
from pitools.core.record import Record
from pitools.node import spool
from pitools.node.check.config import NodeConfig
from pitools.node.control.incidents import (
    EntryKind,
    Incident,
    IncidentEntry,
    append_entry,
    fold,
    incident_of_reason,
    next_id,
    read_entries,
)
from pitools.node.control.policy import Act, Decision, NodeView, age_s, decide, may_drain, why_not_returned
from pitools.node.types import NodeReport
from pitools.slurm.client import Client
from pitools.slurm.records import Node, Switch

_NOTES: dict[Act, EntryKind] = {
    "adopt": EntryKind.DRAINED,
    "fail": EntryKind.FAILED,
    "recover": EntryKind.RECOVERED,
    "escalate": EntryKind.ESCALATED,
    "take-over": EntryKind.TAKEN_OVER,
}


class ActRow(Record, frozen=True, kw_only=True, tag="pit.node-act/1"):
    """What a tick did about a node, or would do. done: false in a dry run, for a hold, or after an error."""

    node: str
    act: str
    incident: str
    check: str
    done: bool
    why: str
    error: str = ""


class NodeRow(Record, frozen=True, kw_only=True, tag="pit.node-health/1"):
    """A line of `pit node list`. state: Slurm's, with flags, as `idle+drain`. incident, phase, check: of the open one.

    report_age_s, failed, unknown: of the last report and its findings; None without one. The age is None, too, where
    the clock of the node is wrong. finding: its first failure. suspicion: how many users suspect it, and the
    newest reason.
    """

    node: str
    state: str
    incident: str = ""
    phase: str = ""
    check: str = ""
    report_age_s: float | None = None
    failed: int | None = None
    unknown: int | None = None
    finding: str = ""
    reason: str = ""
    suspicion: str = ""


class TickResult(NamedTuple):
    """The rows of a tick, and what is wrong with reports."""

    rows: list[ActRow]
    problems: list[str]


class Controller:
    """The controller of one cluster. Its journal and lock are in the folder `control` of the spool.

    Raises ConfigError without a spool.
    """

    def __init__(self, client: Client, config: NodeConfig) -> None:
        if not config.spool:
            raise ConfigError("spool: is missing (expected a folder that all nodes share)", key="spool")
        self._client = client
        self.config = config
        self._spool = Path(config.spool)
        self._folder = self._spool / "control"

    def tick(self, *, act: bool) -> TickResult:
        """Tick once; without `act` nothing is changed. Raises TryLater while another tick runs, PitError."""
        if act:
            self._folder.mkdir(mode=0o755, exist_ok=True)
            spool.make_suspicions(self._spool)
            with lock(self._folder / "lock", "the journal of incidents"):
                return self._tick(act=True)
        return self._tick(act=False)

    def return_nodes(self, names: Sequence[str]) -> TickResult:
        """Return drained nodes of ours at once, for a person; a row without `done` says why one is not returned.

        Raises UsageError for a node that Slurm does not have, TryLater while a tick runs, PitError.
        """
        self._folder.mkdir(mode=0o755, exist_ok=True)
        with lock(self._folder / "lock", "the journal of incidents"):
            incidents = self.incidents()
            nodes = node_views(self._client.nodes(), ())
            if unknown := [name for name in names if name not in nodes]:
                raise UsageError(f'no node "{unknown[0]}" in this cluster', hint=suggest(unknown[0], nodes))
            reports, problems = spool.read_reports(self._spool, nodes)
            open_by_node = {one.node: one for one in incidents.values() if one.phase != "over"}
            now = timestamps.now_rfc3339()
            rows = []
            for name in names:
                one, report = open_by_node.get(name), reports.get(name)
                why_not = why_not_returned(now, nodes[name], report, one, self.config.control)
                decision = Decision(
                    act="return",
                    node=name,
                    incident=one.incident if one else "",
                    check=one.check if one else "",
                    why=why_not or "returned by a person",
                )
                rows.append(_row(decision, done=False) if why_not else self._carry_out(decision, reports, incidents))
            return TickResult(rows, problems)

    def incidents(self) -> dict[str, Incident]:
        """Return all incidents by id, in the order in which they began. Raises DataError."""
        return fold(read_entries(self._folder / "journal.jsonl"))

    def report(self, node: str) -> NodeReport | None:
        """Return the last report of a node; None without one. Raises PitError."""
        return spool.read_report(self._spool, node)

    def node_rows(self) -> tuple[list[NodeRow], list[str]]:
        """Return a row for each of Slurm's nodes, and what is wrong with reports. Raises PitError."""
        open_by_node = {one.node: one for one in self.incidents().values() if one.phase != "over"}
        nodes = self._client.nodes()
        reports, problems = spool.read_reports(self._spool, {node.node for node in nodes})
        now = timestamps.now_rfc3339()
        return [node_row(node, open_by_node.get(node.node), reports.get(node.node), now) for node in nodes], problems

    def _tick(self, *, act: bool) -> TickResult:
        incidents = self.incidents()
        nodes = node_views(self._client.nodes(), self._client.topology())
        reports, problems = spool.read_reports(self._spool, nodes)
        decisions = decide(timestamps.now_rfc3339(), nodes, reports, list(incidents.values()), self.config.control)
        rows = [
            self._carry_out(one, reports, incidents) if act and one.act != "hold" else _row(one, done=False)
            for one in decisions
        ]
        return TickResult(rows, problems)

    def _carry_out(
        self, decision: Decision, reports: Mapping[str, NodeReport], incidents: dict[str, Incident]
    ) -> ActRow:
        """Carry a decision out; an error is this node's alone."""
        try:
            if decision.act == "drain":
                self._drain(decision, reports, incidents)
            elif decision.act == "return":
                self._return(decision, incidents[decision.incident])
            else:
                if decision.act == "adopt" and decision.incident not in incidents:
                    self._append(decision, EntryKind.OPENED)
                self._append(decision, _NOTES[decision.act])
        except PitError as error:
            return _row(decision, done=False, error=str(error))
        return _row(decision, done=True)

    def _drain(self, decision: Decision, reports: Mapping[str, NodeReport], incidents: dict[str, Incident]) -> None:
        """Drain for a new incident, or one whose drain was begun, unless somebody else drained the node meanwhile."""
        view = self._look_again(decision.node)
        if not may_drain(view) and not incident_of_reason(view.reason)[0]:
            if decision.incident:
                self._append(decision, EntryKind.TAKEN_OVER)
            return
        incident = incidents.get(decision.incident) or self._open(decision, reports[decision.node], incidents)
        if not view.is_drained:
            self._client.drain_node(decision.node, incident.reason)
        self._append(decision, EntryKind.DRAINED, incident.incident)

    def _open(self, decision: Decision, report: NodeReport, incidents: dict[str, Incident]) -> Incident:
        entry = IncidentEntry(
            at=timestamps.now_rfc3339(),
            kind=EntryKind.OPENED,
            incident=next_id(decision.node, incidents.values()),
            node=decision.node,
            check=decision.check,
            action=decision.finding.action if decision.finding else "drain",
            evidence_at=decision.finding.evidence_at if decision.finding else "",
            message=decision.why,
            boot_id=report.boot_id,
            hardware=report.hardware,
        )
        append_entry(self._folder / "journal.jsonl", entry)
        incidents |= fold([entry])
        return incidents[entry.incident]

    def _return(self, decision: Decision, incident: Incident) -> None:
        """Resume a node, unless its reason is no longer ours."""
        view = self._look_again(decision.node)
        if view.is_drained and incident_of_reason(view.reason)[0] != incident.incident:
            self._append(decision, EntryKind.TAKEN_OVER)
            return
        if view.is_drained:
            self._append(decision, EntryKind.RETURNING)
            self._client.resume_node(decision.node)
        self._append(decision, EntryKind.RETURNED)

    def _look_again(self, node: str) -> NodeView:
        return node_views(self._client.nodes(node), ())[node]

    def _append(self, decision: Decision, kind: EntryKind, incident: str = "") -> None:
        append_entry(
            self._folder / "journal.jsonl",
            IncidentEntry(
                at=timestamps.now_rfc3339(),
                kind=kind,
                incident=incident or decision.incident,
                node=decision.node,
                check=decision.check,
                message=decision.why,
            ),
        )


def node_views(nodes: Iterable[Node], topology: Iterable[object]) -> dict[str, NodeView]:
    """Return the nodes by name, with the leaf switches and partitions that they belong to."""
    leaf_of = {
        node: switch.switch
        for switch in topology
        if isinstance(switch, Switch) and switch.level == 0
        for node in hostlist.expand(switch.node_list)
    }
    views = {}
    for node in nodes:
        leaves = [f"leaf:{leaf_of[node.node]}"] if node.node in leaf_of else []
        flags = set(node.flags)
        views[node.node] = NodeView(
            node=node.node,
            is_drained="drain" in flags or node.state.startswith(("drain", "fail")),
            is_down=node.state == "down" or "not_responding" in flags,
            has_jobs=node.state in ("allocated", "mixed") or "completing" in flags,
            reason=node.reason,
            groups=(*leaves, *(f"partition:{name}" for name in node.partitions)),
        )
    return views


def node_row(node: Node, incident: Incident | None, report: NodeReport | None, now: str) -> NodeRow:
    """Return a node's line of `pit node list`."""
    failed = [one for one in report.findings if one.state == "failed"] if report else []
    return NodeRow(
        node=node.node,
        state="+".join((node.state, *node.flags)),
        incident=incident.incident if incident else "",
        phase=incident.phase if incident else "",
        check=incident.check if incident else "",
        report_age_s=round(age, 1) if report and isfinite(age := age_s(report.checked_at, now)) else None,
        failed=len(failed) if report else None,
        unknown=len(report.findings) - len(failed) if report else None,
        finding=f"{failed[0].check}: {failed[0].message}" if failed else "",
        reason=node.reason,
    )


def _row(decision: Decision, *, done: bool, error: str = "") -> ActRow:
    return ActRow(
        node=decision.node,
        act=decision.act,
        incident=decision.incident,
        check=decision.check,
        done=done,
        why=decision.why,
        error=error,
    )
