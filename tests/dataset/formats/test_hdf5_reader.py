from __future__ import annotations

import os
import pickle
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import h5py
import msgspec
import numpy as np
import pytest
from h5py._objects import phil
from hypothesis import given, settings
from hypothesis import strategies as st

from pitools.core.errors import DataError
from pitools.dataset.formats import detect, hdf5, hdf5_reader
from pitools.dataset.formats.model import Column
from pitools.dataset.formats.readers import open_reader


def column(path: Path, name: str = "x") -> Column:
    with hdf5.open_hdf5(path) as file:
        return hdf5.describe_column(file[name], 0, hdf5.column_source(path))


def read(path: Path, start: int, stop: int, name: str = "x") -> np.ndarray:
    reference = column(path, name)
    out = np.empty((stop - start, *reference.row), reference.dtype)
    reader = open_reader(None)
    try:
        reader.read_into(reference, out, start, stop)
    finally:
        reader.close()
    return out


@pytest.fixture
def only_preadv():
    """Fails a test in which HDF5 itself reads a row."""

    def refuse(*args):
        raise AssertionError("read by HDF5")

    with patch.object(h5py.Dataset, "read_direct", refuse):
        yield


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_storage(data) -> None:
    """However a dataset lies in the file, any range of its rows is what h5py reads."""
    row = tuple(data.draw(st.lists(st.integers(1, 6), max_size=3)))
    steps = data.draw(st.integers(1, 40))
    dtype = data.draw(st.sampled_from(["<f4", ">f4", "<i8", "u1", "?", "<f2", "<c8", ">i2"]))
    values = np.random.default_rng(steps).integers(0, 200, (steps, *row)).astype(dtype)
    chunks = data.draw(st.none() | st.tuples(st.integers(1, steps), *(st.integers(1, size) for size in row)))
    filters = [{}, {"compression": "gzip"}, {"shuffle": True}, {"fletcher32": True}] if chunks else [{}]
    options = {"chunks": chunks} | data.draw(st.sampled_from(filters))
    start = data.draw(st.integers(0, steps))
    stop = data.draw(st.integers(start, steps))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.hdf5"
        with h5py.File(path, "w", userblock_size=data.draw(st.sampled_from([0, 512]))) as file:
            dataset = file.create_dataset(
                "x", values.shape, values.dtype, maxshape=(None, *row) if chunks else None, **options
            )
            other = file.create_dataset("other", values.shape, values.dtype, chunks=chunks)
            # Written in any order, between the chunks of another: so they lie in the file.
            for step in data.draw(st.permutations(range(steps))):
                other[step] = dataset[step] = values[step]
        np.testing.assert_array_equal(read(path, start, stop), values[start:stop])


@pytest.mark.parametrize("chunks", [None, (1, 24, 32, 3), (5, 24, 32, 3), (64, 24, 32, 3)])
def test_frames_are_read_directly(tmp_path, only_preadv, chunks) -> None:
    """Frames as ALOHA and robomimic store them are read without HDF5, also across neighbouring chunks of others."""
    frames = np.random.default_rng(0).integers(0, 256, (64, 24, 32, 3), np.uint8)
    with h5py.File(tmp_path / "x.hdf5", "w") as file:
        names = ("x", "y")
        created = [file.create_dataset(name, frames.shape, frames.dtype, chunks=chunks) for name in names]
        for step in range(64):
            for dataset in created:
                dataset[step] = frames[step]
    for start, stop in [(0, 64), (3, 60), (7, 8), (63, 64)]:
        np.testing.assert_array_equal(read(tmp_path / "x.hdf5", start, stop), frames[start:stop])


@pytest.mark.parametrize(
    "filters", [{"shuffle": True}, {"fletcher32": True}, {"compression": "gzip"}, {"scaleoffset": 0}]
)
def test_filters(tmp_path, filters) -> None:
    """Chunks that went through a filter are read through it, also where it left their size as it was."""
    values = np.random.default_rng(0).integers(0, 1 << 30, (20, 3))
    with h5py.File(tmp_path / "x.hdf5", "w") as file:
        file.create_dataset("x", data=values, chunks=(4, 3), **filters)
    np.testing.assert_array_equal(read(tmp_path / "x.hdf5", 1, 19), values[1:19])


def test_many_small_chunks(tmp_path, only_preadv) -> None:
    """More chunks than one call can read, with HDF5's B-tree nodes between them, are read by few calls."""
    values = np.random.default_rng(0).normal(size=(3000, 14)).astype(np.float32)
    with h5py.File(tmp_path / "x.hdf5", "w") as file:
        file.create_dataset("x", data=values, chunks=(1, 14))
    calls = []
    preadv = os.preadv
    with patch.object(os, "preadv", lambda *args: calls.append(args) or preadv(*args)):
        np.testing.assert_array_equal(read(tmp_path / "x.hdf5", 1, 2999), values[1:2999])
    assert len(calls) < 100


