"""Judge one file of a Zarr array without decoding it: its index, its ranges, and every checksum there is in it.

    shard: inner chunk │ inner chunk │ … │ index: (offset, bytes) of each as uint64 │ crc32c      (or the index first)
    inner chunk, or a file that is no shard: encoded bytes │ crc32c where its codecs end in one

What can be proven depends on the codecs (`proof`): a checksum shows any change, the structure of the bytes shows that
they were cut short or zeroed, and of some nothing is known.
"""

from __future__ import annotations

import sys
from array import array as numbers
from collections.abc import Callable, Iterator
from functools import cache
from itertools import accumulate, islice, product
from math import prod
from typing import Literal, NamedTuple

import msgspec
from msgspec import structs

from pitools.core.errors import ToolMissing
from pitools.store.zarr import frame_headers
from pitools.store.zarr.metadata import SHARDING, Array, Codecs, Coordinate, Sharding

ABSENT = 2**64 - 1  # offset and bytes of an inner chunk that is not stored: it reads as the fill value
MAX_CHUNKS = 1 << 22  # inner chunks of a shard, whose index is then 64 MiB
MAX_FLAWS = 16  # of one file: it is to be replaced as a whole anyhow
BUFFER = 1 << 20

ReadInto = Callable[[memoryview, int], int]  # fill a view from an offset; the count, 0 at the end
Problem = Literal["size", "index", "range", "checksum", "content"]
_FRAMES = {"blosc": frame_headers.blosc, "gzip": frame_headers.gzip, "zstd": frame_headers.zstd}
_SAME_SIZE = {"bytes", "transpose"}  # codecs that keep the number of bytes
_INDEX_CODECS = {("bytes",): 0, ("bytes", "crc32c"): 4}


