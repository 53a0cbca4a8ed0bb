"""Report on this node: write what its checks found where the controller, its prolog and its next check read it.

SPOOL/NODE.json             the report, in the shared folder
STATE/NODE.facts.json       the facts of which a check needs the change since the last report, and what failed
STATE/NODE.handled          of which time the controller has dealt with all evidence: it refuses no job
STATE/NODE.refuse           while a finding refuses jobs: until when (Unix time), and why; for `pit-healthcheck`
"""

from __future__ import annotations

from datetime import datetime
from functools import partial
from pathlib import Path

import msgspec

from pitools.core import timestamps, trust, units
from pitools.core.errors import ConfigError, NoSpace, PitError
from pitools.core.fs import from_os_error, write_atomic
from pitools.core.output import printable
from pitools.node import spool
from pitools.node.check.config import NodeConfig
from pitools.node.check.evaluate import remembered
from pitools.node.check.this_node import NodeCheck, own_path, refusing
from pitools.node.types import NodeFacts, NodeReport

_SERIALS = {"gpus": ("serial", "uuid"), "block_devices": ("serial",)}


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

    Where its own cannot be written, as on a disk that is full, the report is written all the same. If the controller
    wants a bench, and Slurm has the node drained by us and without jobs, it then measures itself, and reports again.
    """
    if not config.spool:
        raise ConfigError("spool: is missing (expected a folder that all nodes share)", key="spool")
    problem = _write_own_files(config, checked)
    own = make_report(checked)
    before = spool.report_since_bench_request(Path(config.spool), own.node)
    spool.write_report(Path(config.spool), own)
    handled_until = spool.handled_until(Path(config.spool), checked.facts.node)
    if handled_until is not None and handled_until != checked.handled_until:
        problem = _write_own_files(config, checked._replace(handled_until=handled_until))
    if problem:
        raise problem
    if spool.is_bench_requested(Path(config.spool), own.node):
        from pitools.node.bench.before_return import bench  # milliseconds, which most reports need not pay

        bench(config, own, before, checked.began_s, partial(_why_not_idle, own.node))


def _why_not_idle(node: str, timeout_s: float) -> str:
    """Return why this node is not to be measured now: "" if Slurm has it drained by us, and without jobs.

    A person may have resumed it since the controller asked.
    """
    from pitools.node.control.incidents import incident_of_reason
    from pitools.node.control.tick import node_views
    from pitools.node.gather.slurmd import find_slurmd, slurm_client

    try:
        nodes = slurm_client(find_slurmd(node=node), timeout_s=timeout_s).nodes(node)
    except PitError as error:
        return f"not measured: {error.message}"
    for view in node_views(nodes, ()).values():
        if not view.is_drained or not incident_of_reason(view.reason)[0]:
            return "not measured: the node is not drained by pit node"
        return "not measured: jobs run there" if view.has_jobs else ""
    return "not measured: Slurm does not have this node"


def _write_own_files(config: NodeConfig, checked: NodeCheck) -> PitError | None:
    """Write the findings that refuse jobs, then what this node reads again; return what was wrong, None for nothing."""
    folder, node = Path(config.state), checked.facts.node
    tables = {check.table for check in checked.checks if check.is_of_change}
    kept = {name: table for name, table in checked.facts.tables.items() if name in tables}
    try:
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        trust.require_trusted(folder, "folder of node health")
        _write_refusal(config, checked)
        write_atomic(own_path(config, node, "handled"), checked.handled_until, durable=False)
        failed = remembered(checked.findings, checked.facts, checked.previous)
        data = msgspec.json.encode(msgspec.structs.replace(checked.facts, tables=kept, failed=failed))
        write_atomic(own_path(config, node, "facts.json"), data, durable=False)
    except PitError as error:
        return error
    except OSError as error:
        return from_os_error(error, folder)
    return None


def _write_refusal(config: NodeConfig, checked: NodeCheck) -> None:
    """Write, or remove, the file for which `pit-healthcheck` fails a prolog, while the report counts as fresh.

    On a full disk in the room of the node's other files, which the next report writes anew.
    """
    path = own_path(config, checked.facts.node, "refuse")
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
            own_path(config, checked.facts.node, suffix).unlink(missing_ok=True)
        write_atomic(path, text, durable=False)


def _serial_numbers(facts: NodeFacts) -> dict[str, str]:
    """Return the serial numbers of each device by the table, the device's name and the kind of number."""
    found: dict[str, str] = {}
    for name, keys in _SERIALS.items():
        table = facts.tables.get(name)
        for row in table.rows if table else ():
            if device := row.get("pci") or row.get("device"):
                found |= {f"{name} {device} {key}": str(row[key]) for key in keys if row.get(key)}
    return found
