"""Read steps of an array from its files into the caller's memory, and verify the checksums of chunks.

    read_into(out, 40, 104):  chunk 1 │ chunk 2 │ chunk 3 │ chunk 4     one preadv per file
                              raw: directly into `out`; else into a thread-local buffer, then decoded into `out`

A chunk's checksum is compared at this process's first read of the chunk, at each read, or never. Published files do not
change, so the first comparison detects bit rot at rest; comparing at each read also detects a failing disk. Comparing
requires the whole chunk; otherwise only the requested bytes of a raw chunk are read.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple
from weakref import WeakSet

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from pitools.core.errors import DataError
from pitools.core.fs import access_error
from pitools.store.reader.open_shard import OpenShard, open_shard
from pitools.store.reader.read_stats import thread_stats
from pitools.store.zarr.chunk_layout import ChunkLayout
from pitools.store.zarr.codecs import decoder_for
from pitools.store.zarr.metadata import ShardingSpec
from pitools.store.zarr.shard_index import NOT_STORED, ShardError

ChecksumMode = Literal["first", "always", "never"]
# Maps a path in a version to a new descriptor. Raises OSError, PitError.
Opener = Callable[[str], int]
# Open descriptors per array.
_OPEN_FILES = 256
# Chunks with a gap of at most this size are read, with the gap, by one call.
_GAP_BYTES = 64 << 10
_IOV_MAX = 512
# The kernel copies a third faster if file offset and memory address are equal modulo the cache line.
_CACHE_LINE = 64
DAMAGE_HINT = "a staged copy: `pit-stage check`; a version: `pit dataset check`, then `pit dataset rebuild`"


class ChunkNotStored(Exception):
    """A chunk is not stored, which means the fill value in Zarr. The caller then reads by zarr-python."""


class _ChunkSlice(NamedTuple):
    """The requested steps of a chunk, counted from the file's first step. low: first step of the chunk."""

    number: int
    low: int
    start: int
    stop: int


