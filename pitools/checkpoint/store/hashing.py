"""Digests of many files at once: threads over files, and over the 64 MiB ranges of large ones."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

import xxhash

from pitools.core.daemon_pool import Threads
from pitools.core.fs import plain_file
from pitools.core.progress import Advance
from pitools.store.digest import ALGORITHM, RANGE, of_ranges

_BLOCK = 1 << 20


class Hashed(NamedTuple):
    """One file as it was found: its size, its digest ("" where it has another size than expected), what failed."""

    bytes: int
    digest: str
    error: OSError | None = None


def default_threads() -> int:
    """One per core this process may use, 1 to 8: what was just written is hashed from memory."""
    return max(1, min(8, len(os.sched_getaffinity(0))))


def digests(
    root: Path, sizes: Mapping[str, int], *, threads: int, sync: bool = False, advance: Advance = lambda _: None
) -> Iterator[tuple[str, Hashed]]:
    """Every file below `root` once, in no order. sizes: bytes by relative path.

    sync: make each file's bytes survive power loss as well. A file that cannot be read is told, not raised.
    """
    reader = _Reader(root, advance, sync=sync)
    with Threads(threads, "digest") as pool:
        todo: list[tuple[str, list[Future[Hashed]]]] = []
        # Large ones first: of two threads none is left alone with the largest.
        for path, size in sorted(sizes.items(), key=lambda item: -item[1]):
            if size > RANGE and (found := reader.size(path)) != size:
                # A forged manifest may claim more ranges than memory holds.
                yield path, found if isinstance(found, Hashed) else Hashed(found, "")
                continue
            starts = range(0, size, RANGE) if size > RANGE else range(1)
            todo.append((path, [pool.submit(reader.range, path, size, start) for start in starts]))
        for path, ranges in todo:
            yield path, _together([future.result() for future in ranges])


def _together(ranges: list[Hashed]) -> Hashed:
    if len(ranges) == 1:
        return ranges[0]
    for part in ranges:
        if not part.digest:
            return part
    return Hashed(ranges[0].bytes, of_ranges(bytes.fromhex(part.digest) for part in ranges))


class _Reader:
    """Reads ranges of files into a buffer of each thread's own."""

    def __init__(self, root: Path, advance: Advance, *, sync: bool) -> None:
        self._root, self._advance, self._sync = root, advance, sync
        self._own = threading.local()

    def size(self, path: str) -> int | Hashed:
        """Bytes of a file now; what failed where there is none."""
        try:
            return (self._root / path).lstat().st_size
        except OSError as error:
            return Hashed(0, "", error)

    def range(self, path: str, size: int, start: int) -> Hashed:
        """The digest of one range: as text of the whole file where that is one range, else its hex digits."""
        try:
            return self._range(path, size, start)
        except OSError as error:
            return Hashed(0, "", error)

    def _range(self, path: str, size: int, start: int) -> Hashed:
        with plain_file(self._root / path) as file:
            found = os.fstat(file.fileno()).st_size
            if found != size:
                return Hashed(found, "")
            if self._sync and not start:
                os.fsync(file.fileno())  # costs little where the writer has done so
            state, left, place = xxhash.xxh3_128(), min(RANGE, size - start), start
            buffer = self._buffer()
            while left and (count := os.preadv(file.fileno(), [buffer[: min(left, _BLOCK)]], place)):
                state.update(buffer[:count])
                left, place = left - count, place + count
                self._advance(count)
        if left:
            return Hashed(place, "")
        return Hashed(size, state.hexdigest() if size > RANGE else f"{ALGORITHM}:{state.hexdigest()}")

    def _buffer(self) -> memoryview:
        # Page-aligned, as store/digest.py says.
        if not hasattr(self._own, "buffer"):
            self._own.buffer = memoryview(mmap.mmap(-1, _BLOCK))
        buffer: memoryview = self._own.buffer
        return buffer
