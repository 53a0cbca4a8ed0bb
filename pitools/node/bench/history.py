"""The results of each node, kept below the spool: `bench/<node>.jsonl`, the newest last."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from pitools.core import trust
from pitools.core.errors import ClusterError
from pitools.core.fs import from_os_error, open_regular, write_atomic
from pitools.core.record import decode_json
from pitools.node.bench.compare import BenchResult

_FOLDER = "bench"
_MAX_BYTES = 1 << 20  # of a node's file, some 3,000 results; then its older half goes
_NODE = re.compile(r"[A-Za-z0-9][\w.-]*")


def read_past(spool: Path, nodes: Iterable[str]) -> list[BenchResult]:
    """Return earlier results of nodes, oldest first; what is damaged, or another account's, is left out.

    Raises ConfigError where others can write into the folder.
    """
    folder = spool / _FOLDER
    if not folder.exists():
        return []
    trust.require_trusted(folder, "folder of bench results")
    past: list[BenchResult] = []
    for node in filter(_NODE.fullmatch, nodes):
        for line in _read_lines(folder / f"{node}.jsonl"):
            with contextlib.suppress(msgspec.DecodeError):
                result = decode_json(line, BenchResult)
                past += [result] if result.node == node else []
    return past


def append_results(spool: Path, results: Sequence[BenchResult]) -> None:
    """Add results to their nodes' files; those of groups are in none. Raises PitError."""
    folder = spool / _FOLDER
    by_node: dict[str, bytes] = {}
    for result in results:
        if _NODE.fullmatch(result.node):
            by_node[result.node] = by_node.get(result.node, b"") + msgspec.json.encode(result) + b"\n"
    try:
        folder.mkdir(mode=0o755, exist_ok=True)
        trust.require_trusted(folder, "folder of bench results")
        for node, lines in by_node.items():
            _append(folder / f"{node}.jsonl", lines)
    except OSError as error:
        raise from_os_error(error, folder) from error


def _append(path: Path, lines: bytes) -> None:
    """Add lines in one write, which is not mixed with another process's. Raises OSError."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o644)
    try:
        if os.write(descriptor, lines) != len(lines):
            raise ClusterError("short write", where=str(path), hint="free space there")
        size = os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)
    if size > _MAX_BYTES:
        kept = _read_lines(path)
        write_atomic(path, b"".join(kept[len(kept) // 2 :]))


def _read_lines(path: Path) -> list[bytes]:
    """Return the lines of the file's newest part; none if it is missing, or belongs to another account."""
    try:
        with open_regular(path) as file:
            status = os.fstat(file.fileno())
            if status.st_uid not in (0, os.geteuid()):
                return []
            file.seek(max(0, status.st_size - 2 * _MAX_BYTES))
            return file.read(2 * _MAX_BYTES).splitlines(keepends=True)
    except OSError:
        return []