class ArrayReader:
    """A reader of one array. Safe for threads and across forks."""

    def __init__(
        self,
        folder: Path,
        name: str,
        layout: ChunkLayout,
        *,
        checksums: ChecksumMode = "first",
        opener: Opener | None = None,
    ) -> None:
        """checksums: compare a chunk with its CRC-32C at its first read, always or never. opener: opens the array's
        files; None: those in `folder`."""
        self.name, self.layout = name, layout
        self._folder, self._check = folder, checksums if layout.crc else "never"
        self._decoder = decoder_for(layout.codec)
        self._raw_bytes = layout.chunk_bytes + 4 * layout.crc
        self._scratch = threading.local()
        self._path = partial(_path, name, len(layout.shape))
        # lru_cache is C code: no other thread can hold its lock during a fork. A partial of a function, not a method:
        # a reference cycle would keep files open until the next run of the garbage collector.
        opened = partial(_open, folder, opener or partial(open_below, folder), self._path, layout.sharding)
        self._file = lru_cache(maxsize=_OPEN_FILES)(opened)
        _READERS.add(self)

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Return steps [start, stop) as (stop - start, *row). Raises as `read_into`."""
        out = np.empty((stop - start, *self.layout.shape[1:]), self.layout.dtype)
        self.read_into(out, start, stop)
        return out

    def read_into(self, out: NDArray[Any], start: int, stop: int) -> None:
        """Fill `out` with steps [start, stop). out: (stop - start, *row), C-contiguous, of the array's dtype.

        Raises IndexError for steps out of range, DataError for a missing, truncated or damaged file, ChunkNotStored.
        """
        layout = self.layout
        if not 0 <= start <= stop <= layout.shape[0]:
            raise IndexError(
                f"steps [{start}, {stop}) of {self.name}: out of range (expected at most {layout.shape[0]})"
            )
        if not out.flags.c_contiguous:  # else reshape would return a copy
            raise ValueError("`out`: not C-contiguous")
        view = out.reshape(-1).view(np.uint8).data
        tally = thread_stats()
        tally.path = self._path
        row = start
        while row < stop:
            number = row // layout.shard
            low = number * layout.shard
            end = min(stop, low + layout.shard)
            part = view[(row - start) * layout.row_bytes : (end - start) * layout.row_bytes]
            tally.number = number
            if layout.codec == "raw":
                self._read_raw(number, row - low, end - low, part)
            else:
                self._read_encoded(number, row - low, end - low, part)
            row = end
        tally.path = None  # the reference would keep the files of this reader open

    def _read_raw(self, number: int, start: int, stop: int, out: memoryview) -> None:
        """Read raw chunks directly into `out`; other bytes of a chunk to be verified go to a thread-local buffer."""
        file, row, chunk_bytes = self._file(number), self.layout.row_bytes, self.layout.chunk_bytes
        pieces = self._chunk_slices(start, stop)
        room = self._buffer(2 * chunk_bytes + 4 * len(pieces) + _GAP_BYTES)
        gap, room = room[:_GAP_BYTES], room[_GAP_BYTES:]
        reads: list[tuple[int, list[memoryview]]] = []
        doubted: list[tuple[int, list[memoryview]]] = []
        end = 0
        for piece in pieces:
            offset, size = self._chunk_range(number, file, piece.number)
            if size != self._raw_bytes:
                raise self._damaged(number, piece.number, f"wrong size (expected {self._raw_bytes} bytes, got {size})")
            skip, length = (piece.start - piece.low) * row, (piece.stop - piece.start) * row
            offset_in_target = (piece.start - start) * row
            views = [out[offset_in_target : offset_in_target + length]]
            if self._must_verify(file, piece.number):
                cuts = (0, skip, chunk_bytes - length, chunk_bytes - length + 4)
                head, tail, checksum = (room[low:high] for low, high in pairwise(cuts))
                room, length, skip = room[cuts[-1] :], chunk_bytes + 4, 0
                views = [head, *views, tail, checksum]
                doubted.append((piece.number, views))
            offset += skip
            if reads and 0 <= offset - end <= _GAP_BYTES and len(reads[-1][1]) < _IOV_MAX:
                reads[-1][1].extend([gap[: offset - end], *views])
            else:
                reads.append((offset, [*views]))
            end = offset + length
        for offset, views in reads:
            self._read_exactly(number, file, views, offset)
        for chunk, views in doubted:
            self._verify_chunk(number, file, chunk, views)

    def _read_encoded(self, number: int, start: int, stop: int, out: memoryview) -> None:
        file, row, chunk_bytes = self._file(number), self.layout.row_bytes, self.layout.chunk_bytes
        pieces = self._chunk_slices(start, stop)
        spans = [self._chunk_range(number, file, piece.number) for piece in pieces]
        low, high = min(offset for offset, _ in spans), max(offset + size for offset, size in spans)
        is_one_read = high - low <= sum(size for _, size in spans) + _GAP_BYTES * len(spans)
        room = self._buffer(
            (high - low if is_one_read else max(size for _, size in spans)) + chunk_bytes + 2 * _CACHE_LINE
        )
        decoded, room = room[:chunk_bytes], room[-(-chunk_bytes // _CACHE_LINE) * _CACHE_LINE :]
        if is_one_read:
            room = room[low % _CACHE_LINE :]
            self._read_exactly(number, file, [room[: high - low]], low)
        for piece, (offset, size) in zip(pieces, spans, strict=True):
            if is_one_read:
                encoded = room[offset - low : offset - low + size]
            else:
                encoded = room[offset % _CACHE_LINE : offset % _CACHE_LINE + size]
                self._read_exactly(number, file, [encoded], offset)
            if self.layout.crc:
                body = encoded[:-4]
                if self._must_verify(file, piece.number):
                    self._verify_chunk(number, file, piece.number, [body, encoded[-4:]])
                encoded = body
            target = out[(piece.start - start) * row : (piece.stop - start) * row]
            try:
                if len(target) == chunk_bytes:
                    self._decoder.whole(encoded, target)
                else:
                    self._decoder.partial(encoded, (piece.start - piece.low) * row, target, decoded)
            except (ValueError, RuntimeError) as error:
                raise self._damaged(number, piece.number, f"decoding failed: {error}") from error

    def _chunk_slices(self, start: int, stop: int) -> list[_ChunkSlice]:
        chunk = self.layout.chunk
        return [
            _ChunkSlice(number, number * chunk, max(start, number * chunk), min(stop, (number + 1) * chunk))
            for number in range(start // chunk, -(-stop // chunk))
        ]

    def _chunk_range(self, number: int, file: OpenShard, chunk: int) -> tuple[int, int]:
        """Return offset and size of a chunk's encoded bytes. Raises ChunkNotStored, DataError."""
        offset, size = file.index.offsets[chunk], file.index.sizes[chunk]
        if offset == NOT_STORED and size == NOT_STORED:
            raise ChunkNotStored
        if offset < file.index.first or offset + size > file.index.last:
            valid = f"{file.index.first} to {file.index.last}"
            problem = f"outside the file's data (expected bytes {valid}, got {offset} to {offset + size})"
            raise self._damaged(number, chunk, problem)
        return offset, size

    def _must_verify(self, file: OpenShard, chunk: int) -> bool:
        """Whether the chunk's checksum must be compared."""
        return self._check == "always" or (self._check == "first" and not file.verified[chunk])

    def _verify_chunk(self, number: int, file: OpenShard, chunk: int, views: list[memoryview]) -> None:
        """Compare a chunk's CRC-32C. views: the consecutive parts of the chunk, then the checksum. Raises DataError."""
        checksum = 0
        for view in views[:-1]:
            checksum = crc32c(view, checksum)
        if checksum != int.from_bytes(views[-1], "little"):
            raise self._damaged(number, chunk, "checksum mismatch")
        file.verified[chunk] = 1

    def _read_exactly(self, number: int, file: OpenShard, views: list[memoryview], offset: int) -> None:
        """Fill consecutive views from `offset` on. Raises DataError at the end of the file."""
        wanted = sum(map(len, views))
        count = os.preadv(file.descriptor, views, offset)
        while count < wanted:  # rare: a signal, or the end of the file
            skip, rest = count, []
            for view in views:
                rest.append(view[min(skip, len(view)) :])
                skip -= min(skip, len(view))
            more = os.preadv(file.descriptor, [view for view in rest if view], offset + count)
            if not more:
                problem = f"{self._path(number)}: truncated (expected {offset + wanted} bytes, got {offset + count})"
                raise DataError(problem, where=str(self._folder), hint=DAMAGE_HINT)
            count += more
        thread_stats().bytes += wanted

    def _buffer(self, size: int) -> memoryview:
        """Return this thread's buffer, of at least `size` bytes."""
        buffer: memoryview | None = getattr(self._scratch, "buffer", None)
        if buffer is None or len(buffer) < size:
            # MAP_PRIVATE: a read in a forked child must not change its parent's buffer.
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            buffer = self._scratch.buffer = memoryview(mmap.mmap(-1, max(size, 1 << 20), flags))
        return buffer

    def _damaged(self, number: int, chunk: int, problem: str) -> DataError:
        first = number * self.layout.shard + chunk * self.layout.chunk
        chunk_text = f"chunk {chunk} (steps {first} to {min(first + self.layout.chunk, self.layout.shape[0])})"
        problem = f"{self.name}: {chunk_text} of {self._path(number)}: {problem}"
        return DataError(problem, where=str(self._folder), hint=DAMAGE_HINT)


