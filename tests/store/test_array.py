from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from zarr.codecs import BloscCodec, Crc32cCodec, GzipCodec, ZstdCodec

from pitools.core.errors import DataError
from pitools.store import zarr as metadata
from pitools.store.array import Absent, ArrayReader, Check
from pitools.store.layout import Layout, layout

CODECS: dict[str, list[Any]] = {
    "raw": [],
    "raw, crc": [Crc32cCodec()],
    "blosc, crc": [BloscCodec(cname="lz4"), Crc32cCodec()],
    "zstd": [ZstdCodec(level=1)],
    "zstd, crc": [ZstdCodec(level=1), Crc32cCodec()],
}


def layout_of(folder: Path, name: str = "x") -> Layout | None:
    found = metadata.parse(name, (folder / name / "zarr.json").read_bytes(), "zarr.json")
    assert found
    return layout(found)


def reader_of(folder: Path, *, check: Check = "first") -> ArrayReader:
    known = layout_of(folder)
    assert known
    return ArrayReader(folder, "x", known, check=check)


def write(
    folder: Path, data: NDArray[Any], *, chunk: int, shard: int = 0, codec: str = "raw, crc", **more: Any
) -> Path:  # fmt: skip
    """An array `x` of chunks, perhaps in shards, as zarr-python writes it; every chunk of it."""
    row = data.shape[1:]
    array = zarr.create_array(
        folder / "x", shape=data.shape, dtype=data.dtype, chunks=(chunk, *row), shards=(shard, *row) if shard else None,
        compressors=CODECS[codec] or None, filters=None, fill_value=0, config={"write_empty_chunks": True}, **more,
    )  # fmt: skip
    array[:] = data
    return folder


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_it_reads_what_zarr_reads(tmp_path: Path, data: st.DataObject):
    """Random shapes, types, chunks, shards and codecs: any steps, in any check mode, are those of zarr-python."""
    shutil.rmtree(tmp_path / "x", ignore_errors=True)
    steps, chunk = data.draw(st.integers(1, 70)), data.draw(st.integers(1, 9))
    row = tuple(data.draw(st.lists(st.integers(1, 4), max_size=3)))
    dtype = data.draw(st.sampled_from(["uint8", "int16", "float32", "float64", "bool"]))
    shard = data.draw(st.sampled_from([0, chunk, 3 * chunk, 5 * chunk]))
    content = np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 100, (steps, *row)).astype(dtype)
    codec = data.draw(st.sampled_from(sorted(CODECS)))
    write(tmp_path, content, chunk=chunk, shard=shard, codec=codec)
    reader = reader_of(tmp_path, check=data.draw(st.sampled_from(["first", "always", "never"])))
    for _ in range(4):
        start = data.draw(st.integers(0, steps))
        stop = data.draw(st.integers(start, steps))
        found = reader.read(start, stop)
        assert found.dtype == content.dtype
        assert np.array_equal(found, content[start:stop])


