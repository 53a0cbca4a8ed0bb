from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import numcodecs.blosc
import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st
from zarr.codecs import BloscCodec, Crc32cCodec, ZstdCodec

from pitools.dataset.ingest import chunking, shard_writer
from pitools.dataset.ingest.ingest import ingest
from pitools.store import digest


def written_by_zarr(folder: Path, known: chunking.ArraySpec) -> zarr.Array:
    item = known.itemsize
    compressors = {
        "raw": [],
        "zstd": [ZstdCodec(level=3)],
        "lz4": [BloscCodec(cname="lz4", clevel=5, shuffle="shuffle" if item > 1 else "noshuffle", typesize=item)],
    }
    return zarr.create_array(
        folder,
        shape=known.shape,
        dtype=known.dtype,
        chunks=(known.chunk, *known.shape[1:]),
        shards=(known.shard, *known.shape[1:]),
        compressors=[*compressors[known.codec], Crc32cCodec()],
        fill_value=0,
        config={"write_empty_chunks": True},
    )


def test_large_raw_chunks_are_aligned(tmp_path) -> None:
    """Each begins at a multiple of 64 bytes, after zeros, whatever the buffer held, and zarr-python reads them."""
    values = np.random.default_rng(0).integers(0, 255, (50, 96, 96, 3), np.uint8)
    spec = chunking.choose_array_spec(values.shape, "uint8", "raw")
    buffer = shard_writer.PageBuffer()
    buffer.view(16 << 20)[:] = b"x" * (16 << 20)
    data = shard_writer.encode_shard([values], spec, buffer)
    count = spec.shard // spec.chunk
    table = np.frombuffer(data[-16 * count - 4 : -4], "<u8").reshape(count, 2)
    assert (table[:, 0] % 64 == 0).all()
    ends = table[:-1].sum(axis=1)
    for end, start in zip(ends.tolist(), table[1:, 0].tolist(), strict=True):
        assert data[end:start].tobytes() == bytes(60)
    path = tmp_path / "a" / chunking.shard_path("", 0, 4).lstrip("/")
    path.parent.mkdir(parents=True)
    shard_writer.write_durable(path, data, direct=True)
    (tmp_path / "a/zarr.json").write_bytes(chunking.encode(chunking.array_metadata(spec)))
    np.testing.assert_array_equal(zarr.open_array(tmp_path / "a", mode="r")[:], values)


@pytest.mark.parametrize("codec", chunking.CODECS)
@pytest.mark.parametrize(
    ("dtype", "row"), [("uint8", (9, 7, 3)), ("float32", (7,)), ("float16", ()), ("bool", (2,)), ("complex64", (1,))]
)
def test_as_zarr_writes_it(tmp_path, codec, dtype, row) -> None:
    """The metadata say what zarr-python's say, and each shard, the short last one too, is byte for byte its file."""
    values = np.random.default_rng(0).integers(0, 5, (1000, *row)).astype(dtype)
    with patch.multiple(chunking, CHUNK_BYTES=1500, SHARD_BYTES=7000):
        spec = chunking.choose_array_spec(values.shape, dtype, codec)
    assert 1000 % spec.shard
    theirs = written_by_zarr(tmp_path / "x" / "a", spec)
    theirs[:] = values
    expected = json.loads((tmp_path / "x/a/zarr.json").read_text())
    assert expected.pop("storage_transformers") == []
    assert json.loads(chunking.encode(chunking.array_metadata(spec))) == expected
    buffer = shard_writer.PageBuffer()
    for index in range(spec.shards):
        block = values[index * spec.shard : (index + 1) * spec.shard]
        path = tmp_path / "y" / chunking.shard_path("a", index, values.ndim)
        path.parent.mkdir(parents=True)
        data = shard_writer.encode_shard([block[: spec.chunk], block[spec.chunk :]], spec, buffer)
        text = shard_writer.write_durable(path, data, direct=True)
        assert path.read_bytes() == (tmp_path / "x" / path.relative_to(tmp_path / "y")).read_bytes()
        assert digest.digest_file(path) == (len(data), text)
    (tmp_path / "y/a/zarr.json").write_bytes(chunking.encode(chunking.array_metadata(spec)))
    np.testing.assert_array_equal(zarr.open_array(tmp_path / "y" / "a", mode="r")[:], values)


@pytest.mark.parametrize("codec", chunking.CODECS)
def test_little_endian_anywhere(codec) -> None:
    """Values of the other byte order, as a big-endian machine has them, give the same bytes."""
    values = np.random.default_rng(0).normal(size=(1000, 7)).astype("<f4")
    spec = chunking.choose_array_spec(values.shape, "float32", codec)
    first, two = (
        bytes(shard_writer.encode_shard([block], spec, shard_writer.PageBuffer()))
        for block in (values, values.astype(">f4"))
    )
    assert first == two


