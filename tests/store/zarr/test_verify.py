from __future__ import annotations

import os
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
from crc32c import crc32c
from msgspec import structs
from zarr.codecs import (
    BloscCodec,
    BytesCodec,
    Crc32cCodec,
    GzipCodec,
    ShardingCodec,
    TransposeCodec,
    ZstdCodec,
)

from pitools.core.errors import ToolMissing
from pitools.store.zarr import chunk_keys, frame_headers, shard_index, verify
from pitools.store.zarr.metadata import ArrayMetadata
from pitools.store.zarr.shard_index import NOT_STORED, DefectKind
from pitools.store.zarr.verify import VerifyResult

Write = Callable[..., tuple[ArrayMetadata, np.ndarray]]
V2 = {"zarr_format": 2}
SHARDED = {"shards": (16, 3)}
START = {"shards": {"shape": (16, 3), "index_location": "start"}}
CRC = [Crc32cCodec()]
BIG = [BytesCodec(endian="big"), Crc32cCodec()]
# What one file of each can prove: `checksum` any change, `structure` a cut or zeroed one.
LAYOUTS: dict[str, dict[str, dict[str, Any]]] = {
    "checksum": {
        "sharded": SHARDED | {"compressors": CRC},
        "sharded, index first": START | {"compressors": CRC},
        "sharded blosc": SHARDED | {"compressors": [BloscCodec(), Crc32cCodec()]},
        "sharded along two axes": {"shape": (9, 7, 2), "chunks": (2, 3, 2), "shards": (6, 6, 2), "compressors": CRC},
        "shards in shards": {
            "codecs": [
                ShardingCodec(
                    chunk_shape=(8, 3),
                    codecs=[ShardingCodec(chunk_shape=(2, 3), codecs=[BytesCodec(), *CRC], index_location="start")],
                )
            ]
        },
        "transposed shards": {
            "codecs": [TransposeCodec(order=(1, 0)), ShardingCodec(chunk_shape=(4, 8), codecs=[BytesCodec(), *CRC])],
            "shape": (10, 20),
            "chunks": (8, 8),
            "dtype": "int8",
        },
        "a shard within a checksum": {"codecs": [ShardingCodec(chunk_shape=(8, 3), codecs=[BytesCodec()]), *CRC]},
        "big-endian index": {
            "codecs": [ShardingCodec(chunk_shape=(8, 3), codecs=[BytesCodec(), *CRC], index_codecs=BIG)]
        },
        "index without checksum": {
            "codecs": [ShardingCodec(chunk_shape=(8, 3), codecs=[BytesCodec(), *CRC], index_codecs=[BytesCodec()])]
        },
        "not sharded": {"compressors": CRC},
        "not sharded zstd": {"compressors": [ZstdCodec(), Crc32cCodec()]},
        "v2": V2 | {"filters": [numcodecs.CRC32C()]},
    },
    "structure": {
        "sharded raw": SHARDED,
        "sharded raw, index first": START,
        "sharded blosc": SHARDED | {"compressors": BloscCodec()},
        "sharded zstd": SHARDED | {"compressors": ZstdCodec()},
        "sharded gzip": SHARDED | {"compressors": GzipCodec()},
        "raw": {},
        "blosc": {"compressors": BloscCodec()},
        "zstd": {"compressors": ZstdCodec()},
        "zstd with a checksum": {"compressors": ZstdCodec(checksum=True)},
        "gzip": {"compressors": GzipCodec()},
        "v2 raw": V2,
        "v2 blosc": V2 | {"compressors": numcodecs.Blosc()},
        "v2 zstd": V2 | {"compressors": numcodecs.Zstd()},
        "v2 gzip": V2 | {"compressors": numcodecs.GZip()},
        "v2 filtered blosc": V2 | {"filters": [numcodecs.Delta("i4")], "compressors": numcodecs.Blosc()},
    },
    "nothing": {
        "v2 lz4": V2 | {"compressors": numcodecs.LZ4()},
        "v2 checksum first": V2 | {"filters": [numcodecs.CRC32C(location="start")]},
    },
}
ALL = [(proof, name) for proof, layouts in LAYOUTS.items() for name in layouts]
SEEN = [(proof, name) for proof, name in ALL if proof != "nothing"]


