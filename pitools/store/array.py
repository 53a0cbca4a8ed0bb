"""Steps of an array, read from its files into the caller's memory; every chunk is checked before it is believed.

    read_into(out, 40, 104):  chunk 1 │ chunk 2 │ chunk 3 │ chunk 4     one preadv for each file
                              raw: straight into `out`; else into a buffer of the thread, and decoded into `out`

A chunk's checksum is compared when this process reads the chunk for the first time, or each time, or never. Published
files do not change, so the first time is what protects from bit rot at rest; each time also from a failing disk.
"""

from __future__ import annotations

import mmap
import os
import stat
import threading
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from pitools.core.errors import DataError
from pitools.store.decode import decoder
from pitools.store.layout import Layout
from pitools.store.shard import ABSENT, Broken, Index, Window, read_index

Check = Literal["first", "always", "never"]
# Descriptors of one array that are kept open.
_OPEN_FILES = 256
# Bytes between two chunks that are read along with them rather than by a call of their own.
_GAP_BYTES = 64 << 10
_IOV_MAX = 512
_AGAIN = "stage it again, or run `pit-stage check` on it"


class Absent(Exception):
    """A chunk that is not stored, which in Zarr means the fill value: for zarr-python to read."""


class _File:
    """A shard, or a file of one chunk. checked: which chunks were found good. Closed when the last reader lets go."""

    def __init__(self, descriptor: int, index: Index, checked: bytearray) -> None:
        self.descriptor, self.index, self.checked = descriptor, index, checked

    def __del__(self) -> None:
        os.close(self.descriptor)


class _Piece(NamedTuple):
    """A chunk and the steps of it that are wanted. start, stop: in its file; low: the chunk's first step there."""

    number: int
    low: int
    start: int
    stop: int


