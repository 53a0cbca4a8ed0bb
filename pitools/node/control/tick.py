"""One tick of the controller: poll Slurm once, read the reports, decide, and carry it out. For cron; no daemon.

Just before each act, after its intent is written, the node is looked at again, so that a drain that a person made
meanwhile is kept; one that is made within that call of Slurm, some milliseconds, is not, as Slurm has no act on a
condition. A tick may be killed anywhere: the next one resolves its intents first. A failed poll changes nothing.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import NamedTuple

import msgspec

from pitools.core import hostlist, timestamps, units
from pitools.core.errors import ClusterError, ConfigError, PitError, UsageError, suggest
from pitools.core.fs import from_os_error, write_atomic
from pitools.core.locks import lock, owner_name
from pitools.core.record import Record, decode_json
from pitools.core.trust import user_name
from pitools.node import blames, spool
from pitools.node.check.config import CONFIG_PATH, Control, NodeConfig
from pitools.node.control.incidents import (
    EntryKind,
    Incident,
    IncidentEntry,
    Journal,
    append_entry,
    fold,
    new_id,
    read_incidents,
)
from pitools.node.control.policy import (
    Act,
    ActRow,
    NodeView,
    Sight,
    decide,
    handled,
    may_drain,
    report_problem,
    see,
    severest_first,
    shown_state,
    why_not_returned,
)
from pitools.node.types import NodeReport, age_s
from pitools.slurm.client import Client
from pitools.slurm.records import Node, Switch

_NOTES: dict[Act, EntryKind] = {
    "adopt": EntryKind.DRAINED,
    "relapse": EntryKind.RELAPSED,
    "recover": EntryKind.RECOVERED,
    "escalate": EntryKind.ESCALATED,
    "release": EntryKind.RELEASED,
}
_SIGHTS = "sights.json"
_MOST_HELD_LINES = 4
_LIMIT = re.compile(r"max_\w+ = [^,:\s]+")
_DOWN_FLAGS = {"not_responding", "powered_down", "powering_down"}


class NodeRow(Record, frozen=True, kw_only=True, tag="pit.node-health/1"):
    """A line of `pit node list`. state: Slurm's, with flags, as `idle+drain`. incident, phase, check: of the open one.

    report_age_s, failed, unknown: of the last report and its findings; None without one. The age is None, too, where
    the clock of the node is wrong. finding: why a person is needed, if so; then why its report is not used, else the
    failure whose drain is held back, and by what, else the state of its incident's check, and without one its severest
    failure. suspicion: how many users suspect it, and the newest reason.
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
    """The rows of a tick, and lines on what is wrong or held back that the last tick did not have.

    The lines of one that acts are kept in the spool, those of a dry run in its controller alone.
    """

    rows: list[ActRow]
    problems: list[str]