@pytest.mark.parametrize("codec", [codec for codec in CODECS if "crc" in codec])
@pytest.mark.parametrize("check", ["first", "always"])
def test_every_flipped_bit_of_a_chunk_is_found(tmp_path: Path, codec: str, check: Check):
    """Anywhere in a shard: chunk, checksum or index. The error names array, file, and the chunk where there is one."""
    content = np.random.default_rng(0).integers(0, 255, (64, 50), np.uint8)
    write(tmp_path, content, chunk=8, shard=64, codec=codec)
    path = tmp_path / "x/c/0/0"
    good = path.read_bytes()
    for at in range(0, len(good), max(1, len(good) // 200)):
        path.write_bytes(good[:at] + bytes([good[at] ^ 1 << at % 8]) + good[at + 1 :])
        with pytest.raises(DataError, match="x/c/0/0"):
            reader_of(tmp_path, check=check).read(0, 64)
    path.write_bytes(good)
    assert np.array_equal(reader_of(tmp_path, check=check).read(0, 64), content)


@pytest.mark.parametrize("codec", ["raw", "raw, crc", "blosc, crc", "zstd, crc"])
def test_what_is_missing_or_cut_never_reads_as_zeros(tmp_path: Path, codec: str):
    """A shard that is gone, cut short, empty, a link or a folder: an error that names it."""
    write(tmp_path, np.ones((64, 50), np.uint8), chunk=8, shard=32, codec=codec)
    path = tmp_path / "x/c/1/0"
    good = path.read_bytes()
    wrecks: list[Callable[[], object]] = [
        lambda: None,
        lambda: path.write_bytes(good[: len(good) // 2]),
        lambda: path.write_bytes(b""),
        lambda: path.symlink_to(tmp_path / "x/c/0/0"),
        path.mkdir,
        lambda: os.mkfifo(path),
    ]
    for wreck in wrecks:
        path.is_dir() and path.rmdir()
        path.unlink(missing_ok=True)
        wreck()
        reader = reader_of(tmp_path)
        assert reader.read(0, 32).all()
        with pytest.raises(DataError, match="x/c/1/0"):
            reader.read(30, 40)


def test_a_file_that_is_cut_while_it_is_read_is_an_error(tmp_path: Path):
    """The index was good when it was opened; a read past the end is not filled with what the buffer held."""
    write(tmp_path, np.ones((64, 50), np.uint8), chunk=8, shard=64, codec="raw, crc")
    reader = reader_of(tmp_path)
    reader.read(0, 8)
    os.truncate(tmp_path / "x/c/0/0", 1000)
    with pytest.raises(DataError, match="it ends after byte"):
        reader.read(40, 64)


def test_first_checks_once_and_always_each_time(tmp_path: Path):
    """What `first` has found good it believes; `always` looks again; `never` never looks."""
    write(tmp_path, np.ones((16, 50), np.uint8), chunk=8, shard=16)
    readers = {check: reader_of(tmp_path, check=check) for check in ("first", "always", "never")}
    for reader in readers.values():
        assert reader.read(0, 16).all()
    with (tmp_path / "x/c/0/0").open("r+b") as file:
        file.write(b"\0")
    assert not readers["first"].read(0, 1).all()
    assert not readers["never"].read(0, 1).all()
    with pytest.raises(DataError, match=r"chunk 0 \(steps 0 to 8\)"):
        readers["always"].read(0, 1)


def test_a_chunk_that_is_not_stored_is_for_zarr(tmp_path: Path):
    """Where a fill value is meant, nothing is invented here."""
    array = zarr.create_array(
        tmp_path / "x", shape=(32, 3), dtype="f4", chunks=(8, 3), shards=(32, 3), compressors=None, fill_value=7
    )
    array[8:16] = 1
    reader = reader_of(tmp_path)
    assert np.array_equal(reader.read(8, 16), np.ones((8, 3)))
    with pytest.raises(Absent):
        reader.read(0, 9)


@pytest.mark.parametrize(
    "more",
    [
        {"chunks": (8, 2), "shards": (16, 4)},
        {"chunks": (8, 4), "filters": [zarr.codecs.TransposeCodec(order=(1, 0))]},
        {"chunks": (8, 4), "compressors": [GzipCodec()]},
        {"chunks": (8, 4), "zarr_format": 2},
        {"chunks": (8, 4), "serializer": zarr.codecs.BytesCodec(endian="big")},
    ],
)
def test_other_forms_are_left_to_zarr(tmp_path: Path, more: dict[str, Any]):
    """Cut along other axes, transposed, another codec, v2, big-endian: not read here, rather than read wrong."""
    array = zarr.create_array(tmp_path / "x", **{"shape": (32, 4), "dtype": "f4", "compressors": None, **more})
    array[:] = 1
    name = ".zarray" if more.get("zarr_format") == 2 else "zarr.json"
    found = metadata.parse("x", (tmp_path / "x" / name).read_bytes(), name)
    assert found
    assert layout(found) is None


@pytest.mark.parametrize("codec", ["raw, crc", "blosc, crc", "zstd, crc"])
def test_threads_and_forks_share_a_reader(tmp_path: Path, codec: str):
    """Many threads at once, and a child forked while they read: each gets its own steps."""
    content = np.random.default_rng(0).integers(0, 255, (512, 100), np.uint8)
    write(tmp_path, content, chunk=8, shard=64, codec=codec)
    reader = reader_of(tmp_path)
    wrong: list[int] = []
    stop = threading.Event()

    def work(seed: int) -> None:
        random = np.random.default_rng(seed)
        while not stop.is_set():
            start = int(random.integers(0, 480))
            if not np.array_equal(reader.read(start, start + 30), content[start : start + 30]):
                wrong.append(start)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(5):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = 0 if np.array_equal(reader.read(3, 500), content[3:500]) else 2
            finally:
                os._exit(code)
        assert os.waitpid(pid, 0)[1] == 0
    stop.set()
    for thread in threads:
        thread.join()
    assert wrong == []
