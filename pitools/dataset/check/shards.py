"""Check the bytes of one shard, and pass its steps to the collectors of statistics.

The digest of every file is compared first; then it is decoded from memory. An array along steps is decoded by the
reader that training uses, which compares every checksum. A shard that it refuses is checked byte by byte, so that all
damage of a file is reported and not only the first.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pitools.core.errors import DataError
from pitools.core.fs import access_error, open_regular
from pitools.dataset.check.file_inventory import ShardFile
from pitools.dataset.check.finding import Finding
from pitools.store.digest import hasher_for
from pitools.store.reader.version_reader import VersionReader
from pitools.store.zarr import verify
from pitools.store.zarr.chunk_layout import ChunkLayout, chunk_layout
from pitools.store.zarr.shard_index import BUFFER_BYTES, NOT_STORED, BufferedFile, ReadInto, ShardError, read_index

OnSteps = Callable[[int, NDArray[Any]], None]  # the first step's number, and steps (n, *row) that are overwritten later

# Steps that are decoded and collected together: their values fit into a core's own cache.
_BLOCK_BYTES = 2 << 20


class ShardResult(NamedTuple):
    """The findings about a file's bytes, and the number of bytes read."""

    findings: list[Finding]
    read_bytes: int


class ShardChecker:
    """Reads shards of one version, from any thread. store: a store that always compares checksums."""

    def __init__(self, path: Path, store: VersionReader) -> None:
        self._path, self._store = path, store
        self._mine = threading.local()

    def __call__(self, shard: ShardFile, on_steps: OnSteps | None, advance: Callable[[int], None]) -> ShardResult:
        """Check a shard, and pass its steps to `on_steps`, in order, up to the first damage. Raises ClusterError or
        Unreachable for a shard that cannot be judged."""
        layout = chunk_layout(shard.array)
        try:
            with open_regular(self._path / shard.entry.path) as file:
                # The checksums within are right if two shards were swapped; only the digest differs.
                digest_finding = self._digest(shard, file.fileno())
                if on_steps and layout and self._is_fully_present(shard):
                    findings = list(self._pass_steps(shard, layout, on_steps, file.fileno()))
                else:
                    findings = list(self._verify(shard, file.fileno()))
                    if on_steps and not findings:
                        self._read_steps(shard, shard.array.file_chunk[0], on_steps)
                if not any(finding.level == "damage" for finding in findings):  # more specific than the digest
                    findings = digest_finding + findings
        except OSError as error:
            if access := access_error(error, self._path / shard.entry.path):
                raise access from error
            return ShardResult([damage_finding(shard, "it cannot be read", error.strerror or str(error))], 0)
        except DataError as error:  # of a form that zarr-python alone reads
            findings = [damage_finding(shard, error.message, "")]
        advance(shard.entry.bytes)
        return ShardResult(findings, shard.entry.bytes)

    def _pass_steps(
        self, shard: ShardFile, chunk_layout: ChunkLayout, on_steps: OnSteps, descriptor: int
    ) -> Iterator[Finding]:
        try:
            missing = _count_missing_chunks(shard, chunk_layout, descriptor)
            self._read_steps(shard, max(1, _BLOCK_BYTES // chunk_layout.chunk_bytes) * chunk_layout.chunk, on_steps)
        except (DataError, ShardError) as error:
            wrong = list(self._verify(shard, descriptor))
            yield from wrong or [damage_finding(shard, str(error), "")]
            return
        if missing:
            problem = f"{missing} inner chunks are not stored: they read as the fill value"
            yield Finding(
                level="warning", check="missing-chunk", array=shard.array.name, file=shard.entry.path, problem=problem
            )

    def _read_steps(self, shard: ShardFile, together: int, on_steps: OnSteps) -> None:
        """Read the steps, so many at a time. Raises DataError."""
        array = shard.array
        if any(shard.coordinate[1:]):  # of a grid that is cut along other axes too, the first file shows whole steps
            return
        start, stop = _steps(shard)
        dtype = self._store.dtype(array.name)
        room = self._thread_buffer(min(together, stop - start) * math.prod(array.shape[1:]) * dtype.itemsize)
        block = room.view(dtype).reshape(-1, *array.shape[1:])
        for first, last in self._store.manifest.present_ranges(array.name):
            for low in range(max(start, first), min(stop, last), together):
                rows = block[: min(together, stop - low, last - low)]
                self._store.read_into(array.name, rows, low, low + len(rows))
                on_steps(low, rows)

    def _is_fully_present(self, shard: ShardFile) -> bool:
        """Return whether the version has all of the shard's steps: a subset may have only a few of them."""
        start, stop = _steps(shard)
        return any(
            first <= start and stop <= last for first, last in self._store.manifest.present_ranges(shard.array.name)
        )

    def _thread_buffer(self, size: int) -> NDArray[np.uint8]:
        """Return reused memory of this thread: new pages cost more than reading does."""
        buffer: NDArray[np.uint8] | None = getattr(self._mine, "room", None)
        if buffer is None or len(buffer) < size:
            buffer = self._mine.room = np.empty(size, np.uint8)
        return buffer[:size]

    def _verify(self, shard: ShardFile, descriptor: int) -> Iterator[Finding]:
        """Yield the defects of a file. Raises OSError."""
        window = BufferedFile(_make_read_into(descriptor), memoryview(bytearray(BUFFER_BYTES)))
        wrong = verify.verify_file(window, os.fstat(descriptor).st_size, shard.array, shard.coordinate)
        for flaw in wrong.defects:
            yield damage_finding(shard, f"bad {flaw.kind}", flaw.got, flaw.expected)

    def _digest(self, shard: ShardFile, descriptor: int) -> list[Finding]:
        """Compare the file's digest with the manifest's. Raises OSError."""
        entry = shard.entry
        hasher, done, room = hasher_for(entry.digest), 0, self._thread_buffer(_BLOCK_BYTES).data
        while count := os.preadv(descriptor, [room], done):
            hasher.update(room[:count])
            done += count
        if hasher.digest() == entry.digest:
            return []
        return [damage_finding(shard, "differs from the manifest", hasher.digest(), entry.digest, "digest")]


def _steps(shard: ShardFile) -> tuple[int, int]:
    """Return the steps of the shard, [start, stop)."""
    start, size = shard.coordinate[0] * shard.array.file_chunk[0], shard.array.file_chunk[0]
    return start, min(start + size, shard.array.shape[0])


def _make_read_into(descriptor: int) -> ReadInto:
    return lambda view, offset: os.preadv(descriptor, [view], offset)


def _count_missing_chunks(shard: ShardFile, layout: ChunkLayout, descriptor: int) -> int:
    """Return how many inner chunks of the array's steps are not stored. Raises ShardError."""
    if layout.sharding is None:
        return 0
    window = BufferedFile(_make_read_into(descriptor), memoryview(bytearray(1)))
    index = read_index(window, 0, os.fstat(descriptor).st_size, layout.sharding)
    steps = min(layout.shard, layout.shape[0] - shard.coordinate[0] * layout.shard)
    return index.offsets[: -(-steps // layout.chunk)].count(NOT_STORED)


def damage_finding(shard: ShardFile, problem: str, got: str, expected: str = "", check: str = "shard") -> Finding:
    """Return a finding on the bytes of a shard."""
    return Finding(
        level="damage",
        check=check,
        array=shard.array.name,
        file=shard.entry.path,
        problem=problem,
        got=got,
        expected=expected,
    )
