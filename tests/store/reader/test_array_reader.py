from __future__ import annotations

import contextlib
import gc
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from crc32c import crc32c
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numcodecs.blosc import Blosc
from numcodecs.zstd import Zstd
from numpy.typing import NDArray
from zarr.codecs import BloscCodec, Crc32cCodec, GzipCodec, ZstdCodec

from pitools.core.errors import DataError
from pitools.store.reader.array_reader import ArrayReader, ChecksumMode, ChunkNotStored
from pitools.store.zarr import metadata
from pitools.store.zarr.chunk_layout import ChunkLayout, chunk_layout
from pitools.store.zarr.codecs import decoder_for

CODECS: dict[str, list[Any]] = {
    "raw": [],
    "raw, crc": [Crc32cCodec()],
    "blosc, crc": [BloscCodec(cname="lz4"), Crc32cCodec()],
    "zstd": [ZstdCodec(level=1)],
    "zstd, crc": [ZstdCodec(level=1), Crc32cCodec()],
}


def layout_of(folder: Path, name: str = "x") -> ChunkLayout | None:
    actual = metadata.parse_metadata(name, (folder / name / "zarr.json").read_bytes(), "zarr.json")
    assert actual
    return chunk_layout(actual)


def reader_of(folder: Path, *, check: ChecksumMode = "first") -> ArrayReader:
    reference = layout_of(folder)
    assert reference
    return ArrayReader(folder, "x", reference, checksums=check)


def write(
    folder: Path, data: NDArray[Any], *, chunk: int, shard: int = 0, codec: str = "raw, crc", **more: Any
) -> Path:
    """An array `x` of chunks, perhaps in shards, as zarr-python writes it; every chunk of it."""
    row = data.shape[1:]
    array = zarr.create_array(
        folder / "x",
        shape=data.shape,
        dtype=data.dtype,
        chunks=(chunk, *row),
        shards=(shard, *row) if shard else None,
        compressors=CODECS[codec] or None,
        filters=None,
        fill_value=0,
        config={"write_empty_chunks": True},
        **more,
    )
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
        actual = reader.read(start, stop)
        assert actual.dtype == content.dtype
        assert np.array_equal(actual, content[start:stop])


