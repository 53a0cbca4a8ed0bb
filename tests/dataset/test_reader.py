from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pitools.core.errors import DataError, UsageError
from pitools.dataset import reader
from pitools.dataset.ingest import chunking
from pitools.dataset.ingest.ingest import ingest
from pitools.dataset.reader import open_dataset

STEPS = 230


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A version of many shards whose one array of numbers counts its steps."""
    import h5py

    created = tmp_path_factory.mktemp("read")
    with h5py.File(created / "a.hdf5", "w") as file:
        for i, (start, stop) in enumerate([(0, 30), (30, 180), (180, STEPS)]):
            file[f"data/demo_{i}/actions"] = np.arange(start, stop, dtype=np.int64)[:, None] * [1, 10]
            file[f"data/demo_{i}"].attrs["language"] = f"task {i}"
        file["mask/train"] = np.array([b"demo_0", b"demo_2"])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(chunking, "CHUNK_BYTES", 128)
        patched.setattr(chunking, "SHARD_BYTES", 512)
        return Path(ingest([created / "a.hdf5"], root=created / "root", name="x").path)


@pytest.fixture
def copy(folder, tmp_path) -> Path:
    """The same version, to be damaged."""
    return Path(shutil.copytree(folder, tmp_path / folder.name))


def test_what_it_says(folder) -> None:
    """Offsets, instructions, splits, schema and version are the recording's."""
    opened = open_dataset(folder)
    assert opened.episode_offsets.tolist() == [0, 30, 180, STEPS]
    assert opened.instructions == ["task 0", "task 1", "task 2"]
    assert opened.splits == {"train": [0, 2]}
    assert {name: schema.shape for name, schema in opened.arrays.items()} == {"action": (STEPS, 2)}
    assert opened.version.version == folder.name


@given(st.tuples(st.integers(0, STEPS), st.integers(0, STEPS)).map(sorted))
def test_read(folder, pair) -> None:
    """Any run of steps is what was recorded, over chunks and shards."""
    rows = open_dataset(folder).read("action", *pair)
    assert rows.tolist() == [[i, 10 * i] for i in range(*pair)]


@pytest.mark.parametrize("resident", [0, 1 << 20])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30, deadline=None)
@given(wanted=st.lists(st.integers(0, STEPS - 1), max_size=40))
def test_take(folder, resident, wanted) -> None:
    """Any steps in any order, repeated or not, are what was recorded, be the array kept in memory or read by runs."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(reader, "RESIDENT_BYTES", resident)
        rows = open_dataset(folder).take("action", wanted)
    assert rows.shape == (len(wanted), 2)
    assert rows[:, 0].tolist() == wanted


@pytest.mark.parametrize("resident", [0, 1 << 20])
@pytest.mark.parametrize("wanted", [[-1], [STEPS], [0, STEPS + 5]])
def test_out_of_range(folder, monkeypatch, resident, wanted) -> None:
    """A step that is not there is an IndexError, never the last one or zeros."""
    monkeypatch.setattr(reader, "RESIDENT_BYTES", resident)
    with pytest.raises(IndexError):
        open_dataset(folder).take("action", wanted)


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (0, STEPS + 1), (5, 4)])
def test_read_out_of_range(folder, start, stop) -> None:
    """A run that leaves the array is an IndexError that says its length."""
    with pytest.raises(IndexError, match=str(STEPS)):
        open_dataset(folder).read("action", start, stop)


def test_unknown_array(folder) -> None:
    """An array that is not there is named, with those that are."""
    with pytest.raises(UsageError, match="no array 'reward'"):
        open_dataset(folder).read("reward", 0, 1)


def test_missing_shard(copy) -> None:
    """A version that lacks one shard is not opened; Zarr itself would read zeros."""
    (copy / "action/c/3/0").unlink()
    with pytest.raises(DataError, match="action/c/3/0") as caught:
        open_dataset(copy)
    assert f"pit dataset rebuild {copy}" in caught.value.hint


def test_wrong_size(copy) -> None:
    """A version with a file cut short is not opened."""
    os.truncate(copy / "action/c/1/0", 100)
    with pytest.raises(DataError, match=r"action/c/1/0.* got 100"):
        open_dataset(copy)


def test_shard_lost_while_open(copy) -> None:
    """A shard that goes after the opening, as by an eviction, is an error for its steps and no others."""
    opened = open_dataset(copy)
    (copy / "action/c/1/0").unlink()
    opened.read("action", 0, 8)
    with pytest.raises(DataError, match="action/c/1/0: No such file"):
        opened.read("action", 0, STEPS)


def test_flipped_bit(copy) -> None:
    """A flipped bit is an error that names the array and says what to do, not data."""
    path = copy / "action/c/0/0"
    data = bytearray(path.read_bytes())
    data[20] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match="action/c/0/0: checksum") as caught:
        open_dataset(copy).read("action", 0, STEPS)
    assert caught.value.hint


def test_not_a_dataset(tmp_path) -> None:
    """A folder without a manifest is not opened."""
    with pytest.raises(DataError, match="not a dataset"):
        open_dataset(tmp_path)
