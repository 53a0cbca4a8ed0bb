"""What is not read is called by its name, and what is wrong in our own code is no fault of a recording."""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
import zarr
from crc32c import crc32c

from pitools.core.errors import DataError
from pitools.dataset.formats import detect, hdf5, parquet_reader, zarr_reader


def tfrecord(path: Path) -> None:
    """One record, as the TFRecord format writes it."""

    def masked(data: bytes) -> bytes:
        sum_of = crc32c(data)
        return (((sum_of >> 15 | sum_of << 17) + 0xA282EAD8) & 0xFFFFFFFF).to_bytes(4, "little")

    data, length = b"a record", (8).to_bytes(8, "little")
    path.write_bytes(length + masked(length) + data + masked(data))


def npz(path: Path) -> None:
    with path.open("wb") as file:
        np.savez(file, action=np.zeros((3, 7)))


def zipped(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("zarr.json", "{}")


FORMATS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "MCAP": ("a.mcap", lambda path: path.write_bytes(b"\x89MCAP0\r\n" + bytes(99))),
    "ROS 1 bag": ("a.bag", lambda path: path.write_bytes(b"#ROSBAG V2.0\n" + bytes(99))),
    "ROS 2 bag": ("a.db3", lambda path: path.write_bytes(b"SQLite format 3\0" + bytes(99))),
    "TFRecord": ("a.tfrecord-00000-of-00001", tfrecord),
    ".npz": ("a.npz", npz),
    "ZIP": ("a.zip", zipped),
    "NumPy": ("a.npy", lambda path: np.save(path, np.zeros(3))),
    "MP4": ("a.mp4", lambda path: path.write_bytes(b"\0\0\0\x20ftypisom" + bytes(99))),
    "pickle": ("a.pkl", lambda path: path.write_bytes(pickle.dumps({"action": 3}))),
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("layout", ["auto", "robomimic"])
def test_formats_of_files(tmp_path, name, layout) -> None:
    """A file of another format is called by its name, whatever layout was asked for, alone or in a folder."""
    file, write = FORMATS[name]
    write(tmp_path / file)
    with pytest.raises(DataError) as caught:
        detect.scan_recording(tmp_path / file, layout)
    assert name in caught.value.message
    assert caught.value.where == str(tmp_path / file)
    with pytest.raises(DataError) as caught:
        detect.scan_recording(tmp_path, "auto")
    assert name in caught.value.message


def test_folders_of_other_formats(robomimic, tmp_path) -> None:
    """RLDS is named by its top folder, and by the name of a damaged file; a folder of HDF5 files gets the command."""
    for folder in ("rlds/bridge/1.0.0", "lab"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "rlds/bridge/1.0.0/bridge-train.tfrecord-00000-of-00001").write_bytes(b"damaged")
    for folder in ("rlds", "rlds/bridge", "rlds/bridge/1.0.0"):
        with pytest.raises(DataError, match="RLDS"):
            detect.scan_recording(tmp_path / folder, "auto")
    robomimic(3).rename(tmp_path / "lab/a.hdf5")
    with pytest.raises(DataError) as caught:
        detect.scan_recording(tmp_path / "lab", "auto")
    assert f"{tmp_path}/lab/*.hdf5" in caught.value.hint
    (tmp_path / "a.csv").write_text("time,q0\n")
    with pytest.raises(DataError, match="a text file"):
        detect.scan_recording(tmp_path / "a.csv", "auto")


def test_a_filter_that_is_not_installed(robomimic) -> None:
    """HDF5 data behind a filter that is not installed refuse their demo, and the filter is named."""
    path = robomimic(3, 3)
    with h5py.File(path, "r+") as file:
        del file["data/demo_0/actions"]
        reference = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        reference.set_chunk((3, 7))
        reference.set_filter(60001, h5py.h5z.FLAG_OPTIONAL, ())
        space, name = h5py.h5s.create_simple((3, 7)), b"data/demo_0/actions"
        created = h5py.h5d.create(file.id, name, h5py.h5t.IEEE_F32LE, space, reference)
        created.write_direct_chunk((0, 0), b"compressed", 0)
    recording = detect.scan_recording(path, "auto")
    assert [episode.name for episode in recording.episodes] == ["demo_1"]
    (item,) = recording.rejected
    assert "60001" in item.reason
    assert "hdf5plugin" in item.hint


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_a_codec_that_is_not_installed(tmp_path, zarr_format) -> None:
    """A Zarr array of a codec that nobody has registered is refused before it is read, with the codec's name."""
    root = zarr.open_group(tmp_path / "z", mode="w", zarr_format=zarr_format)
    root.create_array("data/img", data=np.ones((4, 8, 8, 3), np.uint8))
    root.create_array("meta/episode_ends", data=np.array([4]))
    file = tmp_path / "z/data/img" / (".zarray" if zarr_format == 2 else "zarr.json")
    record = json.loads(file.read_text())
    if zarr_format == 2:
        record["compressor"] = {"id": "imagecodecs_jpegxl", "level": 3}
    else:
        record["codecs"].append({"name": "imagecodecs_jpegxl", "configuration": {}})
    file.write_text(json.dumps(record))
    with pytest.raises(DataError) as caught:
        detect.scan_recording(tmp_path / "z", "auto")
    assert "imagecodecs_jpegxl" in caught.value.message
    assert "imagecodecs_jpegxl" in caught.value.hint


def test_a_type_that_numpy_does_not_have(robomimic) -> None:
    """A TypeError of HDF5's own, for a type of no NumPy name, refuses the demo."""
    path = robomimic(3, 3)
    with h5py.File(path, "r+") as file:
        h5py.h5d.create(file["data/demo_0"].id, b"time", h5py.h5t.UNIX_D32LE, h5py.h5s.create_simple((3,)))
    assert [item.name for item in detect.scan_recording(path, "auto").rejected] == ["demo_0"]


@pytest.mark.parametrize(
    "reading",
    [hdf5.translate_errors, lambda path: zarr_reader.translate_errors(path, "y"), parquet_reader.translate_errors],
    ids=["HDF5", "Zarr", "Parquet"],
)
@pytest.mark.parametrize(("mistake", "kind"), [("len(3)", TypeError), ("{}['a']", KeyError)])
def test_our_own_mistakes(reading, mistake, kind) -> None:
    """A mistake in our code, made while a recording is read, is not reported as bad data."""
    code = compile(f"def wrong(): return {mistake}", "wrong.py", "exec")
    module = {"__name__": "pitools.dataset.formats.wrong"}
    exec(code, module)
    with pytest.raises(kind), reading(Path("x")):
        module["wrong"]()
