"""The index of a shard, read through a window of the file; and what is said of a file that is not as it should be.

    shard: inner chunk │ inner chunk │ … │ index: (offset, bytes) of each as uint64 │ crc32c      (or the index first)

`verify.py` judges a whole file by it.
"""

from __future__ import annotations

import sys
from array import array as numbers
from collections.abc import Callable, Iterator
from functools import cache
from math import prod
from typing import Literal, NamedTuple

import msgspec

from pitools.core.errors import ToolMissing
from pitools.store.zarr.metadata import ShardingSpec

NOT_STORED = 2**64 - 1  # offset and bytes of an inner chunk that is not stored: it reads as the fill value
MAX_CHUNKS = 1 << 22  # inner chunks of a shard, whose index is then 64 MiB
BUFFER_BYTES = 1 << 20
INDEX_CODECS = {("bytes",): 0, ("bytes", "crc32c"): 4}

ReadInto = Callable[[memoryview, int], int]  # fill a view from an offset; the count, 0 at the end
DefectKind = Literal["size", "index", "range", "checksum", "content"]


class Defect(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong with a file.

    kind: `size` (cut short or too long), `index` (unreadable), `range` (an inner chunk outside the shard, or over
    another), `checksum`, `content` (the bytes are not what the array's codecs write).
    """

    kind: DefectKind
    expected: str
    got: str


class ShardIndex(NamedTuple):
    """A shard's index. Inner chunk i, in C order, is bytes [offsets[i], offsets[i] + sizes[i]) of the shard, or absent.

    first, last: the bytes of the shard that are not the index.
    """

    offsets: numbers[int]
    sizes: numbers[int]
    first: int
    last: int

    def stored(self) -> list[int]:
        """The inner chunks that are stored, in the order in which they lie."""
        known = (
            i for i, pair in enumerate(zip(self.offsets, self.sizes, strict=True)) if pair != (NOT_STORED, NOT_STORED)
        )
        return sorted(known, key=self.offsets.__getitem__)


class ShardError(Exception):
    """What is looked at has this flaw, and no more can be said of it."""

    def __init__(self, problem: DefectKind, expected: str, got: str) -> None:
        super().__init__(got)
        self.flaw = Defect(kind=problem, expected=expected, got=got)


class BufferedFile:
    """A file seen through one buffer, such as of BUFFER bytes, read in order and not twice."""

    def __init__(self, read_into: ReadInto, buffer: memoryview, filled: int = 0) -> None:
        """filled: how many of the file's first bytes the buffer holds already."""
        self._read_into, self._buffer = read_into, buffer
        self._start, self._stop = 0, filled

    @classmethod
    def over(cls, content: bytes | memoryview) -> BufferedFile:
        """The window of a file that is in memory."""
        return cls(lambda *_: 0, memoryview(content), len(content))

    def blocks(self, offset: int, size: int) -> Iterator[memoryview]:
        """These bytes, in parts. Raises Broken when the file ends before them, and what reading raises."""
        end = offset + size
        while offset < end:
            if not self._start <= offset < self._stop:
                self._start, self._stop = offset, offset + self._read_into(self._buffer, offset)
                if self._stop == offset:
                    raise ShardError("size", f"{end} bytes or more", f"it ends after {offset}")
            block = self._buffer[offset - self._start : min(end, self._stop) - self._start]
            yield block
            offset += len(block)

    def read(self, offset: int, size: int) -> bytes:
        """A few bytes from anywhere, fewer at the end; where they are not at hand, no more than they are read."""
        if self._start <= offset and offset + size <= self._stop:
            return bytes(self._buffer[offset - self._start : offset - self._start + size])
        view = memoryview(bytearray(size))
        have = 0
        while have < size and (count := self._read_into(view[have:], offset + have)):
            have += count
        return bytes(view[:have])


def read_index(window: BufferedFile, base: int, size: int, sharding: ShardingSpec) -> ShardIndex:
    """The index of a shard, `size` bytes at `base`, its checksum compared. Raises Broken when it is none."""
    count = prod(sharding.counts)
    table_bytes, extra = 16 * count, INDEX_CODECS[sharding.index_codecs]
    if count > MAX_CHUNKS:
        raise ShardError("index", f"at most {MAX_CHUNKS} inner chunks", f"{count}")
    if size < table_bytes + extra:
        raise ShardError("size", f"an index of {table_bytes + extra} bytes", f"{size} bytes")
    low = 0 if sharding.index_at_start else size - table_bytes - extra
    data = window.read(base + low, table_bytes + extra)
    if len(data) < table_bytes + extra:
        raise ShardError("size", f"{size} bytes", "it ends before")
    if extra and (found := load_crc32c()(data[:table_bytes], 0)) != int.from_bytes(data[table_bytes:], "little"):
        raise ShardError("index", f"crc32c {data[table_bytes:][::-1].hex()}", f"crc32c {found:08x}")
    table = numbers("Q", data[:table_bytes])
    if sharding.big_endian == (sys.byteorder == "little"):
        table.byteswap()
    bounds = (table_bytes + extra, size) if sharding.index_at_start else (0, low)
    return ShardIndex(table[0::2], table[1::2], *bounds)


@cache
def load_crc32c() -> Callable[[bytes | memoryview, int], int]:
    """Return the function that continues a checksum over more bytes. Raises ToolMissing where there is no package."""
    try:
        from crc32c import crc32c
    except ImportError as error:
        hint = "pip install 'pitools-hpc[data]'"
        raise ToolMissing("checksums in Zarr chunks need the package crc32c", hint=hint) from error
    return crc32c
