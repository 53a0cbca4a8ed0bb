from __future__ import annotations

import io
import json
import shutil
import tempfile
from pathlib import Path
from unittest.mock import patch

import h5py
import msgspec
import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from pitools.core.errors import DataError, UsageError
from pitools.dataset import catalog
from pitools.dataset.ingest import ingest
from pitools.dataset.read import open_dataset
from pitools.dataset.write import grid
from pitools.store import digest, manifest


def same(group: zarr.Group, arrays: dict[str, np.ndarray]) -> None:
    for name, expected in arrays.items():
        assert group[name].dtype == expected.dtype.newbyteorder("=")
        np.testing.assert_array_equal(group[name][:], expected, err_msg=name)


@pytest.mark.parametrize("codec", grid.CODECS)
def test_real_recording(bridge, oracle, tmp_path, codec) -> None:
    """Every array, offset, instruction and split of a real recording is in the store as h5py reads it."""
    version = ingest([bridge], root=tmp_path, name="bridge", codec=codec)
    group = zarr.open_group(version.path, mode="r")
    arrays = oracle([bridge])
    assert set(open_dataset(Path(version.path)).manifest.arrays) == {*arrays, "episode_json"}
    same(group, arrays)
    lines = [json.loads(line) for line in bytes(group["episode_json"][:]).splitlines()]
    with h5py.File(bridge) as file:
        assert [line["language"] for line in lines] == [
            file[f"data/demo_{i}"].attrs["language"] for i in range(len(lines))
        ]
        for split in ("train", "valid"):
            names = {name.decode() for name in file[f"mask/{split}"][:]}
            assert {lines[i]["name"] for i in group.attrs["splits"][split]} == names
        assert group.attrs["sources"][0]["attributes"] == {"env_args": file["data"].attrs["env_args"]}
    assert (version.episodes, version.steps, version.new) == (25, 250, True)


@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_any_episodes(data) -> None:
    """Whatever the lengths, shapes, dtypes and files, over many shards, the store holds what h5py reads."""
    dtypes = st.sampled_from(["<f4", ">f4", "<f8", "<f2", "<i8", ">i2", "u1", "?", "<c8"])
    rows = st.lists(st.integers(1, 5), max_size=3).map(tuple)
    columns = data.draw(st.dictionaries(st.sampled_from(["states", "obs/a", "obs/b_image", "obs/deep/c"]),
                                        st.tuples(rows, dtypes), max_size=3))  # fmt: skip
    files = data.draw(st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=12), min_size=1, max_size=2))
    codec = data.draw(st.sampled_from(grid.CODECS))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    expected: dict[str, list[np.ndarray]] = {}
    with tempfile.TemporaryDirectory() as made:
        paths = [Path(made) / f"r{i}.hdf5" for i in range(len(files))]
        for path, lengths in zip(paths, files, strict=True):
            with h5py.File(path, "w") as file:
                for i, steps in enumerate(lengths):
                    for key, (row, dtype) in (columns | {"actions": ((7,), "<f4")}).items():
                        values = rng.integers(0, 200, (steps, *row)).astype(dtype)
                        file[f"data/demo_{i}/{key}"] = values
                        name = {"actions": "action", "states": "state"}.get(key, key)
                        expected.setdefault(name, []).append(values)
        with patch.multiple(grid, CHUNK_BYTES=512, SHARD_BYTES=2048):
            version = ingest(paths, root=Path(made) / "root", name="x", codec=codec)
        group = zarr.open_group(version.path, mode="r")
        same(group, {name: np.concatenate(parts) for name, parts in expected.items()})
        same(group, {"episode_offsets": np.cumsum([0, *(steps for lengths in files for steps in lengths)])})


def test_counted_order(robomimic, tmp_path) -> None:
    """demo_2 comes before demo_10, and episode_2.hdf5 before episode_10.hdf5, whatever order they are given in."""
    paths = [robomimic(*[1] * 12, name=f"take_{i}.hdf5") for i in (2, 10)]
    version = ingest(paths[::-1], root=tmp_path / "root", name="x")
    opened = open_dataset(Path(version.path))
    assert [episode["name"] for episode in opened.episodes] == [f"demo_{i}" for i in range(12)] * 2
    assert [episode["source"] for episode in opened.episodes] == [0] * 12 + [1] * 12
    assert [source["file"] for source in opened.manifest.source] == ["take_2.hdf5", "take_10.hdf5"]
    assert opened.splits == {"train": [*range(1, 12), *range(13, 24)], "valid": [0, 12]}


