"""The spool: a shared folder in which each node replaces its own report, and which the controller reads.

A report is written whole or not at all; one that a crash loses is written again soon. Nothing is used of a folder that
others can write, nor a report that another account wrote, that is no regular file, too large, damaged, or of another
node than its name says.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Collection, Iterable
from pathlib import Path

import msgspec

from pitools.core import trust
from pitools.core.errors import DataError, PitError
from pitools.core.fs import from_os_error, open_regular, write_atomic
from pitools.core.record import decode_json
from pitools.node.types import NodeReport

SUSPICIONS = "suspicions"
"""The folder of the spool into which the runs of all users write: see suspicion.py."""

_MAX_BYTES = 1 << 20
_SUFFIX = ".json"


def write_report(spool: Path, report: NodeReport) -> None:
    """Replace a node's report. Raises PitError."""
    try:
        write_atomic(spool / f"{report.node}{_SUFFIX}", msgspec.json.encode(report) + b"\n", durable=False)
    except OSError as error:
        raise from_os_error(error, spool) from error


def make_suspicions(spool: Path) -> None:
    """Make the folder of suspicions, if it is missing; every user may add files. Raises OSError."""
    with contextlib.suppress(FileExistsError):
        (spool / SUSPICIONS).mkdir()
        (spool / SUSPICIONS).chmod(0o1777)


def reported_nodes(spool: Path) -> set[str]:
    """Return the names of the nodes with a report, of any age. Raises ConfigError as `read_reports` does."""
    trust.require_trusted(spool, "spool of reports")
    return {name.removesuffix(_SUFFIX) for name in os.listdir(spool) if name.endswith(_SUFFIX) and name[0] != "."}


def read_reports(spool: Path, nodes: Iterable[str]) -> tuple[dict[str, NodeReport], list[str]]:
    """Return the reports by node, and what is wrong with others. nodes: that may have one.

    Raises ConfigError where others can write into the spool, or it is missing.
    """
    trust.require_trusted(spool, "spool of reports")
    reports: dict[str, NodeReport] = {}
    problems: list[str] = []
    known = set(nodes)
    for name in sorted(os.listdir(spool)):
        node = name.removesuffix(_SUFFIX)
        if not name.endswith(_SUFFIX) or name.startswith("."):
            continue
        if node not in known:
            problems.append(f"{spool / name}: no node {node!r} in this cluster")
            continue
        try:
            reports[node] = _read_report(spool / name, node)
        except (OSError, ValueError) as error:
            problems.append(f"{spool / name}: {error.strerror if isinstance(error, OSError) else error}")
        except PitError as error:
            problems.append(str(error))
    return reports, problems


def read_report(spool: Path, node: str) -> NodeReport | None:
    """Return the report of one node; None if there is none. Raises PitError for one that cannot be used."""
    trust.require_trusted(spool, "spool of reports")
    path = spool / f"{node}{_SUFFIX}"
    try:
        return _read_report(path, node)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise from_os_error(error, path) from error
    except ValueError as error:
        raise DataError(
            f"not a report: {error}", where=str(path), hint=f"on {node}: pit node check --report"
        ) from error


def _read_report(path: Path, node: str) -> NodeReport:
    """Read a report. Raises OSError, or ValueError for what is no report of this node."""
    report = decode_json(read_owned(path, (0, os.geteuid()), _MAX_BYTES), NodeReport)
    if report.node != node:
        raise ValueError(f"is of node {report.node!r} (expected {node!r})")
    return report


def read_owned(path: Path, uids: Collection[int], max_bytes: int) -> bytes:
    """Read a file that only one of these users could have written. Raises OSError, or ValueError for another one."""
    with open_regular(path) as file:
        status = os.fstat(file.fileno())
        if status.st_uid not in uids:
            expected = " or ".join(map(trust.user_name, uids))
            raise ValueError(f"belongs to user {trust.user_name(status.st_uid)} (expected {expected})")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ValueError("can be written by others (expected mode 0644)")
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ValueError(f"too large (expected at most {max_bytes >> 10} KiB)")
    return data
