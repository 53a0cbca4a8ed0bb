"""Check this node: gather what its checks name, and judge it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec

from pitools.core import trust, units
from pitools.core.errors import ConfigError, UsageError
from pitools.core.fs import open_regular
from pitools.core.record import decode_json
from pitools.node.check.config import Control, NodeConfig, checks_for, names_of
from pitools.node.check.evaluate import evaluate
from pitools.node.check.rule import Check
from pitools.node.gather.collectors import COLLECTORS, read_facts
from pitools.node.gather.read import Query
from pitools.node.types import NAME, Finding, NodeFacts, age_s, draining, is_at_least

# Tables whose collectors run programs, use the network, or wait to see what lasts.
_SLOW_TABLES = frozenset(
    {"block_devices", "commands", "endpoints", "ipmi_events", "packages", "processes", "services", "slurm"}
)
_MAX_BYTES = 16 << 20  # of a file of the node's own
_NAMES = 3  # of checks that are unknown, in the line of their table


class NodeCheck(NamedTuple):
    """A checked node. findings: a check that passed has one, too. checks: those that were made.

    control, handled_until: the limits, and the time before which the controller dealt with all evidence; "" if unknown.
    began_s: when the checks began, of the monotonic clock. previous: the facts of the last report.
    """

    facts: NodeFacts
    findings: list[Finding]
    checks: list[Check]
    control: Control = Control()
    handled_until: str = ""
    began_s: float = 0.0
    previous: NodeFacts | None = None

    @property
    def has_failed(self) -> bool:
        """Whether a critical check failed that is no shadow."""
        return any(one.state == "failed" and one.level == "critical" and not one.is_shadow for one in self.findings)


def node_name(name: str = "") -> str:
    """Return this node's name: the given one, else slurmd's where that calls us, else the host's. Raises UsageError."""
    name = name or os.environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]
    if not NAME.fullmatch(name):
        raise UsageError(f'"{name}" is no name of a node', hint="name it as Slurm does: scontrol show hostnames")
    return name


def read_all(config: NodeConfig, node: str, tables: Iterable[str] = ()) -> NodeFacts:
    """Return the facts of these tables, by default of all, with what this node's checks name in them."""
    chosen = set(tables) or {collector.table for collector in COLLECTORS}
    return read_facts(chosen, Query(node=node), names_of(checks_for(config, node)))


def check_node(config: NodeConfig, node: str, *, in_job: bool = False, timeout_s: float = 50.0) -> NodeCheck:
    """Gather and judge. in_job: for a job's preflight, without the tables that run programs or are slow.

    timeout_s: of all tables together; those that are not reached are unknown.
    """
    began_s = time.monotonic()
    checks = [check for check in checks_for(config, node) if not (in_job and check.table in _SLOW_TABLES)]
    query = Query(node=node, runs_programs=not in_job)
    facts = read_facts({check.table for check in checks}, query, names_of(checks), timeout_s=timeout_s)
    handled_until = _read_own(config, node, "handled").decode(errors="replace")
    previous = _read_previous(config, node)
    if previous and handled_until <= facts.gathered_at:  # the node is not drained
        failed = tuple(one for one in previous.failed if one.evidence_at > handled_until)
        previous = msgspec.structs.replace(previous, failed=failed)
    findings = evaluate(checks, facts, previous)
    return NodeCheck(facts, findings, checks, config.control, handled_until, began_s, previous)


def summary(checked: NodeCheck) -> list[Finding]:
    """Return the findings that failed, then for each table one that is unknown, which names the others.

    Those that would drain come first.
    """
    table_of = {check.name: check.table for check in checked.checks}
    unknown: dict[str, list[Finding]] = {}
    for finding in sorted(checked.findings, key=lambda one: not is_at_least(one.action, "drain-after-job")):
        if finding.state == "unknown":
            unknown.setdefault(table_of[finding.check], []).append(finding)
    lines = [finding for finding in checked.findings if finding.state == "failed"]
    for first, *others in unknown.values():
        names = ", ".join(finding.check for finding in others[:_NAMES])
        rest = f" and {len(others) - _NAMES} more (--all prints them)" if len(others) > _NAMES else ""
        message = f"{first.message}; also unknown: {names}{rest}" if others else first.message
        lines.append(msgspec.structs.replace(first, message=message))
    return lines


def nhc_problem(config: NodeConfig, node: str) -> str:
    """Return which lines of the site's nhc.conf make no check for a node; "" if each does, or it names none."""
    if not config.nhc.file:
        return ""
    from pitools.node.check.nhc.lines import lines_without_checks  # milliseconds, which most sites need not pay

    return lines_without_checks(Path(config.nhc.file), node)


def require_known(facts: NodeFacts) -> None:
    """Raise UsageError if Slurm says that it has no node of this name: a report of it would be of no node."""
    table = facts.tables.get("slurm")
    if table and any(row.get("is_node") is False for row in table.rows):
        hint = "name it as Slurm does: pit node check --node NAME --report; scontrol show nodes"
        raise UsageError(f'"{facts.node}": Slurm has no such node; no report is written', hint=hint)


def refusing(checked: NodeCheck) -> list[Finding]:
    """Return the findings for which no further job may start: those for which the controller is to drain the node.

    Not those of old evidence, nor of what it has dealt with: a node that it drained, or that a person resumed since.
    """
    now, limit_s = checked.facts.gathered_at, units.parse_duration(checked.control.max_evidence_age)
    return [
        one
        for one in draining(checked.findings, "drain")
        if one.evidence_at > checked.handled_until and age_s(one.evidence_at, now) <= limit_s
    ]


def own_path(config: NodeConfig, node: str, suffix: str) -> Path:
    """Return a file of the node's own, in `state`: see report.py."""
    return Path(config.state) / f"{node}.{suffix}"


def _read_own(config: NodeConfig, node: str, suffix: str) -> bytes:
    """Return what the last report left on this node; b"" for nothing, or what cannot be read or trusted."""
    try:
        trust.require_trusted(Path(config.state), "folder of node health")
        with open_regular(own_path(config, node, suffix)) as file:
            return file.read(_MAX_BYTES)
    except (ConfigError, OSError):
        return b""


def _read_previous(config: NodeConfig, node: str) -> NodeFacts | None:
    """Return the facts of the last report; None if there are none."""
    try:
        return decode_json(_read_own(config, node, "facts.json"), NodeFacts)
    except ValueError:
        return None
