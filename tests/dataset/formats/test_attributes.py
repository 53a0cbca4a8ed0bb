"""Names and attributes that a store or JSON cannot hold as they are, and what arrays say of themselves."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path

import h5py
import numpy as np
import pytest
import xarray
import zarr

from pitools.core.errors import DataError
from pitools.dataset.ingest.ingest import ingest
from pitools.dataset.reader import open_dataset
from pitools.dataset.versions import VersionInfo


@pytest.fixture
def store(tmp_path):
    """What Zarr reads of an ingest of these recordings."""

    def make(*paths: Path, **options) -> tuple[VersionInfo, zarr.Group]:
        version = ingest(list(paths), root=tmp_path / "root", name="x", **options)
        return version, zarr.open_group(version.path, mode="r")

    return make


def test_attributes_that_json_cannot_hold(robomimic, store, capsys) -> None:
    """NaN, infinity, bytes that are not UTF-8 and numbers of many digits are kept as text, and a note says so."""
    path = robomimic(3, 4)
    with h5py.File(path, "r+") as file:
        demo = file["data/demo_1"]
        demo.attrs["noise"], demo.attrs["limits"] = np.nan, np.array([-np.inf, 1.0, np.inf])
        demo.attrs["operator"] = np.bytes_("caf\u00e9".encode("latin-1"))
        demo.attrs.create("place", b"caf\xe9", dtype=h5py.string_dtype())
    version, group = store(path)
    lines = [json.loads(line) for line in bytes(group["episode_json"][:]).splitlines()]
    retained = lines[1]["attributes"]
    assert retained == {
        "noise": "NaN",
        "limits": ["-Infinity", 1.0, "Infinity"],
        "operator": "caf\\xe9",
        "place": "caf\\xe9",
    }
    stderr = capsys.readouterr().err
    assert all(f"attribute {key}: " in stderr for key in retained)
    assert version.episodes == 2


def test_attributes_of_zarr_that_json_cannot_hold(tmp_path, store) -> None:
    """Of a Zarr store too: NaN as its metadata may have it, half a character, and more than 64 bits."""
    root = zarr.open_group(tmp_path / "z", mode="w", zarr_format=2)
    root.create_array("data/action", data=np.ones((4, 2), np.float32))
    root.create_array("meta/episode_ends", data=np.array([2, 4]))
    (tmp_path / "z/.zattrs").write_text('{"a": NaN, "b": "\\ud800", "c": 123456789012345678901234567890}')
    _, group = store(tmp_path / "z")
    assert group.attrs["recordings"][0]["attributes"] == {
        "a": "NaN",
        "b": "\\ud800",
        "c": "123456789012345678901234567890",
    }


def test_attributes_nested_too_deep(tmp_path) -> None:
    """Attributes that are nested deeper than can be followed refuse the recording, as any other fault."""
    root = zarr.open_group(tmp_path / "z", mode="w", zarr_format=2)
    root.create_array("data/action", data=np.ones((4, 2), np.float32))
    root.create_array("meta/episode_ends", data=np.array([2, 4]))
    (tmp_path / "z/.zattrs").write_text('{"a": ' + "[" * 5000 + "]" * 5000 + "}")
    with pytest.raises(DataError):
        ingest([tmp_path / "z"], root=tmp_path / "root", name="x")
    assert not (tmp_path / "root").exists()


def test_a_file_name_that_is_not_text(robomimic, tmp_path) -> None:
    """A recording whose file's name is not UTF-8 is refused before anything is written."""
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.hdf5"))
    robomimic(3).rename(path)
    with pytest.raises(DataError):
        ingest([path], root=tmp_path / "root", name="x")
    assert not (tmp_path / "root").exists()


def test_names_that_a_schema_renames(robomimic, tmp_path, store) -> None:
    """Array names that cannot be stored are taken by [rename], left out by `drop`, and else refused with what to do."""
    path = robomimic(3, 4)
    with h5py.File(path, "r+") as file:
        for demo, steps in (("demo_0", 3), ("demo_1", 4)):
            file[f"data/{demo}/obs/Greifer geöffnet"] = np.arange(steps)
            file[f"data/{demo}/obs/関節"] = np.ones((steps, 2))
    with pytest.raises(DataError) as caught:
        store(path)
    assert "[rename]" in caught.value.hint
    transform = tmp_path / "transform.toml"
    transform.write_text('drop = ["obs/Greifer*"]\n[rename]\n"obs/関節" = "obs/joints"\n')
    _, group = store(path, transform=transform)
    assert group["obs/joints"].shape == (7, 2)
    assert set(group["obs"].array_keys()) == {"joints", "eye_image"}


