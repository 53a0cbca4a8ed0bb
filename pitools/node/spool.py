"""The spool: a shared folder in which each node replaces its own report, and which the controller reads.

SPOOL/NODE.json             a node's report
SPOOL/bench-requests/NODE   while the controller wants a bench in this node's next report
SPOOL/control/handled.json  by node, the time before which its evidence was dealt with: see `handled` of policy.py

A report is written whole or not at all; one that a crash loses is written again soon. Nothing is used of a folder that
others can write, nor a report that another account wrote, that is no regular file, too large, damaged, or of another
node than its name says.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Collection, Iterable, Set
from pathlib import Path

import msgspec

from pitools.core import trust
from pitools.core.errors import ConfigError, DataError, PitError
from pitools.core.fs import from_os_error, open_regular, write_atomic
from pitools.core.record import decode_json
from pitools.node.types import NodeReport

CONTROL, HANDLED = "control", "handled.json"
"""The controller's folder of the spool, and what nodes read there."""

_MAX_BYTES = 1 << 20
_SUFFIX = ".json"
_REQUESTS = "bench-requests"
_REQUEST_S = 3600.0  # then the controller leaves the node to a person, unless it has died


def require_usable(path: Path, description: str = "spool") -> None:
    """Refuse a spool, or a part of it, that is missing, or that others can write to or replace. Raises ConfigError."""
    try:
        untrusted = trust.find_untrusted(path, trust.trusted_users())
    except OSError as error:
        hint = f"mkdir -p -m 755 {path}" if error.errno == errno.ENOENT else ""
        problem = os.strerror(error.errno or errno.EIO)
        raise ConfigError(f"{description}: {problem}", where=str(path), key="spool", hint=hint) from error
    if not untrusted:
        return
    other, status, writer = untrusted
    if writer:
        problem = f"can be written to by {writer}"
        hint = f"chmod {'o-w' if status.st_mode & stat.S_IWOTH else 'g-w'} {other}"
    else:
        problem = f"belongs to user {trust.user_name(status.st_uid)}"
        hint = f"chown root {other}"
    part = "" if other == path.absolute() else f"{other}, on the path of {path}, "
    problem = f"{description}: {part}{problem} (expected you or root alone): nodes are drained by what is in it"
    raise ConfigError(problem, where=str(other), key="spool", hint=hint)


def write_report(spool: Path, report: NodeReport) -> None:
    """Replace a node's report. Raises PitError."""
    try:
        write_atomic(spool / f"{report.node}{_SUFFIX}", msgspec.json.encode(report) + b"\n", durable=False)
    except OSError as error:
        raise from_os_error(error, spool) from error


def reported_nodes(spool: Path) -> set[str]:
    """Return the names of the nodes with a report, of any age. Raises ConfigError as `read_reports` does."""
    require_usable(spool)
    return {name.removesuffix(_SUFFIX) for name in os.listdir(spool) if name.endswith(_SUFFIX) and name[0] != "."}


def read_reports(spool: Path, nodes: Iterable[str]) -> tuple[dict[str, NodeReport], list[str]]:
    """Return the reports by node, and what is wrong with others. nodes: that may have one. Raises ConfigError."""
    require_usable(spool)
    reports: dict[str, NodeReport] = {}
    problems: list[str] = []
    foreign: list[str] = []
    known = set(nodes)
    for name in sorted(os.listdir(spool)):
        node = name.removesuffix(_SUFFIX)
        if not name.endswith(_SUFFIX) or name.startswith("."):
            continue
        if node not in known:
            foreign.append(ascii(name))
            continue
        try:
            if report := _read_report(spool / name, node):
                reports[node] = report
        except PitError as error:
            problems.append(str(error))
    if foreign:
        more = f" and {len(foreign) - 5} more" if len(foreign) > 5 else ""
        problems.append(f"{spool}: {', '.join(foreign[:5])}{more}: of no node of this cluster (to forget one, rm it)")
    return reports, problems


def read_report(spool: Path, node: str) -> NodeReport | None:
    """Return the report of one node; None if there is none. Raises PitError for one that cannot be used."""
    require_usable(spool)
    return _read_report(spool / f"{node}{_SUFFIX}", node)


def request_benches(spool: Path, nodes: Set[str]) -> None:
    """Ask these nodes, and no others, for a bench. Raises PitError."""
    folder = spool / _REQUESTS
    try:
        folder.mkdir(mode=0o755, exist_ok=True)
        for node in nodes ^ set(os.listdir(folder)):
            if node in nodes:
                (folder / node).touch(mode=0o644)
            else:
                (folder / node).unlink()
    except OSError as error:
        raise from_os_error(error, folder) from error


def is_bench_requested(spool: Path, node: str) -> bool:
    """Return whether the controller wants a bench of this node: it has asked within the last hour."""
    try:
        return time.time() - (spool / _REQUESTS / node).stat().st_mtime < _REQUEST_S
    except OSError:
        return False


def report_since_bench_request(spool: Path, node: str) -> NodeReport | None:
    """Return the node's last report; None if no bench was requested before it, or if it is damaged."""
    path = spool / f"{node}{_SUFFIX}"
    try:
        is_since = path.stat().st_mtime > (spool / _REQUESTS / node).stat().st_mtime
        return _read_report(path, node) if is_since else None
    except (OSError, PitError):
        return None


def handled_until(spool: Path, node: str) -> str | None:
    """Return the time before which a node's evidence was dealt with; "" if the controller says nothing of it.

    None if that cannot be read now.
    """
    try:
        require_usable(spool)
        data = read_owned(spool / CONTROL / HANDLED, (0, os.geteuid()), _MAX_BYTES)
        return decode_json(data, dict[str, str]).get(node, "")
    except FileNotFoundError:
        return ""
    except (PitError, OSError, ValueError):
        return None


def _read_report(path: Path, node: str) -> NodeReport | None:
    """Read a report; None if there is none. Raises PitError for what is no report of this node."""
    try:
        report = decode_json(read_owned(path, (0, os.geteuid()), _MAX_BYTES), NodeReport)
        if report.node != node:
            raise ValueError(f"is of node {report.node!r} (expected {node!r})")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        is_link = isinstance(error, OSError) and error.errno == errno.ELOOP
        reason = "a link (expected a regular file)" if is_link else getattr(error, "strerror", error)
        hint = f"on {node}: pit node check --report"
        raise DataError(f"not a report: {reason}", where=str(path), hint=hint) from error
    return report


def read_owned(path: Path, uids: Collection[int], max_bytes: int) -> bytes:
    """Read a file that only one of these users could have written. Raises OSError, or ValueError for another one."""
    with open_regular(path) as file:
        status = os.fstat(file.fileno())
        if status.st_uid not in uids:
            expected = " or ".join(map(trust.user_name, dict.fromkeys(uids)))
            raise ValueError(f"belongs to user {trust.user_name(status.st_uid)} (expected {expected})")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ValueError("can be written by others (expected mode 0644)")
        if status.st_nlink > 1:  # where fs.protected_hardlinks is 0, others may link any file of the user
            raise ValueError(f"has {status.st_nlink} names (expected one)")
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ValueError(f"too large (expected at most {max_bytes >> 10} KiB)")
    return data