@pytest.mark.parametrize("codec", [codec for codec in CODECS if "crc" in codec])
@pytest.mark.parametrize("check", ["first", "always"])
def test_every_flipped_bit_of_a_chunk_is_found(tmp_path: Path, codec: str, check: ChecksumMode):
    """Anywhere in a shard: chunk, checksum or index. The error names array, file, and the chunk where there is one."""
    content = np.random.default_rng(0).integers(0, 255, (64, 50), np.uint8)
    write(tmp_path, content, chunk=8, shard=64, codec=codec)
    path = tmp_path / "x/c/0/0"
    good = path.read_bytes()
    for index in range(0, len(good), max(1, len(good) // 200)):
        path.write_bytes(good[:index] + bytes([good[index] ^ 1 << index % 8]) + good[index + 1 :])
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


def test_a_file_that_is_refused_is_closed(tmp_path: Path):
    """A job that tries again and again does not run out of descriptors."""
    write(tmp_path, np.ones((64, 50), np.uint8), chunk=8, shard=32, codec="raw, crc")
    (tmp_path / "x/c/1/0").write_bytes(b"")
    reader = reader_of(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(DataError):
            reader.read(32, 33)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_that_is_cut_while_it_is_read_is_an_error(tmp_path: Path):
    """The index was good when it was opened; a read past the end is not filled with what the buffer held."""
    write(tmp_path, np.ones((64, 50), np.uint8), chunk=8, shard=64, codec="raw, crc")
    reader = reader_of(tmp_path)
    reader.read(0, 8)
    os.truncate(tmp_path / "x/c/0/0", 1000)
    with pytest.raises(DataError, match="truncated"):
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
    with pytest.raises(ChunkNotStored):
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
    actual = metadata.parse_metadata("x", (tmp_path / "x" / name).read_bytes(), name)
    assert actual
    assert chunk_layout(actual) is None


def test_an_index_of_other_codecs_is_left_to_zarr(tmp_path: Path):
    """Its bytes would be taken for offsets."""
    write(tmp_path, np.ones((16, 5), np.uint8), chunk=8, shard=16)
    record = json.loads((tmp_path / "x/zarr.json").read_bytes())
    record["codecs"][0]["configuration"]["index_codecs"].append({"name": "gzip", "configuration": {"level": 1}})
    actual = metadata.parse_metadata("x", json.dumps(record).encode(), "zarr.json")
    assert actual
    assert layout_of(tmp_path)
    assert chunk_layout(actual) is None


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


BLOCKS: dict[str, list[Any]] = {
    "raw": [Crc32cCodec()],
    "lz4": [BloscCodec(cname="lz4"), Crc32cCodec()],
    "lz4, small blocks": [BloscCodec(cname="lz4", blocksize=4096), Crc32cCodec()],
    "blosc-zstd, shuffled": [BloscCodec(cname="zstd", clevel=1, shuffle="shuffle"), Crc32cCodec()],
    "zstd": [ZstdCodec(level=3), Crc32cCodec()],
    "zstd, checksum": [ZstdCodec(level=3, checksum=True)],
    "zstd, uneven blocks": [ZstdCodec(level=19), Crc32cCodec()],
}


@pytest.mark.parametrize("codec", BLOCKS)
@pytest.mark.parametrize("levels", [1, 4, 256])
def test_a_part_of_a_chunk_of_many_blocks(tmp_path: Path, codec: str, levels: int):
    """Chunks of 500 kB, of which only some blocks are decoded: all alike, compressible, and stored as they are."""
    random = np.random.default_rng(0)
    content = random.integers(0, levels, (20, 31_250)).astype("u2")
    array = zarr.create_array(
        tmp_path / "x",
        shape=content.shape,
        dtype="u2",
        chunks=(8, 31_250),
        filters=None,
        fill_value=0,
        shards=(16, 31_250),
        compressors=BLOCKS[codec],
        config={"write_empty_chunks": True},
    )
    array[:] = content
    for check in ("first", "always", "never"):
        reader = reader_of(tmp_path, check=check)
        for _ in range(12):
            start, stop = sorted(random.integers(0, 21, 2).tolist())
            assert np.array_equal(reader.read(start, stop), content[start:stop])


@pytest.mark.parametrize("codec", [codec for codec in CODECS if "crc" in codec])
@pytest.mark.parametrize("check", ["first", "always"])
def test_a_chunk_is_checked_whole_where_a_part_of_it_is_wanted(tmp_path: Path, codec: str, check: ChecksumMode):
    """A bit that is flipped in steps before or after the wanted ones is found by the read that first sees it."""
    content = np.random.default_rng(0).integers(0, 255, (24, 50), np.uint8)
    write(tmp_path, content, chunk=8, shard=24, codec=codec)
    path = tmp_path / "x/c/0/0"
    good = path.read_bytes()
    size = (len(good) - 16 * 3 - 4) // 3
    for index in range(size + 40, 2 * size - 40, 23):  # in the middle chunk
        path.write_bytes(good[:index] + bytes([good[index] ^ 1 << index % 8]) + good[index + 1 :])
        for start, stop in ((3, 9), (15, 24), (11, 12)):
            with pytest.raises(DataError, match=r"chunk 1 \(steps 8 to 16\)"):
                reader_of(tmp_path, check=check).read(start, stop)
        assert np.array_equal(reader_of(tmp_path, check=check).read(16, 24), content[16:24])


@pytest.mark.parametrize("compress", [lambda data: Blosc("lz4").encode(data), lambda data: Zstd(1).encode(data)])
@pytest.mark.parametrize("steps", [7, 9])
def test_a_chunk_of_another_size_is_damage(tmp_path: Path, compress: Callable[[bytes], bytes], steps: int):
    """One that holds fewer bytes would leave in the batch what the buffer held before; its checksum may be right."""
    codec = "blosc, crc" if compress(b"")[:1] == b"\x02" else "zstd, crc"
    write(tmp_path, np.ones((16, 50), np.uint8), chunk=8, codec=codec)
    frame = bytes(compress(bytes(50 * steps)))
    (tmp_path / "x/c/1/0").write_bytes(frame + crc32c(frame).to_bytes(4, "little"))
    for start, stop in ((0, 16), (9, 12)):
        with pytest.raises(DataError, match=rf"x/c/1/0: .*expected 400 bytes, got {50 * steps}"):
            reader_of(tmp_path).read(start, stop)


@pytest.mark.parametrize("codec", ["blosc", "zstd"])
def test_flipped_bits_without_a_checksum_are_errors_or_wrong_but_no_crash(tmp_path: Path, codec: str):
    """Headers, tables and blocks: what the file claims is compared with what there is before a library believes it."""
    content = np.random.default_rng(0).integers(0, 4, (8, 40_000), np.uint8)
    frame = bytes((Blosc("lz4", blocksize=8192) if codec == "blosc" else Zstd(3)).encode(content))
    decode = decoder_for("blosc" if codec == "blosc" else "zstd")
    room = memoryview(bytearray(content.nbytes))
    for position in [*range(80), *range(80, len(frame), 997)]:
        for bit in range(8):
            bad = frame[:position] + bytes([frame[position] ^ 1 << bit]) + frame[position + 1 :]
            with contextlib.suppress(ValueError, RuntimeError):
                decode.partial(memoryview(bytearray(bad)), 100_000, memoryview(bytearray(60_000)), room)
            with contextlib.suppress(ValueError, RuntimeError):
                decode.whole(memoryview(bytearray(bad)), room)


@pytest.mark.parametrize("codec", ["blosc", "zstd"])
def test_what_lies_behind_a_cut_frame_is_not_read(codec: str):
    """In a buffer that is used again the rest may well be there: of the frame that was read before."""
    content = np.random.default_rng(0).integers(0, 4, 50_000, np.uint8)
    encoded = bytearray((Blosc("lz4", blocksize=8192) if codec == "blosc" else Zstd(3)).encode(content))
    decode = decoder_for("blosc" if codec == "blosc" else "zstd")
    room = memoryview(bytearray(content.nbytes))
    cut = memoryview(encoded)[:-20]
    with pytest.raises((ValueError, RuntimeError)):
        decode.whole(cut, room)
    with pytest.raises((ValueError, RuntimeError)):
        decode.partial(cut, 0, memoryview(bytearray(10)), room)


@pytest.mark.parametrize("block", [1000, 65_536, 100_000, 131_072])
@pytest.mark.parametrize("last", [0, 1])
def test_a_part_of_a_frame_of_blocks_of_any_size(block: int, last: int):
    """Its first blocks may hold less than they could: what is decoded then is the frame as it was."""
    content = np.random.default_rng(0).bytes(500_000)
    cuts = [content[index : index + block] for index in range(0, len(content), block)] + [b""] * last
    frame = bytearray(b"\x28\xb5\x2f\xfd\xa0" + len(content).to_bytes(4, "little"))  # one segment, its size in 4
    for number, part in enumerate(cuts, start=1):
        frame += (len(part) << 3 | (number == len(cuts))).to_bytes(3, "little") + part
    assert Zstd().decode(bytes(frame)) == content
    decode, room = decoder_for("zstd"), memoryview(bytearray(len(content)))
    for start, stop in ((0, 10), (0, 131_072), (131_071, 131_073), (250_000, 250_001), (499_999, 500_000)):
        for _ in range(2):  # what it changes in the frame it changes back
            target = memoryview(bytearray(stop - start))
            decode.partial(memoryview(frame), start, target, room)
            assert target == content[start:stop]
    with pytest.raises(ValueError, match="expected 499999 bytes, got 500000"):
        decode.partial(memoryview(frame), 0, memoryview(bytearray(10)), room[:-1])


def test_a_stored_frame_that_is_cut_is_refused():
    """What Blosc could not make smaller it stores as it is: no single byte of such a frame is repeated, either."""
    content = np.random.default_rng(0).integers(0, 255, 5000, np.uint8)
    frame, decode, room = bytearray(Blosc("lz4").encode(content)), decoder_for("blosc"), memoryview(bytearray(5000))
    assert frame[2] & 2
    assert len(frame) == 5016
    for kept in (5015, 17, 16):
        cut = frame[:12] + kept.to_bytes(4, "little") + frame[16:kept]
        for start, stop in ((0, 1), (0, 10), (0, 5000), (4990, 5000)):
            with pytest.raises(ValueError, match="truncated"):
                decode.partial(memoryview(cut), start, memoryview(bytearray(stop - start)), room)
    with pytest.raises(ValueError, match="expected 7 bytes, got 1"):
        decoder_for("raw").whole(memoryview(b"x"), memoryview(bytearray(7)))


def test_a_frame_that_does_not_say_how_much_it_holds():
    """As a writer makes it that streams: read, and refused where it is not what the array's chunk has."""
    content = np.random.default_rng(0).bytes(5000)
    frame = b"\x28\xb5\x2f\xfd\x00\x58" + (len(content) << 3 | 1).to_bytes(3, "little") + content
    decode, room = decoder_for("zstd"), memoryview(bytearray(len(content)))
    decode.whole(memoryview(bytearray(frame)), room)
    assert room == content
    part = memoryview(bytearray(7))
    decode.partial(memoryview(bytearray(frame)), 4000, part, room)
    assert part == content[4000:4007]
    for size in (4999, 5001):
        with pytest.raises(ValueError, match="got 5000"):
            decode.whole(memoryview(bytearray(frame)), memoryview(bytearray(size)))


def test_forked_processes_do_not_write_into_each_other(tmp_path: Path):
    """A thread that has read forks, and parent and children read on at once: each decodes what it has read itself."""
    content = np.random.default_rng(0).integers(0, 50, (256, 4000), np.uint8)
    write(tmp_path, content, chunk=8, shard=64, codec="blosc, crc")
    reader = reader_of(tmp_path)
    assert np.array_equal(reader.read(0, 256), content)
    children = []
    for seed in range(3):
        if pid := os.fork():
            children.append(pid)
            continue
        code = 2
        try:
            starts = np.random.default_rng(seed).integers(0, 226, 500).tolist()
            code = (
                sum(not np.array_equal(reader.read(start, start + 30), content[start : start + 30]) for start in starts)
                > 0
            )
        finally:
            os._exit(code)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0, 0, 0]


def test_many_readers_under_a_low_limit_of_descriptors(tmp_path: Path, repo: Path):
    """With more shards than a process may have files open, all are read, again and again, by two readers in turn."""
    for name in ("a", "b"):
        write(tmp_path / name, np.arange(80, dtype=np.int32)[:, None], chunk=1, shard=1)
    code = """
import resource, sys
from pathlib import Path
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
sys.path.insert(0, sys.argv[2])
from tests.store.reader.test_array_reader import reader_of
readers = [reader_of(Path(sys.argv[1]) / name) for name in "ab"]
for _ in range(2):
    for step in range(80):
        assert all(reader.read(step, step + 1).item() == step for reader in readers)
print("read")
"""
    argv = [sys.executable, "-c", code, str(tmp_path), str(repo)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False, cwd=repo)
    assert done.stdout == "read\n", done.stderr


def test_files_are_closed_with_their_reader(tmp_path: Path):
    """At once, and not when Python happens to look for cycles: a loop that opens versions keeps none of their files."""
    write(tmp_path, np.arange(80, dtype=np.int32)[:, None], chunk=1, shard=10)
    gc.disable()
    try:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            reader = reader_of(tmp_path)
            assert reader.read(0, 80).sum() == sum(range(80))
            del reader
        assert len(os.listdir("/proc/self/fd")) == before
    finally:
        gc.enable()