class Controller:
    """The controller of one cluster. Its journal and lock are in the folder `control` of the spool.

    Raises ConfigError without a spool.
    """

    def __init__(self, client: Client, config: NodeConfig) -> None:
        if not config.spool:
            hint = f'add to {CONFIG_PATH}: spool = "/shared/pitools/node"'
            raise ConfigError("spool: is missing (expected a folder that all nodes share)", key="spool", hint=hint)
        self._client = client
        self.config = config
        self._spool = Path(config.spool)
        self._folder = self._spool / spool.CONTROL
        self._told: list[str] | None = None  # the lines of the last tick

    def tick(self, *, act: bool) -> TickResult:
        """Tick once; without `act` nothing is changed. Raises TryLater while another tick runs, PitError."""
        with self._lock() if act else contextlib.nullcontext():
            return self._tick(act=act)

    def return_nodes(self, names: Sequence[str]) -> TickResult:
        """Return drained nodes of ours at once, for a person; a row without `done` says why one is not returned.

        Raises UsageError for a node that Slurm does not have, TryLater while a tick runs, PitError.
        """
        with self._lock():
            incidents = self.incidents()
            nodes = node_views(self._client.nodes(), ())
            for name in names:
                _require_node(name, nodes)
            reports, problems = spool.read_reports(self._spool, nodes)
            files = tuple(f"{self._spool / name}.json: " for name in names)
            problems = [one for one in problems if one.startswith(files)]
            open_by_node = {one.node: one for one in incidents.values() if one.phase != "over"}
            now = timestamps.now_rfc3339()
            rows = []
            for name in names:
                one, report = open_by_node.get(name), reports.get(name)
                why_not = why_not_returned(now, nodes[name], report, one, self.config.control)
                own = one if one and one.owns(nodes[name].reason) else None
                decision = ActRow(
                    act="return",
                    node=name,
                    incident=own.incident if own else "",
                    check=own.check if own else "",
                    why=why_not or "returned by a person",
                    evidence_at=report.checked_at if report else "",
                )
                rows.append(decision if why_not else self._carry_out(decision, reports, incidents))
            return TickResult(rows, problems)

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Hold the journal's lock. Raises TryLater while another process does, ConfigError, PitError."""
        spool.require_usable(self._spool)
        folder = self._folder if self._folder.exists() else self._spool
        if not os.access(folder, os.W_OK):
            to_look = "only to look: pit node list, pit node drain --dry-run"
            if os.statvfs(folder).f_flag & os.ST_RDONLY:
                hint = f"mount it for writing; {to_look}"
                raise ClusterError("its file system is read-only", where=str(folder), hint=hint)
            hint = f"drain and return as {owner_name(folder)}; {to_look}"
            raise ClusterError(f"user {user_name(os.geteuid())} cannot write there", where=str(folder), hint=hint)
        spool.require_usable(folder, "journal of incidents")
        try:
            self._folder.mkdir(mode=0o755, exist_ok=True)
        except OSError as error:
            raise from_os_error(error, self._folder) from error
        with lock(self._folder / "lock", "the journal of incidents", is_required=True):
            yield

    def require_node(self, name: str) -> None:
        """Refuse a node that Slurm does not have. Raises UsageError, PitError."""
        _require_node(name, {node.node for node in self._client.nodes()})

    def incidents(self) -> dict[str, Incident]:
        """Return all incidents by id, in the order in which they began. Raises PitError."""
        return self._journal().incidents

    def _journal(self) -> Journal:
        return read_incidents(self._folder / "journal.jsonl")

    def report(self, node: str) -> NodeReport | None:
        """Return the last report of a node; None without one. Raises PitError."""
        return spool.read_report(self._spool, node)

    def node_rows(self) -> tuple[list[NodeRow], list[str]]:
        """Return a row for each of Slurm's nodes, and what is wrong with reports. Raises PitError."""
        incidents, problems = self._journal()
        open_by_node = {one.node: one for one in incidents.values() if one.phase != "over"}
        nodes = self._client.nodes()
        views = node_views(nodes, self._client.topology())
        reports, of_reports = spool.read_reports(self._spool, views)
        now, control = timestamps.now_rfc3339(), self.config.control
        decisions = decide(now, views, reports, list(incidents.values()), control, self._sights())
        held = {one.node: f"{one.check}: {one.why}" for one in decisions if one.act == "hold"}
        rows = [
            node_row(node, open_by_node.get(node.node), reports.get(node.node), now, control, held.get(node.node, ""))
            for node in nodes
        ]
        return rows, [*problems, *of_reports]

    def _tick(self, *, act: bool) -> TickResult:
        incidents, damaged = self._journal()
        now, control, sights = timestamps.now_rfc3339(), self.config.control, self._sights()
        nodes = node_views(self._client.nodes(), self._client.topology())
        reports, problems = spool.read_reports(self._spool, nodes)
        decisions = decide(now, nodes, reports, list(incidents.values()), control, sights)
        unheard = _fold_by_reason(_unheard(nodes, reports, now, control))
        stuck = _fold_by_reason(_stuck(incidents.values(), reports, now, control))
        problems = [*damaged, *problems, *unheard, *stuck, *_held_lines(decisions)]
        if not act:
            return TickResult(decisions, self.new_lines([*problems, *_for_person(incidents.values())]))
        drained = {one.node for one in incidents.values() if one.phase != "over"}
        drained |= {one.node for one in decisions if one.act in ("drain", "adopt")}
        self._keep(_SIGHTS, see(now, nodes, reports, drained, sights))
        try:
            spool.request_benches(self._spool, {one.node for one in decisions if one.act == "bench"})
        except PitError as error:  # it holds back no drain
            problems.append(str(error))
        # A bench that was asked for before is no new act: the request stays until a report has its result.
        decisions = [one for one in decisions if one.act != "bench" or not incidents[one.incident].asked_at]
        rows = [self._carry_out(one, reports, incidents) for one in decisions]
        of_now = list((self.incidents() if rows else incidents).values())
        problems += _for_person(of_now)
        self._keep(spool.HANDLED, handled(timestamps.now_rfc3339(), of_now, control))
        try:
            blames.make_folder(self._spool)
        except OSError as error:
            problems.append(str(from_os_error(error, self._spool)))
        kept = self._keep("problems.json", problems)
        if self._told is None and isinstance(kept, list):
            self._told = kept
        return TickResult(rows, self.new_lines(problems))

    def new_lines(self, lines: list[str]) -> list[str]:
        """Return the lines that the last tick did not have: cron mails what a tick prints."""
        before, self._told = self._told or [], lines
        return [one for one in lines if one not in before]

    def _sights(self) -> dict[str, Sight]:
        """Return what the last tick saw; nothing if that is lost, and then each stable time begins anew."""
        try:
            return decode_json((self._folder / _SIGHTS).read_bytes(), dict[str, Sight])
        except (OSError, msgspec.DecodeError):
            return {}

    def _keep(self, name: str, value: object) -> object:
        """Write a file of the controller's folder, if its value is new; return the value before, None for none."""
        path = self._folder / name
        try:
            before: object = msgspec.json.decode(path.read_bytes())
        except (OSError, msgspec.DecodeError):
            before = None
        if before != value:
            with contextlib.suppress(PitError):  # the next tick tries it again
                write_atomic(path, msgspec.json.encode(value), durable=False)
        return before

    def _carry_out(self, decision: ActRow, reports: Mapping[str, NodeReport], incidents: dict[str, Incident]) -> ActRow:
        """Carry a decision out; an error is this node's alone."""
        why_not = ""
        try:
            if decision.act == "drain":
                decision, why_not = self._drain(decision, reports, incidents)
            elif decision.act == "return":
                why_not = self._return(decision, incidents[decision.incident])
            elif decision.act == "bench":
                self._append(decision, EntryKind.BENCHING)
            elif decision.act == "relapse" and decision.action != "none":
                report = reports[decision.node]
                self._append(decision, EntryKind.RELAPSED, boot_id=report.boot_id, hardware=report.hardware)
            elif decision.act in _NOTES:
                if decision.act == "adopt" and decision.incident not in incidents:
                    reason = decision.why.partition(f"[{decision.incident}] {decision.check}: ")[2]
                    self._append(msgspec.structs.replace(decision, why=reason), EntryKind.OPENED)
                self._append(decision, _NOTES[decision.act])
        except PitError as error:
            return msgspec.structs.replace(decision, error=str(error))
        if why_not:
            return msgspec.structs.replace(decision, why=f"{decision.why}; not done: {why_not}")
        return msgspec.structs.replace(decision, done=decision.act != "hold")

    def _drain(
        self, decision: ActRow, reports: Mapping[str, NodeReport], incidents: dict[str, Incident]
    ) -> tuple[ActRow, str]:
        """Drain for a new incident, or one whose drain was begun.

        Return the decision with the incident, and why it was not done, "" if it was.
        """
        incident = incidents.get(decision.incident) or self._open(decision, reports[decision.node], incidents)
        decision = msgspec.structs.replace(decision, incident=incident.incident)
        view = self._look_again(decision.node)
        if not view.is_drained and (may_drain(view) or incident.owns(view.reason)):
            self._client.drain_node(decision.node, incident.reason)
            view = self._look_again(decision.node)
        if not may_drain(view) and not incident.owns(view.reason):
            self._append(decision, EntryKind.RELEASED)
            return decision, f"somebody else drained it, or set it down, meanwhile: {view.reason}"
        self._append(decision, EntryKind.DRAINED)
        return decision, ""

    def _open(self, decision: ActRow, report: NodeReport, incidents: dict[str, Incident]) -> Incident:
        now = timestamps.now_rfc3339()
        entry = IncidentEntry(
            at=now,
            kind=EntryKind.OPENED,
            incident=new_id(decision.node, now, incidents),
            node=decision.node,
            check=decision.check,
            action=decision.action,
            evidence_at=decision.evidence_at,
            part=decision.part,
            message=decision.why,
            boot_id=report.boot_id,
            hardware=report.hardware,
            is_event=decision.is_event,
        )
        append_entry(self._folder / "journal.jsonl", entry)
        incidents |= fold([entry])
        return incidents[entry.incident]

    def _return(self, decision: ActRow, incident: Incident) -> str:
        """Resume a node, unless its reason is no longer ours; return why it was not done, "" if it was."""
        if incident.phase != "returning":
            self._append(decision, EntryKind.RETURNING)
        view = self._look_again(decision.node)
        if view.is_drained and not incident.owns(view.reason):
            self._append(decision, EntryKind.RELEASED)
            return f"its reason was changed meanwhile: {view.reason}"
        if view.is_down:
            return "it went down meanwhile"
        if view.is_drained:
            self._client.resume_node(decision.node)
        self._append(decision, EntryKind.RETURNED)
        return ""

    def _look_again(self, node: str) -> NodeView:
        return node_views(self._client.nodes(node), ())[node]

    def _append(
        self, decision: ActRow, kind: EntryKind, *, boot_id: str = "", hardware: dict[str, str] | None = None
    ) -> None:
        append_entry(
            self._folder / "journal.jsonl",
            IncidentEntry(
                at=timestamps.now_rfc3339(),
                kind=kind,
                incident=decision.incident,
                node=decision.node,
                check=decision.check,
                message=decision.why,
                evidence_at=decision.evidence_at,
                action=decision.action,
                is_event=decision.is_event,
                part=decision.part,
                boot_id=boot_id,
                hardware=hardware or {},
            ),
        )


