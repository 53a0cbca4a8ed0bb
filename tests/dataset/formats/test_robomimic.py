from __future__ import annotations

import h5py
import numpy as np
import pytest

from pitools.core.errors import DataError
from pitools.dataset.formats import detect


def test_refused_demos(robomimic) -> None:
    """Incomplete demos, and those of an uncommon schema, are rejected with a reason; the others stay."""
    path = robomimic(3, 4, 5, 6, 7)
    with h5py.File(path, "r+") as file:
        del file["data/demo_0/obs/eye_image"], file["data/demo_1/dones"], file["data/demo_4/actions"]
        file["data/demo_1/dones"] = np.zeros(2)
    recording = detect.scan_recording(path, "auto")
    assert [episode.name for episode in recording.episodes] == ["demo_2", "demo_3"]
    assert {item.name: (item.reason, item.where) for item in recording.rejected} == {
        "demo_1": ("/data/demo_1/dones has 2 steps where actions has 4", f"{path}: /data/demo_1"),
        "demo_4": ("no actions", f"{path}: /data/demo_4"),
        "demo_0": ("demo_0 has no obs/eye_image, which demo_2 has", f"{path}: demo_0"),
    }
    assert recording.splits == {"train": ("demo_2", "demo_3"), "valid": ()}


def test_several_instructions(robomimic) -> None:
    """The first of several instructions is the episode's instruction; the list stays in its attributes."""
    path = robomimic(3, 4, 5, 6)
    with h5py.File(path, "r+") as file:
        for name, told in {"demo_0": ["pick", "grasp it"], "demo_1": ["pick"]}.items():
            file[f"data/{name}"].attrs["language"] = told
        file["data/demo_2"].attrs["language"] = np.array([], "S1")
    recording = detect.scan_recording(path, "auto").episodes
    assert [episode.instruction for episode in recording] == ["pick", "pick", "", "reach 3"]
    assert [episode.attributes.get("language") for episode in recording] == [["pick", "grasp it"], None, [], None]


def test_broken_link(robomimic) -> None:
    """A demo with a dangling link is rejected, and the scan does not raise."""
    path = robomimic(3, 4)
    with h5py.File(path, "r+") as file:
        file["data/demo_0/lost"] = h5py.SoftLink("/nowhere")
    recording = detect.scan_recording(path, "auto")
    assert [item.name for item in recording.rejected] == ["demo_0"]
    assert "is a link to another file, or to nothing" in recording.rejected[0].reason


def test_demos_that_are_elsewhere(robomimic, tmp_path) -> None:
    """A link to another file or to nothing, and a dataset named like a demo, are rejected by name; a link within the
    file is followed, and other datasets are ignored."""
    robomimic(3, name="other.hdf5")
    path = robomimic(3, 4)
    with h5py.File(path, "r+") as file:
        file["data/demo_2"] = h5py.ExternalLink("other.hdf5", "/data/demo_0")
        file["data/demo_3"] = h5py.SoftLink("/nowhere")
        file["data/demo_4"] = h5py.SoftLink("/data/demo_0")
        file["data/demo_5"] = np.zeros(3)
        file["data/gains"] = np.zeros(3)
    recording = detect.scan_recording(path, "auto")
    assert [episode.name for episode in recording.episodes] == ["demo_0", "demo_1", "demo_4"]
    assert [item.name for item in recording.rejected] == ["demo_2", "demo_3", "demo_5"]
    with h5py.File(tmp_path / "links.hdf5", "w") as file:
        file["data"] = h5py.ExternalLink("other.hdf5", "/data")
    with pytest.raises(DataError, match="/data is a link"):
        detect.scan_recording(tmp_path / "links.hdf5", "auto")


def test_lost_demos(robomimic) -> None:
    """A file whose demos have fewer steps than it says has a note."""
    path = robomimic(3, 4)
    with h5py.File(path, "r+") as file:
        file["data"].attrs["total"] = np.int64(7)
    notes = detect.scan_recording(path, "auto").notes
    with h5py.File(path, "r+") as file:
        file["data"].attrs["total"] = np.int64(500)
    (note,) = set(detect.scan_recording(path, "auto").notes) - set(notes)
    assert "500" in note


def test_next_obs(robomimic, whole) -> None:
    """next_obs is left out, unless `keep_next_obs` is set."""
    path = robomimic(3)
    assert "next_obs/eye_image" not in detect.scan_recording(path, "auto").episodes[0].columns
    (episode,) = detect.scan_recording(path, "auto", keep_next_obs=True).episodes
    assert whole(episode)["next_obs/eye_image"].shape == (3, 8, 8, 3)


def test_unknown_file(tmp_path) -> None:
    """The error of an unknown layout names the files found, and the files of each layout."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a/x.txt").write_text("")
    with pytest.raises(DataError, match=r"x\.txt") as caught:
        detect.scan_recording(tmp_path / "a", "auto")
    assert "meta/info.json" in caught.value.hint
    with pytest.raises(DataError, match="cannot be read as HDF5"):
        detect.scan_recording(tmp_path / "a/x.txt", "auto")