@pytest.mark.parametrize("compressed", [False, True])
def test_aloha(aloha, tmp_path, compressed) -> None:
    """ALOHA episodes, raw or as JPEG rows, become the same arrays under the same names as robomimic's."""
    paths = [aloha(number, steps, compressed=compressed) for number, steps in ((0, 5), (1, 40))]
    group = zarr.open_group(ingest(paths, root=tmp_path / "root", name="x").path, mode="r")
    files = [h5py.File(path) for path in paths]
    keys = {"action": "action", "obs/qpos": "observations/qpos", "obs/qvel": "observations/qvel"}
    same(group, {name: np.concatenate([file[key][:] for file in files]) for name, key in keys.items()})
    same(group, {"episode_offsets": np.array([0, 5, 45])})
    for camera in ("top", "wrist"):
        rows = [row for file in files for row in file[f"observations/images/{camera}"]]
        frames = [np.asarray(Image.open(io.BytesIO(row.tobytes()))) for row in rows] if compressed else rows
        same(group, {f"obs/{camera}_image": np.stack(frames)})
    first = json.loads(bytes(group["episode_json"][:]).splitlines()[0])
    assert first["attributes"] == {"compress": compressed, "sim": True}
    assert first["name"] == "episode_0"
    assert "compress_len" not in group


def test_skip(robomimic, tmp_path) -> None:
    """Arrays whose name matches a --skip glob are left out, and next_obs always is."""
    version = ingest([robomimic(3)], root=tmp_path / "root", name="x", skip=["obs/*", "reward"])
    assert set(open_dataset(Path(version.path)).arrays) == {"action", "done"}


def test_again_changes_nothing(robomimic, tmp_path) -> None:
    """The second ingest of the same content publishes nothing, touches no file, and says so."""
    source = robomimic(3, 4)
    first = ingest([source], root=tmp_path / "root", name="x")
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "root").rglob("*")}
    again = ingest([source], root=tmp_path / "root", name="x")
    assert again == msgspec.structs.replace(first, new=False)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "root").rglob("*")} == stamps


def test_version_is_content(robomimic, tmp_path) -> None:
    """The version depends on content and options only: not on place, time or root; every file is the same byte for
    byte."""
    source = robomimic(30, 40)
    (tmp_path / "else").mkdir()
    copy = Path(shutil.copyfile(source, tmp_path / "else" / source.name))
    one, two = (ingest([path], root=tmp_path / f"root{i}", name="x") for i, path in enumerate((source, copy)))
    assert one.version == two.version
    files = [{str(path.relative_to(version.path)): path.read_bytes() for path in Path(version.path).rglob("*")
              if path.is_file()} for version in (one, two)]  # fmt: skip
    assert files[0] == files[1]
    other = ingest([source], root=tmp_path / "root0", name="x", codec="raw")
    assert other.new
    assert other.version != one.version


def test_manifest_lists_every_file(robomimic, tmp_path) -> None:
    """The manifest names each file with its true size and digest, says where it came from, and names the version."""
    source = robomimic(3)
    version = ingest([source], root=tmp_path / "root", name="x", codec="zstd", skip=["done"])
    folder = Path(version.path)
    kept, data = manifest.load(folder)
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert {entry.path for entry in kept.files} == found - {"manifest.json"}
    assert all(digest.of_file(folder / entry.path) == (entry.bytes, entry.digest) for entry in kept.files)
    size, text = digest.of_file(source)
    (provenance,) = kept.source
    assert provenance.pop("pitools")
    assert provenance == {
        "file": "reach.hdf5", "bytes": size, "digest": text, "layout": "robomimic", "codec": "zstd", "skip": ["done"],
    }  # fmt: skip
    assert manifest.version(data) == folder.name == version.version
    assert (version.bytes, version.files, version.source_bytes) == (kept.total_bytes, len(found) - 1, size)


def test_damage_is_not_taken_for_done(robomimic, tmp_path) -> None:
    """A published version that lost a shard is named as damaged by the next ingest, never reported as done."""
    source = robomimic(3)
    version = ingest([source], root=tmp_path / "root", name="x")
    (Path(version.path) / "action/c/0/0").unlink()
    with pytest.raises(DataError, match="action/c/0/0 is missing") as caught:
        ingest([source], root=tmp_path / "root", name="x")
    assert caught.value.where == version.path


def test_given_twice(robomimic, tmp_path) -> None:
    """The same recording given twice, be it through a link, is a usage error."""
    source = robomimic(3)
    (tmp_path / "link.hdf5").symlink_to(source)
    with pytest.raises(UsageError, match="twice"):
        ingest([source, tmp_path / "link.hdf5"], root=tmp_path / "root", name="x")


def test_linked_name(robomimic, tmp_path) -> None:
    """A recording reached by a link goes by the link's name."""
    (tmp_path / "take.hdf5").symlink_to(robomimic(3))
    version = ingest([tmp_path / "take.hdf5"], root=tmp_path / "root", name="x")
    assert open_dataset(Path(version.path)).manifest.source[0]["file"] == "take.hdf5"


def test_record_keys() -> None:
    """The keys of pit.dataset/1 and pit.array/1 only ever grow."""
    assert catalog.Version.__struct_fields__ == (
        "name", "version", "path", "episodes", "steps", "bytes", "files", "source_bytes", "published", "new",
    )  # fmt: skip
    assert catalog.Array.__struct_fields__ == ("array", "shape", "dtype", "bytes", "files")
