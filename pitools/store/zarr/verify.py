"""Verify one file of a Zarr array without decoding it: its index, its ranges, and all of its checksums.

    shard: inner chunks, and their index, which `shard_index.py` reads
    inner chunk, or a file that is not a shard: encoded bytes │ crc32c if it is the last codec

The codecs determine what can be detected (`integrity_level`): a checksum detects any change, the structure of the bytes
detects truncation and zeros, and some codecs allow no check.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, islice, product
from typing import Literal, NamedTuple

from msgspec import structs

from pitools.store.zarr import frame_headers
from pitools.store.zarr.metadata import SHARDING, ArrayMetadata, CodecChain, Coordinate, ShardingSpec
from pitools.store.zarr.shard_index import (
    INDEX_CODECS,
    NOT_STORED,
    BufferedFile,
    Defect,
    ShardError,
    ShardIndex,
    load_crc32c,
    read_index,
)

MAX_DEFECTS = 16  # reported per file, since repair replaces the whole file
_FRAMES = {"blosc": frame_headers.check_blosc, "gzip": frame_headers.check_gzip, "zstd": frame_headers.check_zstd}
_SAME_SIZE = {"bytes", "transpose"}  # codecs that keep the number of bytes


class VerifyResult(NamedTuple):
    """Result for one file. missing_chunks: inner chunks inside the array that are not stored. unused_bytes: bytes of a
    shard that belong to no chunk; legal, but a writer that writes a shard in one pass leaves none.
    """

    defects: list[Defect]
    missing_chunks: int = 0
    unused_bytes: int = 0


def integrity_level(codecs: CodecChain) -> Literal["checksum", "structure", "nothing"]:
    """Return what verification of these codecs detects: any change, truncation and zeros, or nothing."""
    names = list(codecs.names)
    if names[-1:] == ["crc32c"]:
        return "checksum"
    if sharding := _sharding(names, codecs):
        return integrity_level(sharding.inner)
    fixed = codecs.raw_bytes is not None and _SAME_SIZE.issuperset(names)
    return "structure" if fixed or not _FRAMES.keys().isdisjoint(names[-1:]) else "nothing"


def verify_file(window: BufferedFile, size: int, array: ArrayMetadata, coordinate: Coordinate) -> VerifyResult:
    """Verify the file of one chunk or shard of an array.

    Raises ToolMissing if there is a checksum but no package to compute it, and the errors of reading.
    """
    index = None
    sharding = _sharding(list(array.codecs.names), array.codecs)
    try:
        if sharding:
            index = read_index(window, 0, size, sharding)
            flaws = list(islice(_verify_inner(window, 0, index, sharding.inner), MAX_DEFECTS))
        else:
            flaws = list(_verify_bytes(window, 0, size, array.codecs))
    except ShardError as broken:
        return VerifyResult([broken.flaw])
    if flaws or not sharding or not index:
        return VerifyResult(flaws)
    unused = index.last - index.first - sum(index.sizes[i] for i in index.stored())
    return VerifyResult(flaws, missing_chunks=_count_missing(index, array, sharding, coordinate), unused_bytes=unused)


def _verify_bytes(window: BufferedFile, offset: int, size: int, codecs: CodecChain) -> Iterator[Defect]:
    """Verify bytes encoded by these codecs."""
    names = list(codecs.names)
    try:
        while names and names[-1] == "crc32c":
            names.pop()
            size -= 4
            _compare_checksum(window, offset, size)
        if sharding := _sharding(names, codecs):
            index = read_index(window, offset, size, sharding)
            yield from _verify_inner(window, offset, index, sharding.inner)
        else:
            _compare_structure(window, offset, size, names, codecs.raw_bytes)
    except ShardError as broken:
        yield broken.flaw


def _sharding(names: list[str], codecs: CodecChain) -> ShardingSpec | None:
    """Return the sharding if the last of these codecs is one with a supported index; else None."""
    sharding = codecs.sharding if names[-1:] == [SHARDING] else None
    return sharding if sharding and sharding.index_codecs in INDEX_CODECS else None


def _compare_checksum(window: BufferedFile, offset: int, size: int) -> None:
    if size < 0:
        raise ShardError("size", "4 bytes of checksum", f"{size + 4} bytes")
    crc32c, checksum = load_crc32c(), 0
    for block in window.blocks(offset, size):
        checksum = crc32c(block, checksum)
    stored = window.read(offset + size, 4)
    if stored != checksum.to_bytes(4, "little"):
        raise ShardError("checksum", f"crc32c {stored[::-1].hex()}", f"crc32c {checksum:08x}")


def _compare_structure(window: BufferedFile, offset: int, size: int, names: list[str], raw_bytes: int | None) -> None:
    plain = _SAME_SIZE.issuperset(names)
    if plain and raw_bytes is not None and size != raw_bytes:
        raise ShardError("size", f"{raw_bytes} bytes", f"{size} bytes")
    if names and names[-1] in _FRAMES:
        content = raw_bytes if _SAME_SIZE.issuperset(names[:-1]) else None

        def take(at: int, count: int) -> bytes:
            count = max(0, min(count, size - at))
            data = window.read(offset + at, count)
            if len(data) < count:
                raise ShardError("size", f"{offset + size} bytes or more", f"{offset + at + len(data)} bytes")
            return data

        if wrong := _FRAMES[names[-1]](take, size, content):
            raise ShardError("content", f"a complete {names[-1]} buffer", wrong)


def _verify_inner(window: BufferedFile, base: int, index: ShardIndex, inner: CodecChain) -> Iterator[Defect]:
    end = index.first
    for i in index.stored():
        offset, length = index.offsets[i], index.sizes[i]
        got = f"inner chunk {i}: bytes {offset} to {offset + length}"
        if length == 0 or offset < index.first or offset + length > index.last:
            yield Defect(kind="range", expected=f"inside bytes {index.first} to {index.last}", got=got)
        elif offset < end:
            yield Defect(kind="range", expected=f"no overlap with the chunk up to byte {end}", got=got)
        else:
            for flaw in _verify_bytes(window, base + offset, length, inner):
                yield structs.replace(flaw, got=f"inner chunk {i}: {flaw.got}")
        end = max(end, offset + length)


def _count_missing(index: ShardIndex, array: ArrayMetadata, sharding: ShardingSpec, coordinate: Coordinate) -> int:
    """Count the inner chunks inside the array that are not stored; those beyond its edge never are."""
    if index.offsets.count(NOT_STORED) == 0:
        return 0
    inside = []
    for axis, count in zip(sharding.axes, sharding.counts, strict=True):
        chunk = array.file_chunk[axis]
        remaining = array.shape[axis] - coordinate[axis] * chunk
        inside.append(range(min(count, -(-remaining * count // chunk))))
    strides = [*accumulate(reversed(sharding.counts[1:]), int.__mul__, initial=1)][::-1]
    places = (sum(map(int.__mul__, place, strides)) for place in product(*inside))
    return sum(index.offsets[place] == NOT_STORED for place in places)
