from __future__ import annotations

import gc
import os
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.codecs import Crc32cCodec, GzipCodec

from pitools.core.errors import DataError
from pitools.store import digest, manifest
from pitools.store.manifest import ArraySchema, FileEntry, Manifest, Subset
from pitools.store.reader import open_shard
from pitools.store.reader.array_reader import open_below
from pitools.store.reader.read_stats import thread_stats
from pitools.store.reader.resident import ResidentArray
from pitools.store.reader.version_reader import VersionReader

STEPS, SHARD = 60, 10
RUNS = ((10, 30), (50, 60))


def build(
    folder: Path, *, runs: tuple[tuple[int, int], ...] | None = None, offsets: Sequence[int] = (0, 15, 30, STEPS)
) -> tuple[Path, dict[str, Any]]:
    """A version, or the part of one that has these runs of steps, whole shards; and the whole arrays."""
    random = np.random.default_rng(0)
    content = {
        "action": random.normal(size=(STEPS, 3)),
        "gzip": random.integers(1, 99, (STEPS, 2)),
        "episode_offsets": np.array(offsets),
    }
    group = zarr.create_group(folder, attributes={"splits": {"train": [0]}})
    for name, data in content.items():
        codecs = [GzipCodec() if name == "gzip" else Crc32cCodec()]
        group.create_array(
            name,
            shape=data.shape,
            dtype=data.dtype,
            chunks=(SHARD, *data.shape[1:]),
            compressors=codecs,
            fill_value=0,
        )[:] = data
    if runs is not None:
        for number in range(STEPS // SHARD):
            if not any(start <= number * SHARD < stop for start, stop in runs):
                (folder / f"action/c/{number}/0").unlink()
                (folder / f"gzip/c/{number}/0").unlink()
    files = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        size, text = digest.digest_file(path)
        files.append(FileEntry(path=path.relative_to(folder).as_posix(), bytes=size, digest=text))
    reference = Manifest(
        name="pick",
        episodes=3,
        steps=STEPS,
        files=tuple(files),
        arrays={name: ArraySchema(shape=data.shape, dtype=data.dtype.name) for name, data in content.items()},
        **({} if runs is None else {"subset": Subset(whole="", arrays=tuple(content), steps=runs)}),
    )
    (folder / manifest.MANIFEST_FILE).write_bytes(manifest.encode_manifest(reference))
    return folder, content


@pytest.fixture(scope="module")
def part(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A part of a version."""
    return build(tmp_path_factory.mktemp("part"), runs=RUNS)


@pytest.mark.parametrize("name", ["action", "gzip"])
def test_a_part_is_held_and_what_was_left_out_is_refused(part: tuple[Path, dict[str, Any]], name: str):
    """Each step that is here is its own, in any order and shape; each that is not is an error, from memory too."""
    path, content = part
    arrays = VersionReader(path)
    held = arrays.resident_rows(name)
    assert held
    assert len(held.rows) == sum(stop - start for start, stop in RUNS)
    joined_array = np.concatenate([np.arange(*run) for run in RUNS])
    steps = np.random.default_rng(0).permutation(np.tile(joined_array, 3)).reshape(-1, 5)
    assert np.array_equal(held.rows[held.row_indices(steps)], content[name][steps])
    for step in sorted({*range(-1, STEPS + 2)} - {*joined_array.tolist()}):
        with pytest.raises(IndexError, match=rf"\[{step}, {step + 1}\) of {name}: .* 10:30, 50:60"):
            held.row_indices(np.array([[10, step]]))
    with pytest.raises(IndexError, match="subset"):
        arrays.read(name, 25, 51)
    assert held.row_indices(np.empty((0, 4), np.int64)).shape == (0, 4)


def test_resident_is_only_what_is_whole(part: tuple[Path, dict[str, Any]]):
    """Whoever indexes by step gets all steps or nothing; arrays of episodes are whole in a part too."""
    path, content = part
    arrays = VersionReader(path)
    assert arrays.resident("action") is None
    assert np.array_equal(arrays.resident("episode_offsets"), content["episode_offsets"])
    assert np.array_equal(arrays.offsets, content["episode_offsets"])
    held = arrays.resident_rows("episode_offsets")
    assert held
    assert held.row_indices(np.array([2, 0])).tolist() == [2, 0]
    # What counts is what is here, 30 rows of 24 bytes.
    assert VersionReader(path, resident_bytes=720).resident_rows("action")
    assert VersionReader(path, resident_bytes=719).resident_rows("action") is None


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.booleans())
def test_places_are_those_of_a_table(lengths: list[int], gap_first: bool):
    """Runs and gaps of any length: rows by steps, as a dictionary would have them."""
    bounds = np.cumsum([0, *lengths]).tolist()
    runs = tuple(zip(bounds[gap_first::2], bounds[gap_first + 1 :: 2], strict=False))
    steps = [step for run in runs for step in range(*run)]
    table = {step: row for row, step in enumerate(steps)}
    resident_array = ResidentArray("x", np.array(steps), runs, is_complete=False)
    for step in range(-1, bounds[-1] + 1):
        if step in table:
            assert resident_array.row_indices(np.array([step])).tolist() == [table[step]]
        else:
            with pytest.raises(IndexError):
                resident_array.row_indices(np.array([step]))


def test_threads_read_a_small_array_once(tmp_path: Path):
    """Eight that come at the same time get the same memory, and its files are opened once."""
    path, _ = build(tmp_path)
    opened: list[str] = []

    def opener(name: str) -> int:
        opened.append(name)
        time.sleep(0.02)
        return open_below(path, name)

    arrays, reader, barrier = VersionReader(path, opener=opener), [], threading.Barrier(8)

    def read() -> None:
        barrier.wait()
        reader.append(arrays.resident("action"))

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(array) for array in reader}) == 1
    chunks = [name for name in opened if name.startswith("action/c/")]
    assert sorted(chunks) == [f"action/c/{number}/0" for number in range(STEPS // SHARD)]


READS: dict[str, tuple[str, Callable[[VersionReader], Any]]] = {
    "a small array": ("action/c/", lambda arrays: arrays.resident("action").tolist()),
    "offsets": ("episode_offsets/c/", lambda arrays: arrays.offsets.tolist()),
    "attributes": ("zarr.json", lambda arrays: arrays.attributes),
}


@pytest.mark.parametrize("what", READS)
def test_a_fork_while_it_is_read_waits_for_nobody(tmp_path: Path, what: str):
    """A child whose parent's thread was reading something to be kept reads it itself, also of another version."""
    path, _ = build(tmp_path)
    prefix, read = READS[what]
    expected = read(VersionReader(path))
    reading, go_on = threading.Event(), threading.Event()
    parent = os.getpid()

    def opener(name: str) -> int:
        if name.startswith(prefix) and os.getpid() == parent:
            reading.set()
            go_on.wait(20)
        return open_below(path, name)

    arrays = VersionReader(path, opener=opener)
    thread = threading.Thread(target=read, args=(arrays,))
    thread.start()
    reading.wait(20)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if read(arrays) == read(VersionReader(path)) == expected else 2
        finally:
            os._exit(code)
    until, start_time = time.monotonic() + 10, (0, 0)
    while not start_time[0] and time.monotonic() < until:
        start_time = os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)
    go_on.set()
    thread.join()
    assert start_time == (pid, 0)


@pytest.mark.parametrize("offsets", [[0, 15, 30, 59], [0, 15, 30, 61], [0, 30, 15, 60], [1, 15, 30, 60], [0, 15, 60]])
def test_offsets_that_cannot_be_are_an_error(tmp_path: Path, offsets: list[int]):
    """Past the last step, back, or of other episodes: windows would be of another episode, or of none."""
    path, _ = build(tmp_path, offsets=offsets)
    with pytest.raises(DataError, match="episode_offsets"):
        VersionReader(path).offsets  # noqa: B018


@pytest.mark.parametrize("name", ["action", "gzip"])
def test_a_missing_file_is_never_zeros(tmp_path: Path, name: str):
    """Whoever reads it, and also from memory: an error that names the file, each time."""
    path, _ = build(tmp_path)
    (path / f"{name}/c/3/0").unlink()
    arrays = VersionReader(path)
    for read in (lambda: arrays.read(name, 0, STEPS), lambda: arrays.resident_rows(name)):
        for _ in range(2):
            with pytest.raises(DataError, match=f"{name}/c/3/0"):
                read()


@pytest.mark.parametrize("name", ["action", "gzip"])
def test_a_file_is_verified_once_and_again_when_it_is_another(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
):
    """Read in blocks a shard is hashed as often as read in one go; one that was exchanged since is damage."""
    path, content = build(tmp_path)
    arrays, hashed, of_descriptor = VersionReader(path, verify_digests=True), [], digest.digest_descriptor
    monkeypatch.setattr(digest, "digest_descriptor", lambda *a, **k: hashed.append(a) or of_descriptor(*a, **k))
    for step in range(STEPS):
        assert np.array_equal(arrays.read(name, step, step + 1), content[name][step : step + 1])
    assert len(hashed) == 1 + STEPS // SHARD
    if name == "gzip":  # of the others the descriptor is kept
        (path / "gzip/c/1/0").replace(path / "gzip/c/0/0")
        with pytest.raises(DataError, match="gzip/c/0/0: "):
            arrays.read(name, 0, 1)


def test_metadata_that_cannot_be_read_are_an_error(tmp_path: Path):
    """Gone, a folder, a link: named, and not followed."""
    path, _ = build(tmp_path / "v")
    other, _ = build(tmp_path / "other")
    for wreck in (lambda: None, (path / "action/zarr.json").mkdir):
        (path / "action/zarr.json").unlink(missing_ok=True)
        wreck()
        with pytest.raises(DataError, match=r"action/zarr\.json"):
            VersionReader(path).read("action", 0, 1)
    (path / "action/zarr.json").rmdir()
    (path / "action/zarr.json").symlink_to(other / "action/zarr.json")
    with pytest.raises(DataError, match=r"action/zarr\.json"):
        VersionReader(path).read("action", 0, 1)


def test_metadata_that_are_not_the_manifests_are_an_error(tmp_path: Path):
    """An array of another shape or type than was published: its rows would be others."""
    path, _ = build(tmp_path)
    good = (path / "action/zarr.json").read_text()
    for old, new in ((f"{STEPS}", f"{STEPS + 1}"), ('"float64"', '"int64"')):
        assert old in good
        (path / "action/zarr.json").write_text(good.replace(old, new, 1))
        with pytest.raises(DataError, match="differs from the manifest"):
            VersionReader(path).read("action", 0, 1)


def test_what_was_read_is_let_go_of(tmp_path: Path):
    """A thread that has read holds no array's open files when nobody else does."""
    path, content = build(tmp_path)
    arrays = VersionReader(path, resident_bytes=0)
    assert np.array_equal(arrays.read("action", 3, 33), content["action"][3:33])
    gone = weakref.ref(arrays)
    del arrays
    gc.collect()
    assert (gone(), thread_stats().path, thread_stats().where) == (None, None, "")


def test_it_can_be_sent_to_another_process(part: tuple[Path, dict[str, Any]]):
    """What a spawned worker unpickles reads the same, also after something has been read."""
    path, content = part
    arrays = VersionReader(path, checksums="always", resident_bytes=10)
    arrays.read("action", 10, 12)
    record = pickle.loads(pickle.dumps(arrays))
    assert record.resident_rows("action") is None
    assert np.array_equal(record.read("action", 50, 60), content["action"][50:60])
    assert record.attributes == {"splits": {"train": [0]}}


def test_a_shard_is_closed_when_its_module_is_gone(tmp_path, monkeypatch) -> None:
    """At the exit of a program, modules may go before what they made."""
    (tmp_path / "0").write_bytes(b"data")
    shard = open_shard.open_shard(os.open(tmp_path / "0", os.O_RDONLY), None)
    descriptor = shard.descriptor
    monkeypatch.setattr(open_shard, "os", None)
    del shard
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
