"""Digests of many files: threads over files, and over the 64 MiB ranges of large files."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

import xxhash

from pitools.core.daemon_pool import DaemonPool
from pitools.core.fs import open_regular
from pitools.core.progress import Advance
from pitools.store.digest import ALGORITHM, RANGE_BYTES, digest_ranges

_BLOCK = 1 << 20


class FileDigest(NamedTuple):
    """Size and digest of one file. digest: "" if the size is not the expected one. error: of a failed read."""

    bytes: int
    digest: str
    error: OSError | None = None


def default_threads() -> int:
    """Return the number of hash threads: one per core of this process's affinity, 1 to 8; new files are in memory."""
    return max(1, min(8, len(os.sched_getaffinity(0))))


def hash_files(
    root: Path, sizes: Mapping[str, int], *, threads: int, sync: bool = False, advance: Advance = lambda _: None
) -> Iterator[tuple[str, FileDigest]]:
    """Yield the digest of every file below `root`, in no order. sizes: bytes by relative path.

    sync: also sync each file. An unreadable file is yielded with its error, not raised.
    """
    reader = _RangeHasher(root, advance, sync=sync)
    with DaemonPool(threads, "digest") as pool:
        todo: list[tuple[str, list[Future[FileDigest]]]] = []
        # Largest first, so that the threads finish at about the same time.
        for path, size in sorted(sizes.items(), key=lambda item: -item[1]):
            if size > RANGE_BYTES and (current_size := reader.size(path)) != size:
                # A forged manifest may claim more ranges than memory holds.
                yield path, current_size if isinstance(current_size, FileDigest) else FileDigest(current_size, "")
                continue
            starts = range(0, size, RANGE_BYTES) if size > RANGE_BYTES else range(1)
            todo.append((path, [pool.submit(reader.range, path, size, start) for start in starts]))
        for path, ranges in todo:
            yield path, _combine_ranges([future.result() for future in ranges])


def _combine_ranges(ranges: list[FileDigest]) -> FileDigest:
    if len(ranges) == 1:
        return ranges[0]
    for part in ranges:
        if not part.digest:
            return part
    return FileDigest(ranges[0].bytes, digest_ranges(bytes.fromhex(part.digest) for part in ranges))


class _RangeHasher:
    """Reads ranges of files into a buffer of each thread's own."""

    def __init__(self, root: Path, advance: Advance, *, sync: bool) -> None:
        self._root, self._advance, self._sync = root, advance, sync
        self._own = threading.local()

    def size(self, path: str) -> int | FileDigest:
        """Return the bytes of a file now, or the error."""
        try:
            return (self._root / path).lstat().st_size
        except OSError as error:
            return FileDigest(0, "", error)

    def range(self, path: str, size: int, start: int) -> FileDigest:
        """Return the digest of one range; of a file of one range, the file's digest as text."""
        try:
            return self._range(path, size, start)
        except OSError as error:
            return FileDigest(0, "", error)

    def _range(self, path: str, size: int, start: int) -> FileDigest:
        with open_regular(self._root / path) as file:
            current_size = os.fstat(file.fileno()).st_size
            if current_size != size:
                return FileDigest(current_size, "")
            if self._sync and not start:
                os.fsync(file.fileno())  # costs little where the writer has done so
            state, remaining, place = xxhash.xxh3_128(), min(RANGE_BYTES, size - start), start
            buffer = self._buffer()
            while remaining and (count := os.preadv(file.fileno(), [buffer[: min(remaining, _BLOCK)]], place)):
                state.update(buffer[:count])
                remaining, place = remaining - count, place + count
                self._advance(count)
        if remaining:
            return FileDigest(place, "")
        return FileDigest(size, state.hexdigest() if size > RANGE_BYTES else f"{ALGORITHM}:{state.hexdigest()}")

    def _buffer(self) -> memoryview:
        # Page-aligned: see store/digest.py.
        if not hasattr(self._own, "buffer"):
            self._own.buffer = memoryview(mmap.mmap(-1, _BLOCK))
        buffer: memoryview = self._own.buffer
        return buffer