def _require_node(name: str, nodes: Collection[str]) -> None:
    if name not in nodes:
        raise UsageError(f'no node "{name}" in this cluster', hint=suggest(name, nodes))


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
            is_down=node.state == "down" or not flags.isdisjoint(_DOWN_FLAGS),
            has_jobs=node.state in ("allocated", "mixed") or "completing" in flags,
            reason=node.reason,
            groups=(*leaves, *(f"partition:{name}" for name in node.partitions)),
        )
    return views


def _unheard(
    nodes: Mapping[str, NodeView], reports: Mapping[str, NodeReport], now: str, control: Control
) -> Iterator[tuple[str, str]]:
    """Yield the nodes that are up and whose checks are not heard of, and why."""
    for name, view in nodes.items():
        if not view.is_down and (problem := report_problem(reports.get(name), now, control)):
            yield name, f"{problem}: not watched; on such a node: pit node check --report"


def _stuck(
    incidents: Iterable[Incident], reports: Mapping[str, NodeReport], now: str, control: Control
) -> Iterator[tuple[str, str]]:
    """Yield the nodes that were drained for longer than a report counts, and whose own check is unknown."""
    limit_s = units.parse_duration(control.max_report_age)
    for one in incidents:
        report = reports.get(one.node)
        if report is None or report_problem(report, now, control) or one.is_escalated:
            continue
        states = {finding.state for finding in report.findings if finding.check == one.check}
        if one.phase == "drained" and states == {"unknown"} and age_s(one.drained_at, now) > limit_s:
            yield one.node, f"not returned while {shown_state(one, report)}; by a person: pit node return NODE"