@pytest.mark.parametrize("options", [{}, {"chunks": (2, 4)}, {"chunks": (2, 3), "compression": "gzip"}])
@pytest.mark.parametrize("rows", [0, 9, 10])
def test_unwritten(tmp_path, options, rows) -> None:
    """Chunks that were never written, which read as zeros, are refused; written zeros are not."""
    with h5py.File(tmp_path / "x.hdf5", "w") as file:
        dataset = file.create_dataset("x", (11, 4), "f4", **options)
        dataset[:rows] = 0
    if rows == 10 or (rows and not options):  # the last row is in a chunk of its own
        with h5py.File(tmp_path / "x.hdf5", "r+") as file:
            file["x"][10:] = 0
        assert (read(tmp_path / "x.hdf5", 0, 11) == 0).all()
    else:
        with pytest.raises(DataError, match="never written"):
            column(tmp_path / "x.hdf5")


def test_hole(tmp_path) -> None:
    """Of a dataset that has a hole after all, as when it was replaced, a reader gives what HDF5 says, or refuses."""
    path = tmp_path / "x.hdf5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", (10, 4), "f4", chunks=(2, 4), fillvalue=7)[4:6] = 1
    reference = Column(
        dataset="/x",
        steps=10,
        row=(4,),
        dtype="float32",
        source=msgspec.structs.replace(hdf5.column_source(path), name="/x"),
    )
    out, reader = np.empty((10, 4), np.float32), open_reader(None)
    reader.read_into(reference, out, 0, 10)
    assert out[:, 0].tolist() == [7] * 4 + [1] * 2 + [7] * 4
    reader.close()


def test_compact(tmp_path) -> None:
    """A small dataset among HDF5's own metadata is read as any other."""
    values = np.arange(12, dtype=np.float32).reshape(6, 2)
    with h5py.File(tmp_path / "x.hdf5", "w") as file:
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_layout(h5py.h5d.COMPACT)
        created = h5py.h5d.create(file.id, b"x", h5py.h5t.IEEE_F32LE, h5py.h5s.create_simple((6, 2)), plist)
        h5py.Dataset(created)[:] = values
    np.testing.assert_array_equal(read(tmp_path / "x.hdf5", 1, 5), values[1:5])


def test_resized(tmp_path) -> None:
    """A dataset that was cut, and grown again, is what HDF5 says, whatever still lies in its chunks."""
    with h5py.File(tmp_path / "x.hdf5", "w") as file:
        dataset = file.create_dataset("x", data=np.ones((10, 3)), chunks=(4, 3), maxshape=(None, 3))
        dataset.resize(5, axis=0)
    np.testing.assert_array_equal(read(tmp_path / "x.hdf5", 0, 5), np.ones((5, 3)))
    with h5py.File(tmp_path / "x.hdf5", "r+") as file:
        file["x"].resize(8, axis=0)
        expected = file["x"][:]
    np.testing.assert_array_equal(read(tmp_path / "x.hdf5", 0, 8), expected)


@pytest.mark.parametrize("change", ["row", "type", "length", "name"])
def test_another_dataset(tmp_path, change) -> None:
    """A file of the same size, whose dataset is another one now, is refused by name."""
    path = tmp_path / "x.hdf5"
    with h5py.File(path, "w") as file:
        file["x"] = np.zeros((10, 4), np.int32)
    reference = column(path)
    values = {
        "row": np.zeros((10, 2), np.int64),
        "type": np.zeros((10, 4), np.float32),
        "length": np.zeros((5, 4), np.int64),
        "name": np.zeros((10, 4), np.int32),
    }[change]
    with h5py.File(path, "w") as file:
        file["y" if change == "name" else "x"] = values
    os.truncate(path, reference.source.bytes)
    reader = open_reader(None)
    with pytest.raises(DataError) as caught:
        reader.read_into(reference, np.empty((10, 4), np.int32), 0, 10)
    assert str(path) in caught.value.where
    reader.close()


@pytest.mark.parametrize("link", ["external", "soft", "soft group", "demo"])
def test_links_to_other_files(tmp_path, link) -> None:
    """No link leads out of the file, be it by way of another link."""
    with h5py.File(tmp_path / "secret.hdf5", "w") as file:
        file["x"] = file["actions"] = np.ones((5, 3))
    with h5py.File(tmp_path / "a.hdf5", "w") as file:
        file["data/demo_0/actions"] = np.ones((5, 2))
        file["way"] = h5py.ExternalLink("secret.hdf5", "/")
        if link == "demo":
            file["data/demo_1"] = h5py.SoftLink("/way")
        else:
            file["data/demo_0/obs"] = {
                "external": h5py.ExternalLink("secret.hdf5", "/x"),
                "soft": h5py.SoftLink("/way/x"),
                "soft group": h5py.SoftLink("/way"),
            }[link]
    recording = detect.scan_recording(tmp_path / "a.hdf5", "robomimic")
    assert [episode.name for episode in recording.episodes] == (["demo_0"] if link == "demo" else [])
    assert [item.name for item in recording.rejected] == ["demo_1" if link == "demo" else "demo_0"]
    assert "is a link to another file" in recording.rejected[0].reason


