"""One shard: judged as it lies, and its steps shown to whoever looks at them.

Every file's digest is compared first, and then read from memory. An array along steps is read by the reader that
training uses, which compares every checksum on its way; what that cannot read, or refuses, is judged byte by byte,
which says all that is wrong with a file and not only what comes first.
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
from pitools.core.fs import plain_file
from pitools.dataset.check.file_inventory import Shard
from pitools.dataset.check.finding import Finding
from pitools.store.digest import hasher_for
from pitools.store.reader.version_reader import Arrays
from pitools.store.zarr import verify
from pitools.store.zarr.chunk_layout import Layout, layout
from pitools.store.zarr.shard_index import ABSENT, BUFFER, Broken, ReadInto, Window, read_index

Look = Callable[[int, NDArray[Any]], None]  # the first step's number, and steps (n, *row) that are overwritten later

# Steps that are read and looked at in one go: so many stay in a core's own cache.
_BLOCK_BYTES = 2 << 20


class Examined(NamedTuple):
    """What is wrong with a file's bytes, and how many of them were read."""

    findings: list[Finding]
    read_bytes: int


class Examiner:
    """Reads shards of one version; any threads may use it at once. store: one that always compares checksums."""

    def __init__(self, path: Path, store: Arrays) -> None:
        self._path, self._store = path, store
        self._mine = threading.local()

    def __call__(self, shard: Shard, look: Look | None, advance: Callable[[int], None]) -> Examined:
        """Judge a shard, and show its steps, in order, up to where it is damaged."""
        known = layout(shard.array)
        try:
            with plain_file(self._path / shard.entry.path) as file:
                # Checksums inside are right in a shard that lies in another one's place; only the digest is not.
                other = self._digest(shard, file.fileno())
                if look and known and self._is_here(shard):
                    found = list(self._shown(shard, known, look, file.fileno()))
                else:
                    found = list(self._judged(shard, file.fileno()))
                    if look and not found:
                        self._show(shard, shard.array.chunk[0], look)
                if not any(finding.level == "damage" for finding in found):  # which says more than the digest
                    found = other + found
        except OSError as error:
            return Examined([damage(shard, "it cannot be read", error.strerror or str(error))], 0)
        except DataError as error:  # of a form that zarr-python alone reads
            found = [damage(shard, error.what, "")]
        advance(shard.entry.bytes)
        return Examined(found, shard.entry.bytes)

    def _shown(self, shard: Shard, known: Layout, look: Look, descriptor: int) -> Iterator[Finding]:
        try:
            absent = _absent(shard, known, descriptor)
            self._show(shard, max(1, _BLOCK_BYTES // known.chunk_bytes) * known.chunk, look)
        except (DataError, Broken) as error:
            wrong = list(self._judged(shard, descriptor))
            yield from wrong or [damage(shard, str(error), "")]
            return
        if absent:
            what = f"{absent} inner chunks are not stored: they read as the fill value"
            yield Finding(level="warning", check="absent", array=shard.array.name, file=shard.entry.path, what=what)

    def _show(self, shard: Shard, together: int, look: Look) -> None:
        """Read the steps, so many at a time. Raises DataError."""
        array = shard.array
        if any(shard.coordinate[1:]):  # of a grid that is cut along other axes too, the first file shows whole steps
            return
        start, stop = _steps(shard)
        dtype = self._store.dtype(array.name)
        room = self._room(min(together, stop - start) * math.prod(array.shape[1:]) * dtype.itemsize)
        block = room.view(dtype).reshape(-1, *array.shape[1:])
        for first, last in self._store.manifest.runs(array.name):
            for low in range(max(start, first), min(stop, last), together):
                rows = block[: min(together, stop - low, last - low)]
                self._store.read_into(array.name, rows, low, low + len(rows))
                look(low, rows)

    def _is_here(self, shard: Shard) -> bool:
        """Whether all of the shard's steps are to be read: a part of a version may have a shard for a few of them."""
        start, stop = _steps(shard)
        return any(first <= start and stop <= last for first, last in self._store.manifest.runs(shard.array.name))

    def _room(self, size: int) -> NDArray[np.uint8]:
        """Memory of this thread's own, which is used again: new pages cost more than reading does."""
        kept: NDArray[np.uint8] | None = getattr(self._mine, "room", None)
        if kept is None or len(kept) < size:
            kept = self._mine.room = np.empty(size, np.uint8)
        return kept[:size]

    def _judged(self, shard: Shard, descriptor: int) -> Iterator[Finding]:
        """All that is wrong with a file. Raises OSError."""
        window = Window(_reading(descriptor), memoryview(bytearray(BUFFER)))
        wrong = verify.judge(window, os.fstat(descriptor).st_size, shard.array, shard.coordinate)
        for flaw in wrong.flaws:
            yield damage(shard, f"bad {flaw.problem}", flaw.got, flaw.expected)

    def _digest(self, shard: Shard, descriptor: int) -> list[Finding]:
        """What the manifest says of the file's content, against it. Raises OSError."""
        entry = shard.entry
        hasher, done, room = hasher_for(entry.digest), 0, self._room(_BLOCK_BYTES).data
        while count := os.preadv(descriptor, [room], done):
            hasher.update(room[:count])
            done += count
        if hasher.text() == entry.digest:
            return []
        return [damage(shard, "it is not what the manifest says", hasher.text(), entry.digest, "digest")]


def _steps(shard: Shard) -> tuple[int, int]:
    """Rows of the array's first axis that the shard holds."""
    start, size = shard.coordinate[0] * shard.array.chunk[0], shard.array.chunk[0]
    return start, min(start + size, shard.array.shape[0])


def _reading(descriptor: int) -> ReadInto:
    return lambda view, offset: os.preadv(descriptor, [view], offset)


def _absent(shard: Shard, known: Layout, descriptor: int) -> int:
    """Inner chunks of steps that are not stored. Raises Broken."""
    if known.sharding is None:
        return 0
    window = Window(_reading(descriptor), memoryview(bytearray(1)))
    index = read_index(window, 0, os.fstat(descriptor).st_size, known.sharding)
    steps = min(known.shard, known.shape[0] - shard.coordinate[0] * known.shard)
    return index.offsets[: -(-steps // known.chunk)].count(ABSENT)


def damage(shard: Shard, what: str, got: str, expected: str = "", check: str = "shard") -> Finding:
    """A finding about the bytes of a shard."""
    return Finding(
        level="damage",
        check=check,
        array=shard.array.name,
        file=shard.entry.path,
        what=what,
        got=got,
        expected=expected,
    )