def judge(array: ArrayMetadata, path: Path, coordinate: tuple[int, ...] = (), buffer: int = 1 << 16) -> VerifyResult:
    """Judge a real file as a reader would, through a buffer of this size."""
    with path.open("rb") as file:

        def read_into(view: memoryview, offset: int) -> int:
            return os.preadv(file.fileno(), [view], offset)

        place = coordinate or (0,) * len(array.shape)
        window = shard_index.BufferedFile(read_into, memoryview(bytearray(buffer)))
        return verify.verify_file(window, path.stat().st_size, array, place)


def problems(array: ArrayMetadata, path: Path, data: bytes) -> set[DefectKind]:
    """The problems of the file when its bytes are these."""
    path.write_bytes(data)
    return {flaw.kind for flaw in judge(array, path).defects}


def with_index(array: ArrayMetadata, data: bytes, change: Callable[[np.ndarray], None]) -> bytes:
    """The bytes of a shard, its index changed and the index's checksum made good."""
    sharding = array.codecs.sharding
    assert sharding is not None
    size = 16 * int(np.prod(sharding.counts))
    table = np.frombuffer(data[-size - 4 : -4], "<u8").reshape(-1, 2).copy()
    change(table)
    return data[: -size - 4] + table.tobytes() + crc32c(table.tobytes()).to_bytes(4, "little")


@pytest.mark.parametrize("buffer", [7, 1 << 16])
@pytest.mark.parametrize(("proof", "layout"), ALL)
def test_what_zarr_wrote_is_flawless(tmp_path: Path, write_array: Write, proof: str, layout: str, buffer: int) -> None:
    """Every file of zarr-python's passes, wherever the buffer cuts it, and is known to prove what it can."""
    array, _ = write_array(tmp_path, **LAYOUTS[proof][layout])
    assert verify.integrity_level(array.codecs) == proof
    for coordinate, key in zip(np.ndindex(array.grid), chunk_keys.chunk_keys(array), strict=True):
        assert judge(array, tmp_path / key, coordinate, buffer) == VerifyResult([], missing_chunks=0, unused_bytes=0)


@pytest.mark.parametrize("layout", LAYOUTS["checksum"])
def test_any_flipped_bit_is_seen(tmp_path: Path, write_array: Write, layout: str) -> None:
    """Where every byte is below a checksum, or an index entry that leads to one, no flipped bit passes."""
    array, _ = write_array(tmp_path, **LAYOUTS["checksum"][layout])
    path = tmp_path / next(chunk_keys.chunk_keys(array))
    data = path.read_bytes()
    assert problems(array, path, data) == set()
    for index in range(len(data)):
        assert problems(array, path, data[:index] + bytes([data[index] ^ 1 << index % 8]) + data[index + 1 :]), index


@pytest.mark.parametrize("layout", ["sharded raw", "sharded raw, index first", "sharded blosc", "sharded zstd"])
def test_any_flipped_bit_of_an_index_is_seen(tmp_path: Path, write_array: Write, layout: str) -> None:
    """The index has a checksum whatever the chunks have."""
    array, _ = write_array(tmp_path, **LAYOUTS["structure"][layout])
    path = tmp_path / next(chunk_keys.chunk_keys(array))
    data = path.read_bytes()
    for index in range(36) if "first" in layout else range(len(data) - 36, len(data)):
        for bit in range(8):
            assert problems(array, path, data[:index] + bytes([data[index] ^ 1 << bit]) + data[index + 1 :]) == {
                "index"
            }


@pytest.mark.parametrize(("proof", "layout"), SEEN)
def test_any_cut_is_seen(tmp_path: Path, write_array: Write, proof: str, layout: str) -> None:
    """A file that ends too early, by one byte or all, is seen; one that has a tail too, or the tail is counted."""
    array, _ = write_array(tmp_path, **LAYOUTS[proof][layout])
    path = tmp_path / next(chunk_keys.chunk_keys(array))
    data = path.read_bytes()
    for size in range(len(data)):
        assert problems(array, path, data[:size]), size
    path.write_bytes(data + b"tail")
    judged = judge(array, path)
    assert judged.defects or judged.unused_bytes == 4


@pytest.mark.parametrize(("proof", "layout"), [pair for pair in SEEN if pair[1] not in ("raw", "v2 raw")])
def test_a_zeroed_file_is_seen(tmp_path: Path, write_array: Write, proof: str, layout: str) -> None:
    """What a crash leaves, the right size and no content, is seen, but for raw values without a checksum."""
    array, _ = write_array(tmp_path, **LAYOUTS[proof][layout])
    path = tmp_path / next(chunk_keys.chunk_keys(array))
    assert problems(array, path, bytes(path.stat().st_size))