def _held_lines(decisions: Iterable[ActRow]) -> list[str]:
    """Return a line for the nodes that each limit holds back; one for all where these would be many."""
    held = [one for one in decisions if one.act == "hold"]
    more = "; see: pit node list"
    lines = _fold_by_reason((one.node, f"not drained: held back by [control] {one.held_by}{more}") for one in held)
    if len(lines) <= _MOST_HELD_LINES:
        return lines
    counts = Counter(key for one in held for key in set(_LIMIT.findall(one.held_by)))
    limits = ", ".join(f"{key} ({count})" for key, count in sorted(counts.items()))
    return [f"{len(held)} nodes are not drained: held back by [control] {limits}{more}"]


def _for_person(incidents: Iterable[Incident]) -> list[str]:
    """Return a line for the nodes that are left to a person, for each reason."""
    left = (one for one in incidents if one.is_escalated and one.phase != "over")
    return _fold_by_reason((one.node, f"for a person: {one.for_person}") for one in left)


def _fold_by_reason(reasons: Iterable[tuple[str, str]]) -> list[str]:
    """Return a line for the nodes of each reason."""
    nodes: dict[str, list[str]] = {}
    for node, reason in reasons:
        nodes.setdefault(reason, []).append(node)
    return [f"{hostlist.fold(names)}: {reason}" for reason, names in nodes.items()]


def node_row(
    node: Node, incident: Incident | None, report: NodeReport | None, now: str, control: Control, held: str
) -> NodeRow:
    """Return a node's line of `pit node list`. held: the failure whose drain is held back, "" for none."""
    failed = sorted((one for one in report.findings if one.state == "failed"), key=severest_first) if report else []
    finding = report_problem(report, now, control) or held
    if incident and report and not finding:
        finding = shown_state(incident, report)
    elif failed and not finding:
        finding = f"{failed[0].check}: {failed[0].message}"
    if incident and incident.is_escalated:
        finding = f"for a person: {incident.for_person}; {finding}"
    return NodeRow(
        node=node.node,
        state="+".join((node.state, *node.flags)),
        incident=incident.incident if incident else "",
        phase=incident.phase if incident else "",
        check=incident.check if incident else "",
        report_age_s=round(age, 1) if report and isfinite(age := age_s(report.checked_at, now)) else None,
        failed=len(failed) if report else None,
        unknown=len(report.findings) - len(failed) if report else None,
        finding=finding,
        reason=node.reason,
    )