def test_large_chunks_are_deterministic(monkeypatch) -> None:
    """Blosc splits a large chunk in blocks; encoded again, alone and beside others, the bytes are the same."""
    monkeypatch.setattr(numcodecs.blosc, "use_threads", None)  # as numcodecs has it where zarr is not imported
    block = np.random.default_rng(0).integers(0, 4, (8, 360, 360, 3), np.uint8)
    chunk_grid = chunking.ArraySpec(shape=block.shape, dtype="uint8", chunk=8, shard=8, codec="lz4")

    def one(_: int) -> bytes:
        return bytes(shard_writer.encode_shard([block], chunk_grid, shard_writer.PageBuffer()))

    with ThreadPoolExecutor(2) as pool:
        assert len({*pool.map(one, range(6)), one(0)}) == 1


@pytest.mark.parametrize("size", [0, 1, 4096, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, (3 << 20) + 4095])
@pytest.mark.parametrize("where", ["tmp_path", "memory"])
def test_direct_writes(tmp_path, size, where) -> None:
    """Past the page cache or through it, on a disk or in memory, a file has its bytes, no more, and their digest."""
    path = tmp_path / "a" if where == "tmp_path" else Path("/dev/shm") / f"pit-test-{os.getpid()}"
    buffer = shard_writer.PageBuffer()
    view = buffer.view(size + 100)[:size]
    view[:] = np.random.default_rng(0).bytes(size)
    try:
        assert shard_writer.write_durable(path, view, direct=True) == digest.digest_file(path)[1]
        assert path.read_bytes() == view
        with pytest.raises(FileExistsError):
            shard_writer.write_durable(path, view)
    finally:
        path.unlink()


@given(
    steps=st.integers(1, 10**7),
    row=st.lists(st.integers(1, 600), max_size=3),
    dtype=st.sampled_from(["u1", "f4", "f8"]),
)
def test_grid(steps, row, dtype) -> None:
    """Chunks are powers of two within 1 MiB and the step limit, shards whole chunks within 64 MiB, or one row."""
    spec = chunking.choose_array_spec((steps, *row), dtype, "raw")
    row_bytes = spec.itemsize * int(np.prod(row))
    assert spec.chunk & (spec.chunk - 1) == 0
    assert spec.shard % spec.chunk == 0
    assert spec.chunk <= (32 if len(row) >= 2 else 256)
    assert spec.chunk == 1 or spec.chunk * row_bytes <= 1 << 20
    assert spec.shard == spec.chunk or spec.shard * row_bytes <= 64 << 20
    assert (spec.shards - 1) * spec.shard < steps <= spec.shards * spec.shard < steps + spec.shard


def test_grid_of_usual_cameras() -> None:
    """Frames of 64, 96 and 224 pixels and of VGA lie in chunks of a quarter to one MiB."""
    sizes = {(64, 64, 3): 32, (96, 96, 3): 16, (224, 224, 3): 2, (480, 640, 3): 1}
    assert {row: chunking.choose_array_spec((10**6, *row), "uint8", "lz4").chunk for row in sizes} == sizes
    assert all(1 << 18 <= chunk * np.prod(row) <= 1 << 20 for row, chunk in sizes.items())


@pytest.mark.filterwarnings("ignore:Object at manifest.json")  # zarr lists it, and says that it is not its own
@pytest.mark.parametrize("codec", chunking.CODECS)
def test_codecs_are_core_and_checked(robomimic, tmp_path, codec) -> None:
    """Every array is sharded, its inner codecs have core Zarr v3 names, and the last of them is crc32c."""
    group = zarr.open_group(ingest([robomimic(3)], root=tmp_path / "root", name="x", codec=codec).path, mode="r")
    for _, array in group.members(max_depth=None):
        if isinstance(array, zarr.Array):
            (sharding,) = array.metadata.to_dict()["codecs"]
            assert sharding["name"] == "sharding_indexed"
            names = [inner["name"] for inner in sharding["configuration"]["codecs"]]
            assert set(names) <= {"bytes", "blosc", "zstd", "crc32c"}
            assert names[-1] == "crc32c"


def test_zeros_are_written(robomimic, tmp_path) -> None:
    """An array of zeros has its shard file like any other, so that a missing file always means loss."""
    folder = Path(ingest([robomimic(3)], root=tmp_path / "root", name="x").path)
    assert not zarr.open_array(folder / "reward", mode="r")[:].any()
    assert (folder / "reward/c/0").is_file()


@pytest.mark.parametrize("codec", chunking.CODECS)
def test_one_flipped_bit(robomimic, tmp_path, codec) -> None:
    """zarr refuses to read a shard with one bit flipped, wherever it is: payload, checksum or index."""
    folder = Path(ingest([robomimic(40, row=(4, 4, 3))], root=tmp_path / "root", name="x", codec=codec).path)
    path = folder / "obs/eye_image/c/0/0/0/0"
    data = path.read_bytes()
    array = zarr.open_array(folder / "obs/eye_image", mode="r")
    for position in np.random.default_rng(0).integers(0, len(data), 40):
        path.write_bytes(data[:position] + bytes([data[position] ^ (1 << position % 8)]) + data[position + 1 :])
        with pytest.raises((ValueError, RuntimeError)):
            array[:]
    path.write_bytes(data)
    array[:]