@pytest.mark.parametrize(("transform", "noted"), [("", True), ("keep_next_obs = true", False)])
def test_next_obs_is_noted(robomimic, tmp_path, store, capsys, transform, noted) -> None:
    """That next_obs is left out is said, once for all recordings."""
    (tmp_path / "transform.toml").write_text(transform)
    store(robomimic(3, name="a1.hdf5"), robomimic(3, name="a2.hdf5", seed=1), transform=tmp_path / "transform.toml")
    assert capsys.readouterr().err.count("next_obs is left out") == noted


def test_units_and_names_of_joints(robomimic, tmp_path, store, capsys) -> None:
    """What all episodes say of an array is kept with it, through renames and appends; what differs is noted."""
    joints = ["shoulder", "elbow", "wrist", "a", "b", "c", "gripper"]

    def described(name: str, unit: str, seed: int) -> Path:
        path = robomimic(3, 4, name=name, seed=seed)
        with h5py.File(path, "r+") as file:
            for demo in file["data"].values():
                demo["actions"].attrs["units"], demo["actions"].attrs["joint_names"] = unit, joints
                demo["obs/eye_image"].attrs["lens"] = 35
        return path

    first, _ = store(described("a.hdf5", "rad", 0))
    transform = tmp_path / "transform.toml"
    transform.write_text('[rename]\naction = "command"\n[cast]\ncommand = "float64"\n')
    _, group = store(Path(first.path), transform=transform)
    assert dict(group["command"].attrs) == {"units": "rad", "joint_names": joints}
    assert group["obs/eye_image"].attrs["lens"] == 35
    assert "is not the same" not in capsys.readouterr().err
    _, group = store(described("b.hdf5", "deg", 1), append=Path(first.path))
    assert dict(group["action"].attrs) == {"joint_names": joints}
    assert "action: attribute units" in capsys.readouterr().err


def test_names_of_lerobot_features(lerobot, store) -> None:
    """The names that LeRobot has of a feature's columns are kept."""
    dataset = lerobot(5, 6, video=False)
    info = json.loads((dataset.path / "meta/info.json").read_text())
    info["features"]["action"]["names"] = {"motors": ["x", "y", "z"]}
    (dataset.path / "meta/info.json").write_text(json.dumps(info))
    _, group = store(dataset.path)
    assert group["action"].attrs["names"] == {"motors": ["x", "y", "z"]}


def test_axes_have_names(robomimic, store) -> None:
    """Every array names its axes: `steps` is one for all that have it, the others are the array's own."""
    _, group = store(robomimic(3, 4))
    assert group["action"].metadata.dimension_names == ("steps", "action:1")
    assert group["obs/eye_image"].metadata.dimension_names[0] == "steps"
    assert group["episode_offsets"].metadata.dimension_names == ("episode_offsets:0",)


def test_zarr_and_xarray_open_a_version_in_silence(tmp_path, robomimic, store) -> None:
    """Neither warns of anything in a version, and both find all arrays, whatever their groups are called."""
    transform = tmp_path / "transform.toml"
    names = {"obs/eye_image": "obs/eye", "reward": "obs-x/b", "done": "obs/cam/c"}
    transform.write_text("[rename]\n" + "".join(f'"{old}" = "{new}"\n' for old, new in names.items()))
    version, _ = store(robomimic(3, 4), transform=transform)
    path = Path(version.path)
    reference = set(open_dataset(path).arrays) | {"episode_json", "episode_offsets"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        group = zarr.open_group(path, mode="r")
        arrays = {name: node for name, node in group.members(max_depth=None) if isinstance(node, zarr.Array)}
        assert arrays.keys() == reference
        for name, node in arrays.items():
            assert node.metadata.to_dict() == zarr.open(path / name, mode="r").metadata.to_dict()
        assert set(xarray.open_zarr(path).variables) == {name for name in reference if "/" not in name}
        tree = xarray.open_datatree(path, engine="zarr")
    np.testing.assert_array_equal(tree["action"].values, open_dataset(path).read("action", 0, 7))
    assert tree["obs/eye"].sizes["steps"] == 7
