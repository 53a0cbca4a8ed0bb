"""Read the index of a shard through a buffer, and define the defects of a file.

    shard: inner chunk │ inner chunk │ … │ index: (offset, bytes) of each as uint64 │ crc32c      (or the index first)

`verify.py` uses the index to verify a whole file.
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
    """A defect of a file.

    kind: `size` (truncated or too long), `index` (unreadable), `range` (an inner chunk outside the shard or overlapping
    another), `checksum`, `content` (not the format of the array's codecs).
    """

    kind: DefectKind
    expected: str
    got: str


class ShardIndex(NamedTuple):
    """A shard's index. Inner chunk i, in C order, is bytes [offsets[i], offsets[i] + sizes[i]) of the shard, or absent.

    first, last: range of the shard's bytes without the index.
    """

    offsets: numbers[int]
    sizes: numbers[int]
    first: int
    last: int

    def stored(self) -> list[int]:
        """Return the stored inner chunks, ordered by offset."""
        size = (
            i for i, pair in enumerate(zip(self.offsets, self.sizes, strict=True)) if pair != (NOT_STORED, NOT_STORED)
        )
        return sorted(size, key=self.offsets.__getitem__)


class ShardError(Exception):
    """A defect that prevents further verification of a file or inner chunk."""

    def __init__(self, problem: DefectKind, expected: str, got: str) -> None:
        super().__init__(got)
        self.flaw = Defect(kind=problem, expected=expected, got=got)


class BufferedFile:
    """A file read in order through one buffer."""

    def __init__(self, read_into: ReadInto, buffer: memoryview, filled: int = 0) -> None:
        """read_into: fills a view from an offset. filled: the count of the file's first bytes already in the buffer."""
        self._read_into, self._buffer = read_into, buffer
        self._start, self._stop = 0, filled

    @classmethod
    def over(cls, content: bytes | memoryview) -> BufferedFile:
        """Return a BufferedFile of content in memory."""
        return cls(lambda *_: 0, memoryview(content), len(content))

    def blocks(self, offset: int, size: int) -> Iterator[memoryview]:
        """Yield a range of bytes in blocks. Raises ShardError if the file is shorter, and the errors of reading."""
        end = offset + size
        while offset < end:
            if not self._start <= offset < self._stop:
                self._start, self._stop = offset, offset + self._read_into(self._buffer, offset)
                if self._stop == offset:
                    raise ShardError("size", f"{end} bytes or more", f"{offset} bytes")
            block = self._buffer[offset - self._start : min(end, self._stop) - self._start]
            yield block
            offset += len(block)

    def read(self, offset: int, size: int) -> bytes:
        """Return a small range of bytes, fewer at the end of the file, without refilling the buffer."""
        if self._start <= offset and offset + size <= self._stop:
            return bytes(self._buffer[offset - self._start : offset - self._start + size])
        view = memoryview(bytearray(size))
        have = 0
        while have < size and (count := self._read_into(view[have:], offset + have)):
            have += count
        return bytes(view[:have])


def read_index(window: BufferedFile, base: int, size: int, sharding: ShardingSpec) -> ShardIndex:
    """Read the index of a shard of `size` bytes at `base`, and compare its checksum. Raises ShardError."""
    count = prod(sharding.counts)
    table_bytes, extra = 16 * count, INDEX_CODECS[sharding.index_codecs]
    if count > MAX_CHUNKS:
        raise ShardError("index", f"at most {MAX_CHUNKS} inner chunks", f"{count}")
    if size < table_bytes + extra:
        raise ShardError("size", f"an index of {table_bytes + extra} bytes", f"{size} bytes")
    low = 0 if sharding.index_at_start else size - table_bytes - extra
    data = window.read(base + low, table_bytes + extra)
    if len(data) < table_bytes + extra:
        raise ShardError("size", f"{base + size} bytes or more", f"{base + low + len(data)} bytes")
    if extra and (checksum := load_crc32c()(data[:table_bytes], 0)) != int.from_bytes(data[table_bytes:], "little"):
        raise ShardError("index", f"crc32c {data[table_bytes:][::-1].hex()}", f"crc32c {checksum:08x}")
    table = numbers("Q", data[:table_bytes])
    if sharding.big_endian == (sys.byteorder == "little"):
        table.byteswap()
    bounds = (table_bytes + extra, size) if sharding.index_at_start else (0, low)
    return ShardIndex(table[0::2], table[1::2], *bounds)


@cache
def load_crc32c() -> Callable[[bytes | memoryview, int], int]:
    """Return the CRC-32C function of (bytes, previous checksum). Raises ToolMissing without the package crc32c."""
    try:
        from crc32c import crc32c
    except ImportError as error:
        hint = "pip install 'pitools-hpc[data]'"
        raise ToolMissing("crc32c: package missing (required for checksums in Zarr chunks)", hint=hint) from error
    return crc32c