class Flaw(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong with a file.

    problem: `size` (cut short or too long), `index` (unreadable), `range` (an inner chunk outside the shard, or over
    another), `checksum`, `content` (the bytes are not what the array's codecs write).
    """

    problem: Problem
    expected: str
    got: str


class Judgement(NamedTuple):
    """What is known of a file. absent: inner chunks inside the array that are not stored. unused: bytes of a shard
    that belong to no chunk: legal, but no writer leaves them in a file written at once.
    """

    flaws: list[Flaw]
    absent: int = 0
    unused: int = 0


class Index(NamedTuple):
    """A shard's index. Inner chunk i, in C order, is bytes [offsets[i], offsets[i] + sizes[i]) of the shard, or absent.

    low, high: the bytes of the shard that are not the index.
    """

    offsets: numbers[int]
    sizes: numbers[int]
    low: int
    high: int

    def stored(self) -> list[int]:
        """The inner chunks that are stored, in the order in which they lie."""
        known = (i for i, pair in enumerate(zip(self.offsets, self.sizes, strict=True)) if pair != (ABSENT, ABSENT))
        return sorted(known, key=self.offsets.__getitem__)


class Broken(Exception):
    """What is looked at has this flaw, and no more can be said of it."""

    def __init__(self, problem: Problem, expected: str, got: str) -> None:
        super().__init__(got)
        self.flaw = Flaw(problem=problem, expected=expected, got=got)


class Window:
    """A file seen through one buffer, such as of BUFFER bytes, read in order and not twice."""

    def __init__(self, read_into: ReadInto, buffer: memoryview, filled: int = 0) -> None:
        """filled: how many of the file's first bytes the buffer holds already."""
        self._read_into, self._buffer = read_into, buffer
        self._start, self._stop = 0, filled

    @classmethod
    def over(cls, content: bytes | memoryview) -> Window:
        """The window of a file that is in memory."""
        return cls(lambda *_: 0, memoryview(content), len(content))

    def blocks(self, offset: int, size: int) -> Iterator[memoryview]:
        """These bytes, in parts. Raises Broken when the file ends before them, and what reading raises."""
        end = offset + size
        while offset < end:
            if not self._start <= offset < self._stop:
                self._start, self._stop = offset, offset + self._read_into(self._buffer, offset)
                if self._stop == offset:
                    raise Broken("size", f"{end} bytes or more", f"it ends after {offset}")
            block = self._buffer[offset - self._start : min(end, self._stop) - self._start]
            yield block
            offset += len(block)

    def take(self, offset: int, size: int) -> bytes:
        """A few bytes from anywhere, fewer at the end; where they are not at hand, no more than they are read."""
        if self._start <= offset and offset + size <= self._stop:
            return bytes(self._buffer[offset - self._start : offset - self._start + size])
        view = memoryview(bytearray(size))
        have = 0
        while have < size and (count := self._read_into(view[have:], offset + have)):
            have += count
        return bytes(view[:have])


def proof(codecs: Codecs) -> Literal["checksum", "structure", "nothing"]:
    """What a judgement of bytes of these codecs is worth: sees any change, sees them cut or zeroed, or sees nothing."""
    names = list(codecs.names)
    if names[-1:] == ["crc32c"]:
        return "checksum"
    if sharding := _sharding(names, codecs):
        return proof(sharding.inner)
    fixed = codecs.raw_bytes is not None and _SAME_SIZE.issuperset(names)
    return "structure" if fixed or not _FRAMES.keys().isdisjoint(names[-1:]) else "nothing"


def judge(window: Window, size: int, array: Array, coordinate: Coordinate) -> Judgement:
    """Judge the file of one chunk (or shard) of an array.

    Raises ToolMissing when there is a checksum to compare and no package to compute it, and what reading raises.
    """
    index = None
    sharding = _sharding(list(array.codecs.names), array.codecs)
    try:
        if sharding:
            index = read_index(window, 0, size, sharding)
            flaws = list(islice(_judge_inner(window, 0, index, sharding.inner), MAX_FLAWS))
        else:
            flaws = list(_judge(window, 0, size, array.codecs))
    except Broken as broken:
        return Judgement([broken.flaw])
    if flaws or not sharding or not index:
        return Judgement(flaws)
    unused = index.high - index.low - sum(index.sizes[i] for i in index.stored())
    return Judgement(flaws, absent=_absent(index, array, sharding, coordinate), unused=unused)


def _judge(window: Window, offset: int, size: int, codecs: Codecs) -> Iterator[Flaw]:
    """Judge bytes of these codecs, whatever they are."""
    names = list(codecs.names)
    try:
        while names and names[-1] == "crc32c":
            names.pop()
            size -= 4
            _compare_checksum(window, offset, size)
        if sharding := _sharding(names, codecs):
            index = read_index(window, offset, size, sharding)
            yield from _judge_inner(window, offset, index, sharding.inner)
        else:
            _compare_structure(window, offset, size, names, codecs.raw_bytes)
    except Broken as broken:
        yield broken.flaw


def _sharding(names: list[str], codecs: Codecs) -> Sharding | None:
    """How bytes after these codecs are cut, where they are a shard with an index that is understood."""
    known = codecs.sharding if names[-1:] == [SHARDING] else None
    return known if known and known.index_codecs in _INDEX_CODECS else None


def _compare_checksum(window: Window, offset: int, size: int) -> None:
    if size < 0:
        raise Broken("size", "a checksum of 4 bytes", f"{size + 4} bytes")
    crc32c, found = _crc32c(), 0
    for block in window.blocks(offset, size):
        found = crc32c(block, found)
    stored = window.take(offset + size, 4)
    if stored != found.to_bytes(4, "little"):
        raise Broken("checksum", f"crc32c {stored[::-1].hex()}", f"crc32c {found:08x}")


def _compare_structure(window: Window, offset: int, size: int, names: list[str], raw_bytes: int | None) -> None:
    plain = _SAME_SIZE.issuperset(names)
    if plain and raw_bytes is not None and size != raw_bytes:
        raise Broken("size", f"{raw_bytes} bytes", f"{size} bytes")
    if names and names[-1] in _FRAMES:
        content = raw_bytes if _SAME_SIZE.issuperset(names[:-1]) else None

        def take(at: int, count: int) -> bytes:
            count = max(0, min(count, size - at))
            data = window.take(offset + at, count)
            if len(data) < count:
                raise Broken("size", f"{offset + size} bytes or more", "it ends before")
            return data

        if wrong := _FRAMES[names[-1]](take, size, content):
            raise Broken("content", f"a whole {names[-1]} buffer", wrong)


def _judge_inner(window: Window, base: int, index: Index, inner: Codecs) -> Iterator[Flaw]:
    end = index.low
    for i in index.stored():
        offset, length = index.offsets[i], index.sizes[i]
        got = f"inner chunk {i}: bytes {offset} to {offset + length}"
        if length == 0 or offset < index.low or offset + length > index.high:
            yield Flaw(problem="range", expected=f"inside bytes {index.low} to {index.high}", got=got)
        elif offset < end:
            yield Flaw(problem="range", expected=f"past byte {end}, where another one ends", got=got)
        else:
            for flaw in _judge(window, base + offset, length, inner):
                yield structs.replace(flaw, got=f"inner chunk {i}: {flaw.got}")
        end = max(end, offset + length)


def read_index(window: Window, base: int, size: int, sharding: Sharding) -> Index:
    """The index of a shard, `size` bytes at `base`, its checksum compared. Raises Broken when it is none."""
    count = prod(sharding.counts)
    table_bytes, extra = 16 * count, _INDEX_CODECS[sharding.index_codecs]
    if count > MAX_CHUNKS:
        raise Broken("index", f"at most {MAX_CHUNKS} inner chunks", f"{count}")
    if size < table_bytes + extra:
        raise Broken("size", f"an index of {table_bytes + extra} bytes", f"{size} bytes")
    low = 0 if sharding.index_at_start else size - table_bytes - extra
    data = window.take(base + low, table_bytes + extra)
    if len(data) < table_bytes + extra:
        raise Broken("size", f"{size} bytes", "it ends before")
    if extra and (found := _crc32c()(data[:table_bytes], 0)) != int.from_bytes(data[table_bytes:], "little"):
        raise Broken("index", f"crc32c {data[table_bytes:][::-1].hex()}", f"crc32c {found:08x}")
    table = numbers("Q", data[:table_bytes])
    if sharding.big_endian == (sys.byteorder == "little"):
        table.byteswap()
    bounds = (table_bytes + extra, size) if sharding.index_at_start else (0, low)
    return Index(table[0::2], table[1::2], *bounds)


def _absent(index: Index, array: Array, sharding: Sharding, coordinate: Coordinate) -> int:
    """How many inner chunks that are inside the array are not stored; those past its edge never are."""
    if index.offsets.count(ABSENT) == 0:
        return 0
    inside = []
    for axis, count in zip(sharding.axes, sharding.counts, strict=True):
        chunk = array.chunk[axis]
        left = array.shape[axis] - coordinate[axis] * chunk
        inside.append(range(min(count, -(-left * count // chunk))))
    strides = [*accumulate(reversed(sharding.counts[1:]), int.__mul__, initial=1)][::-1]
    places = (sum(map(int.__mul__, place, strides)) for place in product(*inside))
    return sum(index.offsets[place] == ABSENT for place in places)


@cache
def _crc32c() -> Callable[[bytes | memoryview, int], int]:
    try:
        from crc32c import crc32c
    except ImportError as error:
        hint = "pip install 'pitools-hpc[data]'"
        raise ToolMissing("checksums in Zarr chunks need the package crc32c", hint=hint) from error
    return crc32c