@pytest.mark.parametrize("layout", ["sharded blosc", "sharded zstd", "sharded gzip"])
def test_a_hole_in_a_shard_is_seen(tmp_path: Path, write_array: Write, layout: str) -> None:
    """One inner chunk of zeros in a shard whose index is whole is found, and named."""
    array, _ = write_array(tmp_path, **LAYOUTS["structure"][layout])
    path = tmp_path / next(chunk_keys.chunk_keys(array))
    data = path.read_bytes()
    first = int.from_bytes(data[-28:-20], "little")
    path.write_bytes(bytes(first) + data[first:])
    [flaw] = judge(array, path).defects
    assert (flaw.kind, flaw.got.split(":")[0]) == ("content", "inner chunk 0")


def test_many_blocks_of_zstd(tmp_path: Path, write_array: Write) -> None:
    """A Zstandard chunk of several blocks is walked to its end; a hole over a block's header is seen."""
    values = np.random.default_rng(0).integers(0, 1 << 30, (150_000, 3)).astype("int32")
    array, _ = write_array(tmp_path, values=values, chunks=(150_000, 3), compressors=ZstdCodec())
    path = tmp_path / next(chunk_keys.chunk_keys(array))
    data = path.read_bytes()
    assert len(data) > 10 << 17
    assert problems(array, path, data) == set()
    hole = bytes(200_000)
    assert problems(array, path, data[:300_000] + hole + data[500_000:]) == {"content"}
    # Empty blocks without end are not walked one by one.
    assert "no Zstandard block" in frame_headers.check_zstd(
        reads := Reads(data[:13] + bytes(1 << 20)), 13 + (1 << 20), None
    )
    assert reads.count < 20


class Reads:
    """Takes bytes, and counts how often."""

    def __init__(self, data: bytes) -> None:
        self.data, self.count = data, 0

    def __call__(self, at: int, size: int) -> bytes:
        self.count += 1
        return self.data[at : at + size]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda table: table.__setitem__((1, 0), table[0, 0]), id="two chunks at one place"),
        pytest.param(lambda table: table.__setitem__((1, 0), table[1, 0] - 1), id="overlap"),
        pytest.param(lambda table: table.__setitem__((1, 0), 1 << 20), id="past the end"),
        pytest.param(lambda table: table.__setitem__((1, 1), table[1, 1] + 1), id="into the index"),
        pytest.param(lambda table: table.__setitem__((0, 1), NOT_STORED - 1), id="past what 64 bits hold"),
        pytest.param(lambda table: table.__setitem__((0, 1), 0), id="no bytes"),
        pytest.param(lambda table: table.__setitem__((0, 0), NOT_STORED), id="half absent"),
    ],
)
def test_an_index_that_cannot_be(tmp_path: Path, write_array: Write, change: Callable[[np.ndarray], None]) -> None:
    """Ranges outside the shard or over each other are seen even where the index's checksum agrees."""
    array, _ = write_array(tmp_path, **SHARDED)
    path = tmp_path / next(chunk_keys.chunk_keys(array))
    assert "range" in problems(array, path, with_index(array, path.read_bytes(), change))


def test_swapped_files(tmp_path: Path, write_array: Write) -> None:
    """A file of another array is seen wherever its layout differs: another codec, chunk or item size."""
    one, _ = write_array(tmp_path / "one", **SHARDED)
    for name, settings in {
        "codec": SHARDED | {"compressors": BloscCodec()},
        "item": SHARDED | {"dtype": "int16"},
        "chunk": {"shards": (16, 3), "chunks": (4, 3)},
        "plain": {},
    }.items():
        other, _ = write_array(tmp_path / name, **settings)
        for array, data in ((one, tmp_path / name / "c/0/0"), (other, tmp_path / "one/c/0/0")):
            assert problems(array, tmp_path / "swapped", data.read_bytes()), (name, array)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_inner_chunks_that_are_absent(tmp_path: Path, write_array: Write, order: tuple[int, int]) -> None:
    """Inner chunks that read as the fill value are counted, those past the array's edge are not."""
    values = np.ones((22, 10), "uint8")
    values[4:8, 6:8] = 0
    values[20:22, 8:10] = 0
    inner = ShardingCodec(chunk_shape=(4, 2) if order == (0, 1) else (2, 4), codecs=[BytesCodec()])
    array, _ = write_array(tmp_path, values=values, chunks=(8, 8), codecs=[TransposeCodec(order=order), inner])
    listed = zip(np.ndindex(array.grid), chunk_keys.chunk_keys(array), strict=True)
    absent = {key: judge(array, tmp_path / key, place).missing_chunks for place, key in listed}
    assert absent == {"c/0/0": 1, "c/0/1": 0, "c/1/0": 0, "c/1/1": 0, "c/2/0": 0, "c/2/1": 1}