def test_link_within(tmp_path) -> None:
    """A soft link to a dataset of the same file is followed."""
    with h5py.File(tmp_path / "a.hdf5", "w") as file:
        file["data/demo_0/actions"] = np.ones((5, 2))
        file["joints"] = np.full((5, 3), 4.0)
        file["data/demo_0/obs/joints"] = h5py.SoftLink("/joints")
    assert set(detect.scan_recording(tmp_path / "a.hdf5", "auto").episodes[0].columns) == {"action", "obs/joints"}


@pytest.mark.parametrize("change", ["longer", "shorter"])
def test_changed_size(tmp_path, change) -> None:
    """A file whose size changed since the scan is refused, even if it is already open."""
    path = tmp_path / "x.hdf5"
    with h5py.File(path, "w") as file:
        file["x"] = np.zeros((100, 100))
    reference, out = column(path), np.empty((100, 100))
    reader = open_reader(None)
    reader.read_into(reference, out, 0, 100)
    os.truncate(path, path.stat().st_size + (1 if change == "longer" else -1))
    for again in (reader, open_reader(None)):
        with pytest.raises(DataError):
            again.read_into(reference, out, 0, 100)
        again.close()


def test_ends_while_read(tmp_path) -> None:
    """A file that is truncated between the check of its size and the read is refused, and not read as zeros."""
    path = tmp_path / "x.hdf5"
    with h5py.File(path, "w") as file:
        file["x"] = np.ones((1000, 1000))
    reference, out = column(path), np.empty((1000, 1000))
    file = hdf5_reader.Hdf5Reader(path)
    status = os.fstat(file._descriptor)
    os.truncate(path, reference.source.bytes // 2)
    with patch.object(os, "fstat", lambda _: status), pytest.raises(DataError, match=r"after byte \d+"):
        file.read_into(reference, reference.source, out, 0, 1000)
    file.close()


def test_many_threads(robomimic) -> None:
    """Readers in several threads at once, each its own, give what one alone gives; a column may have been pickled."""
    recording = detect.scan_recording(robomimic(30, 40, 50), "auto")
    columns = [pickle.loads(pickle.dumps(episode.columns)) for episode in recording.episodes]
    with h5py.File(recording.path) as file:
        expected = [file[f"data/demo_{i}/obs/eye_image"][:] for i in range(3)]

    def one(number: int) -> None:
        reader = open_reader(recording.episodes[number % 3])
        for _ in range(5):
            reference = columns[number % 3]["obs/eye_image"]
            out = np.empty((reference.steps, *reference.row), reference.dtype)
            reader.read_into(reference, out, 0, reference.steps)
            np.testing.assert_array_equal(out, expected[number % 3])
        reader.close()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(one, range(12)))


def test_outside_of_the_lock(tmp_path) -> None:
    """While another thread is inside of HDF5, rows that lie plainly in a file are read all the same."""
    values = np.random.default_rng(0).normal(size=(50, 30))
    with h5py.File(tmp_path / "x.hdf5", "w") as file:
        file.create_dataset("x", data=values, chunks=(1, 30))
    reference, out, reader = column(tmp_path / "x.hdf5"), np.empty((50, 30)), open_reader(None)
    reader.read_into(reference, out[:1], 0, 1)  # where they lie, HDF5 has to say once
    with phil:
        thread = threading.Thread(target=reader.read_into, args=(reference, out, 0, 50), daemon=True)
        thread.start()
        thread.join(timeout=20)
        assert not thread.is_alive()
    np.testing.assert_array_equal(out, values)
    reader.close()


def test_wrong_request(robomimic) -> None:
    """Steps that are not there, and a place of another shape, are errors of the caller's; nothing is filled."""
    recording = detect.scan_recording(robomimic(5), "auto").episodes[0].columns["action"]
    reader = open_reader(None)
    with pytest.raises(IndexError):
        reader.read_into(recording, np.empty((3, 7), np.float32), 3, 6)
    for out in (np.empty((3, 6), np.float32), np.empty((3, 7))):
        with pytest.raises(ValueError, match="cannot take steps"):
            reader.read_into(recording, out, 0, 3)
    reader.close()


def test_few_files_stay_open(aloha) -> None:
    """However many files one reader has read, few of them are open."""
    paths = [aloha(number, 2) for number in range(30)]
    reader = open_reader(None)
    before = len(os.listdir("/proc/self/fd"))
    for path in paths:
        recording = detect.scan_recording(path, "aloha").episodes[0].columns["action"]
        reader.read_into(recording, np.empty((2, 14), np.float32), 0, 2)
    assert len(os.listdir("/proc/self/fd")) - before <= 16
    reader.close()
    assert len(os.listdir("/proc/self/fd")) == before
