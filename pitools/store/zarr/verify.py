"""Judge one file of a Zarr array without decoding it: its index, its ranges, and every checksum there is in it.

    shard: inner chunks, and the index of them that `shard_index.py` reads
    inner chunk, or a file that is no shard: encoded bytes │ crc32c where its codecs end in one

What can be proven depends on the codecs (`proof`): a checksum shows any change, the structure of the bytes shows that
they were cut short or zeroed, and of some nothing is known.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, islice, product
from typing import Literal, NamedTuple

from msgspec import structs

from pitools.store.zarr import frame_headers
from pitools.store.zarr.metadata import SHARDING, Array, Codecs, Coordinate, Sharding
from pitools.store.zarr.shard_index import ABSENT, INDEX_CODECS, Broken, Flaw, Index, Window, load_crc32c, read_index

MAX_FLAWS = 16  # of one file: it is to be replaced as a whole anyhow
_FRAMES = {"blosc": frame_headers.blosc, "gzip": frame_headers.gzip, "zstd": frame_headers.zstd}
_SAME_SIZE = {"bytes", "transpose"}  # codecs that keep the number of bytes


class Judgement(NamedTuple):
    """What is known of a file. absent: inner chunks inside the array that are not stored. unused: bytes of a shard
    that belong to no chunk: legal, but no writer leaves them in a file written at once.
    """

    flaws: list[Flaw]
    absent: int = 0
    unused: int = 0


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
    return known if known and known.index_codecs in INDEX_CODECS else None


def _compare_checksum(window: Window, offset: int, size: int) -> None:
    if size < 0:
        raise Broken("size", "a checksum of 4 bytes", f"{size + 4} bytes")
    crc32c, found = load_crc32c(), 0
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