def test_unused_bytes_are_no_flaw_but_counted(tmp_path: Path, write_array: Write) -> None:
    """A shard may have gaps: another writer's are legal, and said."""
    array, _ = write_array(tmp_path, **SHARDED)
    path = tmp_path / next(chunk_keys.chunk_keys(array))
    data = path.read_bytes()

    def move(table: np.ndarray) -> None:
        table[1, 0] += 5

    path.write_bytes(with_index(array, data[:96] + b"?????" + data[96:], move))
    assert judge(array, path) == VerifyResult([], missing_chunks=0, unused_bytes=5)


@pytest.mark.parametrize(("proof", "layout"), [pair for pair in SEEN if pair[1] not in ("raw", "v2 raw")])
def test_a_file_that_shrinks_meanwhile(tmp_path: Path, write_array: Write, proof: str, layout: str) -> None:
    """A file shorter than it was when it was opened is a flaw, not a crash or an endless loop."""
    array, _ = write_array(tmp_path, **LAYOUTS[proof][layout])
    size = (tmp_path / next(chunk_keys.chunk_keys(array))).stat().st_size
    origin = (0,) * len(array.shape)
    assert verify.verify_file(
        shard_index.BufferedFile(lambda view, at: 0, memoryview(bytearray(64))), size, array, origin
    ).defects


def test_hostile_counts(tmp_path: Path, write_array: Write) -> None:
    """An index larger than any that is written is refused before it is read."""
    array, _ = write_array(tmp_path, **SHARDED)
    assert array.codecs.sharding is not None
    sharding = structs.replace(array.codecs.sharding, counts=(1 << 23, 1))
    array = structs.replace(array, codecs=structs.replace(array.codecs, sharding=sharding))
    path = tmp_path / next(chunk_keys.chunk_keys(array))
    os.truncate(path, 1 << 30)
    [flaw] = judge(array, path).defects
    assert (flaw.kind, flaw.got) == ("index", str(1 << 23))


def test_flaws_are_not_listed_without_end(tmp_path: Path, write_array: Write) -> None:
    """A shard whose every chunk is wrong has a few flaws named, not thousands."""
    array, _ = write_array(
        tmp_path,
        shape=(1024, 3),
        chunks=(1, 3),
        shards=(1024, 3),
        compressors=CRC,
        values=np.ones((1024, 3), "u1"),
    )
    path = tmp_path / next(chunk_keys.chunk_keys(array))
    data = path.read_bytes()
    path.write_bytes(b"\1" * 7168 + data[7168:])
    assert len(judge(array, path).defects) == verify.MAX_DEFECTS


def test_memory_is_bounded(tmp_path: Path, write_array: Write) -> None:
    """A shard of 32 MiB is judged, all its checksums compared, within its buffer."""
    values = np.zeros((32, 1 << 20), "uint8")
    values[:] = np.arange(32, dtype="uint8")[:, None] + 1
    array, _ = write_array(
        tmp_path,
        values=values,
        chunks=(1, 1 << 20),
        shards=(32, 1 << 20),
        compressors=CRC,
    )
    path = tmp_path / next(chunk_keys.chunk_keys(array))
    tracemalloc.start()
    try:
        assert judge(array, path, buffer=shard_index.BUFFER_BYTES) == VerifyResult([])
        assert tracemalloc.get_traced_memory()[1] < shard_index.BUFFER_BYTES + (1 << 18)
    finally:
        tracemalloc.stop()


def test_no_package_for_checksums(tmp_path: Path, write_array: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without crc32c a checksum is not passed over: the package to install is named."""
    array, _ = write_array(tmp_path, compressors=CRC)
    monkeypatch.setitem(sys.modules, "crc32c", None)
    shard_index.load_crc32c.cache_clear()
    with pytest.raises(ToolMissing) as caught:
        judge(array, tmp_path / "c/0/0")
    assert "pitools-hpc[data]" in caught.value.hint
    monkeypatch.undo()
    assert judge(array, tmp_path / "c/0/0") == VerifyResult([])
