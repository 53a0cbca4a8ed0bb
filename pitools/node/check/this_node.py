"""Check this node: gather what its checks name, judge it, and leave the report where the controller reads it.

SPOOL/NODE.json             the report, in the shared folder
STATE/NODE.facts.json       the facts of which a check needs the change since the last report
STATE/NODE.refuse           while a finding drains the node: until when (Unix time), and why; for `pit-healthcheck`
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from pitools.core import timestamps, trust, units
from pitools.core.errors import ConfigError, PitError, UsageError
from pitools.core.fs import from_os_error, open_regular, write_atomic
from pitools.core.record import decode_json
from pitools.node import spool
from pitools.node.check.config import Check, NodeConfig, checks_for, targets_of
from pitools.node.check.evaluate import evaluate
from pitools.node.gather.collectors import COLLECTORS, read_facts
from pitools.node.types import ACTIONS, Finding, NodeFacts, NodeReport

Context = Literal["health", "prolog", "epilog"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# Tables whose collectors run programs, use the network, or wait to see what lasts.
_SLOW_TABLES = frozenset(
    {"block_devices", "commands", "endpoints", "ipmi_events", "packages", "processes", "services", "slurm"}
)
_CONTROLLER_KEYS = {"is_node", "controllers", "controllers_up", "node_state", "node_flags", "node_reason"}
_SERIALS = {"gpus": ("serial", "uuid"), "block_devices": ("serial",)}
_MAX_FACTS_BYTES = 16 << 20
_NAMES = 3  # of checks that are unknown, in the line of their table
_DRAIN = ACTIONS.index("drain")


class NodeCheck(NamedTuple):
    """A checked node. findings: a check that passed has one, too. checks: those that were made."""

    facts: NodeFacts
    findings: list[Finding]
    checks: list[Check]

    @property
    def has_failed(self) -> bool:
        """Whether a critical check failed that is no shadow."""
        return any(one.state == "failed" and one.level == "critical" and not one.is_shadow for one in self.findings)


def node_name(name: str = "") -> str:
    """Return this node's name: the given one, else slurmd's where that calls us, else the host's. Raises UsageError."""
    name = name or os.environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]
    if not _NAME.fullmatch(name):
        raise UsageError(f'"{name}" is no name of a node', hint="name it as Slurm does: scontrol show hostnames")
    return name


def gather(config: NodeConfig, node: str, tables: Iterable[str] = ()) -> NodeFacts:
    """Return the facts of these tables, by default of all, with what this node's checks name in them."""
    names = set(tables) or {collector.table for collector in COLLECTORS}
    return read_facts(names, targets_of(checks_for(config, node)), node=node, asks_controller=True)


def check_node(config: NodeConfig, node: str, context: Context = "health") -> NodeCheck:
    """Gather and judge. context: in an epilog no Slurm command is run, in a prolog no program and nothing slow."""
    checks = checks_for(config, node)
    if context != "health":
        checks = [check for check in checks if not _asks_controller(check)]
    if context == "prolog":
        checks = [check for check in checks if check.table not in _SLOW_TABLES]
    facts = read_facts(
        {check.table for check in checks},
        targets_of(checks),
        node=node,
        asks_controller=any(map(_asks_controller, checks)),
        runs_programs=context != "prolog",
    )
    return NodeCheck(facts, evaluate(checks, facts, _read_previous(config, node)), checks)


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
    own_error: PitError | None = None
    try:
        _write_own_files(config, checked)
    except PitError as error:
        own_error = error
    except OSError as error:
        own_error = from_os_error(error, Path(config.state))
    spool.write_report(Path(config.spool), make_report(checked))
    if own_error:
        raise own_error


def _write_own_files(config: NodeConfig, checked: NodeCheck) -> None:
    """Write what this node reads again: facts for rates, and the findings that refuse jobs."""
    folder, node = Path(config.state), checked.facts.node
    try:
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    except OSError as error:
        raise from_os_error(error, folder) from error
    trust.require_trusted(folder, "folder of node health")
    tables = {check.table for check in checked.checks if _needs_previous(check)}
    kept = {name: table for name, table in checked.facts.tables.items() if name in tables}
    data = msgspec.json.encode(msgspec.structs.replace(checked.facts, tables=kept))
    write_atomic(_facts_path(config, node), data, durable=False)
    _write_refusal(config, checked)


def _facts_path(config: NodeConfig, node: str) -> Path:
    return Path(config.state) / f"{node}.facts.json"


def _needs_previous(check: Check) -> bool:
    return check.max_increase is not None or bool(check.max_rate)


def _read_previous(config: NodeConfig, node: str) -> NodeFacts | None:
    """Return the facts of the last report; None if there are none that can be read and trusted."""
    try:
        trust.require_trusted(Path(config.state), "folder of node health")
        with open_regular(_facts_path(config, node)) as file:
            return decode_json(file.read(_MAX_FACTS_BYTES), NodeFacts)
    except (ConfigError, OSError, ValueError):
        return None


def _write_refusal(config: NodeConfig, checked: NodeCheck) -> None:
    """Write, or remove, the file for which `pit-healthcheck` fails a prolog, while the report counts as fresh."""
    path = Path(config.state) / f"{checked.facts.node}.refuse"
    failed = draining(checked.findings)
    if not failed:
        path.unlink(missing_ok=True)
        return
    until_s = datetime.fromisoformat(timestamps.now_rfc3339()).timestamp()
    until_s += units.parse_duration(config.control.max_report_age)
    why = "".join(sign if sign.isprintable() else " " for sign in f"{failed[0].check}: {failed[0].message}")
    write_atomic(path, f"{until_s:.0f}\n{why}\n", durable=False)


def draining(findings: Iterable[Finding]) -> Sequence[Finding]:
    """Return the findings for which no further job may start on the node."""
    return [
        one for one in findings if one.state == "failed" and not one.is_shadow and ACTIONS.index(one.action) >= _DRAIN
    ]


def _serial_numbers(facts: NodeFacts) -> dict[str, str]:
    """Return the first serial number that each device has, by the table and the device's name."""
    found: dict[str, str] = {}
    for name, keys in _SERIALS.items():
        table = facts.tables.get(name)
        for row in table.rows if table else ():
            device = row.get("pci") or row.get("device")
            if device and (serial := next((row[key] for key in keys if row.get(key)), None)):
                found[f"{name} {device}"] = str(serial)
    return found
