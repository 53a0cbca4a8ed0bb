"""Check this node: gather what its checks name, judge it, and leave the report where the controller reads it.

SPOOL/NODE.json             the report, in the shared folder
STATE/NODE.facts.json       the facts of which a check needs the change since the last report
STATE/NODE.handled          of which time the controller has dealt with all evidence: it refuses no job
STATE/NODE.refuse           while a finding refuses jobs: until when (Unix time), and why; for `pit-healthcheck`
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from pitools.core import timestamps, trust, units
from pitools.core.errors import ConfigError, NoSpace, PitError, UsageError
from pitools.core.fs import from_os_error, open_regular, write_atomic
from pitools.core.output import printable
from pitools.core.record import decode_json
from pitools.node import spool
from pitools.node.check.config import Check, Control, NodeConfig, checks_for, names_of
from pitools.node.check.evaluate import evaluate
from pitools.node.gather.collectors import COLLECTORS, read_facts
from pitools.node.gather.read import Query
from pitools.node.types import NAME, Finding, NodeFacts, NodeReport, age_s, draining

Context = Literal["health", "prolog", "epilog"]

# Tables whose collectors run programs, use the network, or wait to see what lasts.
_SLOW_TABLES = frozenset(
    {"block_devices", "commands", "endpoints", "ipmi_events", "packages", "processes", "services", "slurm"}
)
_CONTROLLER_KEYS = {"is_node", "controllers", "controllers_up", "node_state", "node_flags", "node_reason"}
_SERIALS = {"gpus": ("serial", "uuid"), "block_devices": ("serial",)}
_MAX_BYTES = 16 << 20  # of a file of the node's own
_NAMES = 3  # of checks that are unknown, in the line of their table


class NodeCheck(NamedTuple):
    """A checked node. findings: a check that passed has one, too. checks: those that were made.

    control, handled_until: the limits, and the time before which the controller dealt with all evidence; "" if unknown.
    """

    facts: NodeFacts
    findings: list[Finding]
    checks: list[Check]
    control: Control = Control()
    handled_until: str = ""

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
    return read_facts(chosen, Query(node=node, asks_controller=True), names_of(checks_for(config, node)))


def check_node(config: NodeConfig, node: str, context: Context = "health", *, timeout_s: float = 50.0) -> NodeCheck:
    """Gather and judge. context: in an epilog no Slurm command is run, in a prolog no program and nothing slow.

    timeout_s: of all tables together; those that are not reached are unknown.
    """
    checks = checks_for(config, node)
    if context != "health":
        checks = [check for check in checks if not _asks_controller(check)]
    if context == "prolog":
        checks = [check for check in checks if check.table not in _SLOW_TABLES]
    asks_controller = any(map(_asks_controller, checks))
    query = Query(node=node, asks_controller=asks_controller, runs_programs=context != "prolog")
    facts = read_facts({check.table for check in checks}, query, names_of(checks), timeout_s=timeout_s)
    findings = evaluate(checks, facts, _read_previous(config, node))
    handled_until = _read_own(config, node, "handled").decode(errors="replace")
    return NodeCheck(facts, findings, checks, config.control, handled_until)


def _asks_controller(check: Check) -> bool:
    return check.table == "slurm" and not _CONTROLLER_KEYS.isdisjoint({check.key, *check.where})


def summary(checked: NodeCheck) -> list[Finding]:
    """Return the findings that failed, then for each table the first that is unknown, which names the others."""
    table_of = {check.name: check.table for check in checked.checks}
    unknown: dict[str, list[Finding]] = {}
    for finding in checked.findings:
        if finding.state == "unknown":
            unknown.setdefault(table_of[finding.check], []).append(finding)
    lines = [finding for finding in checked.findings if finding.state == "failed"]
    for first, *others in unknown.values():
        names = ", ".join(finding.check for finding in others[:_NAMES])
        rest = f" and {len(others) - _NAMES} more (--all prints them)" if len(others) > _NAMES else ""
        message = f"{first.message}; also unknown: {names}{rest}" if others else first.message
        lines.append(msgspec.structs.replace(first, message=message))
    return lines


def make_report(checked: NodeCheck) -> NodeReport:
    """Return the report of a node: its findings, checks that passed by each name they had, and serial numbers."""
    old_names = {check.name: check.old_names for check in checked.checks}
    passed = [one.check for one in checked.findings if one.state == "passed"]
    return NodeReport(
        node=checked.facts.node,
        boot_id=checked.facts.boot_id,
        checked_at=checked.facts.gathered_at,
        hardware=_serial_numbers(checked.facts),
        findings=tuple(one for one in checked.findings if one.state != "passed"),
        passed=tuple(name for check in passed for name in (check, *old_names[check])),
    )


def write_report(config: NodeConfig, checked: NodeCheck) -> None:
    """Write the node's own files, then its report, as the spool may be a shared folder that hangs. Raises PitError.

    Where its own cannot be written, as on a disk that is full, the report is written all the same.
    """
    if not config.spool:
        raise ConfigError("spool: is missing (expected a folder that all nodes share)", key="spool")
    problem = _write_own_files(config, checked)
    spool.write_report(Path(config.spool), make_report(checked))
    handled_until = spool.handled_until(Path(config.spool), checked.facts.node)
    if handled_until is not None and handled_until != checked.handled_until:
        problem = _write_own_files(config, checked._replace(handled_until=handled_until))
    if problem:
        raise problem


def _write_own_files(config: NodeConfig, checked: NodeCheck) -> PitError | None:
    """Write the findings that refuse jobs, then what this node reads again; return what was wrong, None for nothing."""
    folder, node = Path(config.state), checked.facts.node
    tables = {check.table for check in checked.checks if _needs_previous(check)}
    kept = {name: table for name, table in checked.facts.tables.items() if name in tables}
    try:
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        trust.require_trusted(folder, "folder of node health")
        _write_refusal(config, checked)
        write_atomic(_own_path(config, node, "handled"), checked.handled_until, durable=False)
        data = msgspec.json.encode(msgspec.structs.replace(checked.facts, tables=kept))
        write_atomic(_own_path(config, node, "facts.json"), data, durable=False)
    except PitError as error:
        return error
    except OSError as error:
        return from_os_error(error, folder)
    return None


def _own_path(config: NodeConfig, node: str, suffix: str) -> Path:
    return Path(config.state) / f"{node}.{suffix}"


def _needs_previous(check: Check) -> bool:
    return check.max_increase is not None or bool(check.max_rate)


def _read_own(config: NodeConfig, node: str, suffix: str) -> bytes:
    """Return what the last report left on this node; b"" for nothing, or what cannot be read or trusted."""
    try:
        trust.require_trusted(Path(config.state), "folder of node health")
        with open_regular(_own_path(config, node, suffix)) as file:
            return file.read(_MAX_BYTES)
    except (ConfigError, OSError):
        return b""


def _read_previous(config: NodeConfig, node: str) -> NodeFacts | None:
    """Return the facts of the last report; None if there are none."""
    try:
        return decode_json(_read_own(config, node, "facts.json"), NodeFacts)
    except ValueError:
        return None


def _write_refusal(config: NodeConfig, checked: NodeCheck) -> None:
    """Write, or remove, the file for which `pit-healthcheck` fails a prolog, while the report counts as fresh.

    On a full disk in the room of the node's other files, which the next report writes anew.
    """
    path = _own_path(config, checked.facts.node, "refuse")
    failed = refusing(checked)
    if not failed:
        path.unlink(missing_ok=True)
        return
    until_s = datetime.fromisoformat(timestamps.now_rfc3339()).timestamp()
    until_s += units.parse_duration(config.control.max_report_age)
    why = printable(f"{failed[0].check}: {failed[0].message}")
    text = f"{until_s:.0f}\n{why}\n"
    try:
        write_atomic(path, text, durable=False)
    except NoSpace:
        for suffix in ("refuse", "handled", "facts.json"):
            _own_path(config, checked.facts.node, suffix).unlink(missing_ok=True)
        write_atomic(path, text, durable=False)


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


def _serial_numbers(facts: NodeFacts) -> dict[str, str]:
    """Return the serial numbers of each device by the table, the device's name and the kind of number."""
    found: dict[str, str] = {}
    for name, keys in _SERIALS.items():
        table = facts.tables.get(name)
        for row in table.rows if table else ():
            if device := row.get("pci") or row.get("device"):
                found |= {f"{name} {device} {key}": str(row[key]) for key in keys if row.get(key)}
    return found
