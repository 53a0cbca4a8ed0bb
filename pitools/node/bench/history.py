"""The results of each node, kept below the spool: `bench/<node>.jsonl`, the newest last."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from pitools.core import trust
from pitools.core.fs import from_os_error, open_regular, write_atomic
from pitools.core.record import decode_json
from pitools.node.bench.compare import BenchResult
from pitools.node.types import NAME

_FOLDER = "bench"
_MAX_LINES = 2_000  # of a node's file: 20 runs of 8 GPUs are 600
_MAX_BYTES = 4 << 20


def read_past(spool: Path, nodes: Iterable[str]) -> list[BenchResult]:
    """Return earlier results of nodes, oldest first; what is damaged, or another account's, is left out.

    Raises ConfigError where others can write into the folder.
    """
    folder = spool / _FOLDER
    if not folder.exists():
        return []
    trust.require_trusted(folder, "folder of bench results")
    past: list[BenchResult] = []
    for node in filter(NAME.fullmatch, nodes):
        for line in _read_lines(folder / f"{node}.jsonl"):
            with contextlib.suppress(msgspec.DecodeError):
                result = decode_json(line, BenchResult)
                past += [result] if result.node == node else []
    return past


def append_results(spool: Path, results: Sequence[BenchResult]) -> None:
    """Add results to their nodes' files; those of groups are in none. Raises PitError."""
    folder = spool / _FOLDER
    by_node: dict[str, list[bytes]] = {}
    for result in results:
        if NAME.fullmatch(result.node):
            by_node.setdefault(result.node, []).append(msgspec.json.encode(result) + b"\n")
    try:
        folder.mkdir(mode=0o755, exist_ok=True)
        trust.require_trusted(folder, "folder of bench results")
        for node, lines in by_node.items():
            kept = _read_lines(folder / f"{node}.jsonl")[-_MAX_LINES:]
            write_atomic(folder / f"{node}.jsonl", b"".join([*kept, *lines]), durable=False)
    except OSError as error:
        raise from_os_error(error, folder) from error


def _read_lines(path: Path) -> list[bytes]:
    """Return the file's lines; none if it is missing, too large to be ours, or belongs to another account."""
    try:
        with open_regular(path) as file:
            status = os.fstat(file.fileno())
            if status.st_uid not in (0, os.geteuid()) or status.st_size > _MAX_BYTES:
                return []
            return [line + b"\n" for line in file.read(_MAX_BYTES).splitlines()]
    except OSError:
        return []