_READERS: WeakSet[ArrayReader] = WeakSet()


def _open(
    folder: Path, opener: Opener, path: Callable[[int], str], sharding: ShardingSpec | None, number: int
) -> OpenShard:
    try:
        descriptor = _descriptor(opener, path(number))
    except OSError as error:
        if access := access_error(error, folder / path(number)):
            raise access from error
        problem = f"{path(number)}: {os.strerror(error.errno or 0)}"
        raise DataError(problem, where=str(folder), hint=DAMAGE_HINT) from error
    try:
        return open_shard(descriptor, sharding)
    except ShardError as broken:
        problem = f"{path(number)}: {broken.flaw.kind}: expected {broken.flaw.expected}, got {broken.flaw.got}"
        raise DataError(problem, where=str(folder), hint=DAMAGE_HINT) from broken


def _descriptor(opener: Opener, path: str) -> int:
    try:
        return opener(path)
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
    # Many arrays under a low `ulimit -n`: open files only save time, so all are closed.
    for reader in _READERS.copy():
        reader._file.cache_clear()
    return opener(path)


def _path(name: str, dimensions: int, number: int) -> str:
    """Return the path of an array's shard, or chunk, by its number along the first axis."""
    return f"{'' if name == '.' else f'{name}/'}c/{number}" + "/0" * (dimensions - 1)


def open_below(folder: Path, path: str) -> int:
    """Open a file below a folder. Raises OSError for a link; never blocks on a FIFO."""
    return os.open(folder / path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