class ArrayReader:
    """One array's steps. Any threads may read at once; a forked process may go on reading.

    files: path of each file by its number along the first axis, None for one that the store does not have.
    """

    def __init__(self, folder: Path, name: str, layout: Layout, *, check: Check = "first") -> None:
        self.name, self.layout = name, layout
        self._folder, self._check = folder, check if layout.crc else "never"
        self._decode = decoder(layout.codec)
        self._raw_bytes = layout.chunk_bytes + 4 * layout.crc
        self._scratch = threading.local()
        # C code, so no lock of it can be held by another thread while this process forks.
        self._file = lru_cache(maxsize=_OPEN_FILES)(self._open)

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Steps [start, stop): (stop - start, *row). Raises as `read_into`."""
        out = np.empty((stop - start, *self.layout.shape[1:]), self.layout.dtype)
        self.read_into(out, start, stop)
        return out

    def read_into(self, out: NDArray[Any], start: int, stop: int) -> None:
        """Fill `out`, (stop - start, *row), C-contiguous, of the array's type, with these steps.

        Raises IndexError for steps that are not there, DataError for a file that is missing, cut short or damaged,
        Absent for a chunk that is not stored.
        """
        known = self.layout
        if not 0 <= start <= stop <= known.shape[0]:
            raise IndexError(f"steps [{start}, {stop}) of {self.name}, which has {known.shape[0]}")
        if not out.flags.c_contiguous:  # else what is filled would be a copy of it
            raise ValueError("`out` is not C-contiguous")
        view = out.reshape(-1).view(np.uint8).data
        at = start
        while at < stop:
            number = at // known.shard
            low = number * known.shard
            end = min(stop, low + known.shard)
            part = view[(at - start) * known.row_bytes : (end - start) * known.row_bytes]
            if known.codec == "raw":
                self._read_raw(number, at - low, end - low, part)
            else:
                self._read_encoded(number, at - low, end - low, part)
            at = end

    def _read_raw(self, number: int, start: int, stop: int, out: memoryview) -> None:
        file, row = self._file(number), self.layout.row_bytes
        todo: list[memoryview] = []
        begin = end = 0
        for piece in self._pieces(start, stop):
            offset, size = self._span(number, file, piece.number)
            if size != self._raw_bytes:
                raise self._damaged(number, piece.number, f"has {size} bytes, not {self._raw_bytes}")
            if self._check == "always" or (self._check == "first" and not file.checked[piece.number]):
                self._compare(number, file, piece.number, offset)
            offset += (piece.start - piece.low) * row
            if todo and not (0 <= offset - end <= _GAP_BYTES and len(todo) < _IOV_MAX):
                self._fill(number, file, todo, begin)
                todo = []
            if not todo:
                begin = end = offset
            if offset > end:
                todo.append(self._buffer(_GAP_BYTES)[: offset - end])
            todo.append(out[(piece.start - start) * row : (piece.stop - start) * row])
            end = offset + (piece.stop - piece.start) * row
        if todo:
            self._fill(number, file, todo, begin)

    def _read_encoded(self, number: int, start: int, stop: int, out: memoryview) -> None:
        file, known = self._file(number), self.layout
        pieces = list(self._pieces(start, stop))
        spans = [self._span(number, file, piece.number) for piece in pieces]
        low, high = min(offset for offset, _ in spans), max(offset + size for offset, size in spans)
        together = high - low <= sum(size for _, size in spans) + _GAP_BYTES * len(spans)
        whole = known.chunk_bytes
        room = self._buffer((high - low if together else max(size for _, size in spans)) + whole)
        if together:
            self._fill(number, file, [room[whole : whole + high - low]], low)
        for piece, (offset, size) in zip(pieces, spans, strict=True):
            if together:
                encoded = room[whole + offset - low : whole + offset - low + size]
            else:
                encoded = room[whole : whole + size]
                self._fill(number, file, [encoded], offset)
            encoded = self._checked(number, file, piece.number, encoded)
            target = out[(piece.start - start) * known.row_bytes : (piece.stop - start) * known.row_bytes]
            try:
                if len(target) == whole:
                    self._decode(encoded, target)
                else:
                    self._decode(encoded, room[:whole])
                    skip = (piece.start - piece.low) * known.row_bytes
                    target[:] = room[skip : skip + len(target)]
            except (ValueError, RuntimeError) as error:
                raise self._damaged(number, piece.number, f"cannot be decoded: {error}") from error

    def _pieces(self, start: int, stop: int) -> list[_Piece]:
        chunk = self.layout.chunk
        return [
            _Piece(number, number * chunk, max(start, number * chunk), min(stop, (number + 1) * chunk))
            for number in range(start // chunk, -(-stop // chunk))
        ]

    def _span(self, number: int, file: _File, chunk: int) -> tuple[int, int]:
        """Where a chunk's encoded bytes are."""
        offset, size = file.index.offsets[chunk], file.index.sizes[chunk]
        if offset == ABSENT and size == ABSENT:
            raise Absent
        if offset < file.index.low or offset + size > file.index.high:
            raise self._damaged(number, chunk, f"lies at bytes {offset} to {offset + size}, outside its file")
        return offset, size

    def _compare(self, number: int, file: _File, chunk: int, offset: int) -> None:
        """Read a raw chunk once for its checksum alone."""
        encoded = self._buffer(self._raw_bytes)[: self._raw_bytes]
        self._fill(number, file, [encoded], offset)
        self._checked(number, file, chunk, encoded)

    def _checked(self, number: int, file: _File, chunk: int, encoded: memoryview) -> memoryview:
        """The encoded bytes without their checksum, which is compared where that is wanted."""
        if not self.layout.crc:
            return encoded
        body = encoded[:-4]
        if self._check == "always" or (self._check == "first" and not file.checked[chunk]):
            if crc32c(body) != int.from_bytes(encoded[-4:], "little"):
                raise self._damaged(number, chunk, "is not what its checksum says")
            file.checked[chunk] = 1
        return body

    def _fill(self, number: int, file: _File, views: list[memoryview], offset: int) -> None:
        """Read the views full, one after another."""
        wanted = sum(map(len, views))
        count = os.preadv(file.descriptor, views, offset)
        while count < wanted:  # rare: a signal, or the end of the file
            skip, rest = count, []
            for view in views:
                rest.append(view[min(skip, len(view)) :])
                skip -= min(skip, len(view))
            more = os.preadv(file.descriptor, [view for view in rest if view], offset + count)
            if not more:
                what = f"{self._path(number)}: it ends after byte {offset + count}"
                raise DataError(what, where=str(self._folder), hint=_AGAIN)
            count += more

    def _buffer(self, size: int) -> memoryview:
        """Memory of this thread's own, of at least so many bytes."""
        kept: memoryview | None = getattr(self._scratch, "buffer", None)
        if kept is None or len(kept) < size:
            kept = self._scratch.buffer = memoryview(mmap.mmap(-1, max(size, 1 << 20)))
        return kept

    def _open(self, number: int) -> _File:
        path = self._folder / self._path(number)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            what = f"{self._path(number)}: {os.strerror(error.errno or 0)}"
            raise DataError(what, where=str(self._folder), hint=_AGAIN) from error
        try:
            return self._opened(number, descriptor)
        except BaseException:
            os.close(descriptor)
            raise

    def _opened(self, number: int, descriptor: int) -> _File:
        found, known = os.fstat(descriptor), self.layout
        if not stat.S_ISREG(found.st_mode):
            raise DataError(f"{self._path(number)}: not a regular file", where=str(self._folder), hint=_AGAIN)
        if known.sharding is None:
            from array import array as numbers

            index = Index(numbers("Q", [0]), numbers("Q", [found.st_size]), 0, found.st_size)
        else:
            window = Window(lambda view, offset: os.preadv(descriptor, [view], offset), memoryview(bytearray(1)))
            try:
                index = read_index(window, 0, found.st_size, known.sharding)
            except Broken as broken:
                what = f"{self._path(number)}: {broken.flaw.problem}: {broken.flaw.expected}, found {broken.flaw.got}"
                raise DataError(what, where=str(self._folder), hint=_AGAIN) from broken
        return _File(descriptor, index, bytearray(len(index.offsets)))

    def _path(self, number: int) -> str:
        prefix = "" if self.name == "." else f"{self.name}/"
        return f"{prefix}c/{number}" + "/0" * (len(self.layout.shape) - 1)

    def _damaged(self, number: int, chunk: int, what: str) -> DataError:
        first = number * self.layout.shard + chunk * self.layout.chunk
        chunk_text = f"chunk {chunk} (steps {first} to {min(first + self.layout.chunk, self.layout.shape[0])})"
        what = f"{self.name}: {chunk_text} of {self._path(number)} {what}"
        return DataError(what, where=str(self._folder), hint=_AGAIN)
