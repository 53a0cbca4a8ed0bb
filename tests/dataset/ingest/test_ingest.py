from __future__ import annotations

import io
import json
import os
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
from pitools.dataset.catalog import retirement
from pitools.dataset.ingest import chunking, execute
from pitools.dataset.ingest.ingest import ingest
from pitools.dataset.ingest.scan import EpisodeRecord
from pitools.dataset.reader import open_dataset
from pitools.dataset.versions import VersionInfo, describe_version
from pitools.store import digest, manifest
from pitools.store.resolve import resolve_version
from pitools.store.retirement import read_retirements


def same(group: zarr.Group, arrays: dict[str, np.ndarray]) -> None:
    for name, expected in arrays.items():
        assert group[name].dtype == expected.dtype.newbyteorder("=")
        np.testing.assert_array_equal(group[name][:], expected, err_msg=name)


@pytest.mark.parametrize("codec", chunking.CODECS)
def test_real_recording(bridge, oracle, tmp_path, codec) -> None:
    """Every array, offset, instruction and split of a real recording is in the store as h5py reads it."""
    version = ingest([bridge], root=tmp_path, name="bridge", codec=codec)
    group = zarr.open_group(version.path, mode="r")
    arrays = oracle([bridge])
    assert set(open_dataset(Path(version.path)).manifest.arrays) == {*arrays, "episode_json"}
    same(group, arrays)
    lines = [json.loads(line) for line in bytes(group["episode_json"][:]).splitlines()]
    with h5py.File(bridge) as file:
        assert [line["instruction"] for line in lines] == [
            file[f"data/demo_{i}"].attrs["language"] for i in range(len(lines))
        ]
        for split in ("train", "valid"):
            names = {name.decode() for name in file[f"mask/{split}"][:]}
            assert {lines[i]["name"] for i in group.attrs["splits"][split]} == names
        assert group.attrs["recordings"][0]["attributes"] == {"env_args": file["data"].attrs["env_args"]}
    assert (version.episodes, version.steps, version.new) == (25, 250, True)


@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_any_episodes(data) -> None:
    """Whatever the lengths, shapes, dtypes and files, over many shards, the store holds what h5py reads."""
    dtypes = st.sampled_from(["<f4", ">f4", "<f8", "<f2", "<i8", ">i2", "u1", "?", "<c8"])
    rows = st.lists(st.integers(1, 5), max_size=3).map(tuple)
    columns = data.draw(
        st.dictionaries(
            st.sampled_from(["states", "obs/a", "obs/b_image", "obs/deep/c"]), st.tuples(rows, dtypes), max_size=3
        )
    )
    files = data.draw(st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=12), min_size=1, max_size=2))
    codec = data.draw(st.sampled_from(chunking.CODECS))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    expected: dict[str, list[np.ndarray]] = {}
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"r{i}.hdf5" for i in range(len(files))]
        for path, lengths in zip(paths, files, strict=True):
            with h5py.File(path, "w") as file:
                for i, steps in enumerate(lengths):
                    for key, (row, dtype) in (columns | {"actions": ((7,), "<f4")}).items():
                        values = rng.integers(0, 200, (steps, *row)).astype(dtype)
                        file[f"data/demo_{i}/{key}"] = values
                        name = {"actions": "action", "states": "state"}.get(key, key)
                        expected.setdefault(name, []).append(values)
        with patch.multiple(chunking, CHUNK_BYTES=512, SHARD_BYTES=2048):
            version = ingest(paths, root=Path(folder) / "root", name="x", codec=codec)
        group = zarr.open_group(version.path, mode="r")
        same(group, {name: np.concatenate(parts) for name, parts in expected.items()})
        same(group, {"episode_offsets": np.cumsum([0, *(steps for lengths in files for steps in lengths)])})


def test_counted_order(robomimic, tmp_path) -> None:
    """demo_2 comes before demo_10, and episode_2.hdf5 before episode_10.hdf5, whatever order they are given in."""
    paths = [robomimic(*[1] * 12, name=f"take_{i}.hdf5") for i in (2, 10)]
    version = ingest(paths[::-1], root=tmp_path / "root", name="x")
    opened = open_dataset(Path(version.path))
    assert [episode["name"] for episode in opened.episodes] == [f"demo_{i}" for i in range(12)] * 2
    assert [episode["recording"] for episode in opened.episodes] == [0] * 12 + [1] * 12
    assert [record["file"] for record in opened.manifest.recordings] == ["take_2.hdf5", "take_10.hdf5"]
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
    """Arrays whose name matches a --skip-array glob are left out, and next_obs always is."""
    version = ingest([robomimic(3)], root=tmp_path / "root", name="x", skip_arrays=["obs/*", "reward"])
    assert set(open_dataset(Path(version.path)).arrays) == {"action", "done"}


def test_again_changes_nothing(robomimic, tmp_path) -> None:
    """The second ingest of the same content publishes nothing, touches no file, and says so."""
    source = robomimic(3, 4)
    first = ingest([source], root=tmp_path / "root", name="x")
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "root").rglob("*")}
    version = ingest([source], root=tmp_path / "root", name="x")
    assert version == msgspec.structs.replace(first, new=False)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "root").rglob("*")} == stamps


def test_version_is_content(robomimic, tmp_path) -> None:
    """The version depends on content and options only: not on place, time or root; every file is the same byte for
    byte, but for the time of its publication."""
    source = robomimic(30, 40)
    (tmp_path / "else").mkdir()
    copy = Path(shutil.copyfile(source, tmp_path / "else" / source.name))
    first, two = (ingest([path], root=tmp_path / f"root{i}", name="x") for i, path in enumerate((source, copy)))
    assert first.version == two.version
    files = [
        {
            str(path.relative_to(version.path)): path.read_bytes()
            for path in Path(version.path).rglob("*")
            if path.is_file() and path.name != "published.json"
        }
        for version in (first, two)
    ]
    assert files[0] == files[1]
    other = ingest([source], root=tmp_path / "root0", name="x", codec="raw")
    assert other.new
    assert other.version != first.version


def test_newest_is_what_was_published_last(robomimic, tmp_path) -> None:
    """A touched or copied manifest changes neither which version is the newest nor whether one is retired."""
    root = tmp_path / "root"
    old, new = (ingest([robomimic(n, name=f"{n}.hdf5")], root=root, name="x") for n in (3, 4))
    retirement.retire_version(Path(ingest([robomimic(5, name="5.hdf5")], root=root, name="x").path))
    os.utime(Path(old.path) / "manifest.json")
    copy = tmp_path / "copy"
    shutil.copytree(root, copy, copy_function=shutil.copyfile)
    shutil.rmtree(copy / "x" / old.version)
    shutil.copytree(old.path, copy / "x" / old.version, copy_function=shutil.copyfile)
    for folder in (root, copy):
        assert resolve_version(folder / "x").name == new.version
        assert describe_version(folder / "x" / new.version)[0].published == new.published
        assert len(read_retirements(folder, "x")) == 1


def test_manifest_lists_every_file(robomimic, tmp_path) -> None:
    """The manifest names each file with its true size and digest, says where it came from, and names the version."""
    source = robomimic(3)
    version = ingest([source], root=tmp_path / "root", name="x", codec="zstd", skip_arrays=["done"])
    folder = Path(version.path)
    retained, data = manifest.load_manifest(folder)
    actual = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert {entry.path for entry in retained.files} == actual - {"manifest.json", "published.json"}
    assert all(digest.digest_file(folder / entry.path) == (entry.bytes, entry.digest) for entry in retained.files)
    size, text = digest.digest_file(source)
    (provenance,) = retained.recordings
    assert provenance.pop("pitools")
    assert provenance == {
        "file": "reach.hdf5",
        "bytes": size,
        "digest": text,
        "layout": "robomimic",
        "codec": "zstd",
        "skip_arrays": ["done"],
    }
    assert manifest.version_of(data) == folder.name == version.version
    assert (version.bytes, version.files, version.recording_bytes) == (retained.total_bytes, len(actual) - 2, size)


def test_damage_is_not_taken_for_done(robomimic, tmp_path) -> None:
    """A published version that lost a shard is named as damaged by the next ingest, never reported as done."""
    source = robomimic(3)
    version = ingest([source], root=tmp_path / "root", name="x")
    (Path(version.path) / "action/c/0/0").unlink()
    with pytest.raises(DataError, match="action/c/0/0") as caught:
        ingest([source], root=tmp_path / "root", name="x")
    assert caught.value.where == version.path


@pytest.mark.parametrize("lost", [True, False])
def test_manifest_is_restored(robomimic, tmp_path, lost) -> None:
    """A version whose manifest is lost or damaged has it again after its recordings are ingested again."""
    source = robomimic(3)
    version = ingest([source], root=tmp_path / "root", name="x")
    path = Path(version.path) / "manifest.json"
    data = path.read_bytes()
    path.unlink()
    if not lost:
        path.write_bytes(data[:-9])
    again = ingest([source], root=tmp_path / "root", name="x")
    assert (again.version, again.new, path.read_bytes()) == (version.version, False, data)
    assert not (tmp_path / "root/.tmp").exists()


def test_given_twice(robomimic, tmp_path) -> None:
    """The same recording given twice, be it through a link, is a usage error."""
    source = robomimic(3)
    (tmp_path / "link.hdf5").symlink_to(source)
    with pytest.raises(UsageError, match="twice"):
        ingest([source, tmp_path / "link.hdf5"], root=tmp_path / "root", name="x")


def test_linked_name(robomimic, tmp_path) -> None:
    """A recording a link leads goes by the link's name."""
    (tmp_path / "take.hdf5").symlink_to(robomimic(3))
    version = ingest([tmp_path / "take.hdf5"], root=tmp_path / "root", name="x")
    assert open_dataset(Path(version.path)).manifest.recordings[0]["file"] == "take.hdf5"


def test_record_keys() -> None:
    """The keys of pit.dataset-version/1 and pit.dataset-scanned-episode/1 only ever grow."""
    assert VersionInfo.__struct_fields__ == (
        "name",
        "version",
        "path",
        "episodes",
        "steps",
        "bytes",
        "files",
        "recording_bytes",
        "published",
        "new",
    )
    assert EpisodeRecord.__struct_fields__ == ("file", "episode", "steps", "instruction", "accepted", "reason")


def test_workers_do_not_show(robomimic, tmp_path, monkeypatch) -> None:
    """With one worker and with three, in this process or in others, the version is the same to the bit."""
    monkeypatch.setattr(execute, "_SERIAL_BYTES", 0)
    with patch.multiple(chunking, CHUNK_BYTES=2048, SHARD_BYTES=8192):
        paths = [robomimic(20, 33, name=f"r{i}.hdf5", seed=i) for i in range(2)]
        created = [ingest(paths, root=tmp_path / f"root{n}", name="x", codec="raw", workers=n) for n in (1, 3)]
    assert created[0].version == created[1].version
    assert created[0].files > 10


def test_statistics(robomimic, aloha, tmp_path) -> None:
    """The manifest says of each vector's columns and image's channels what NumPy says; of images one frame in 32."""
    path = robomimic(50, 60)
    with h5py.File(path, "r+") as file:
        file["data/demo_1/actions"][7, 2] = np.nan
        file["data/demo_1/actions"][8, 2] = np.inf
    with patch.multiple(chunking, CHUNK_BYTES=1024, SHARD_BYTES=4096):
        version = ingest([path], root=tmp_path / "root", name="x")
    opened = open_dataset(Path(version.path))
    assert isinstance(opened.manifest.statistics, dict)
    assert set(opened.manifest.statistics) == {"action", "reward", "done", "obs/eye_image"}
    action = opened.read("action", 0, 110).astype(float)
    actual = opened.manifest.statistics["action"]
    assert (actual.rows, actual.non_finite) == (110, 2)
    action[~np.isfinite(action)] = np.nan
    for kept, expected in (
        (actual.minimum, np.nanmin),
        (actual.maximum, np.nanmax),
        (actual.mean, np.nanmean),
        (actual.deviation, np.nanstd),
    ):
        np.testing.assert_allclose(kept, expected(action, axis=0), rtol=1e-12)
    frames = opened.read("obs/eye_image", 0, 110)[::32].astype(float)
    actual = opened.manifest.statistics["obs/eye_image"]
    assert actual.rows == 4
    np.testing.assert_allclose(actual.mean, frames.mean(axis=(0, 1, 2)), rtol=1e-12)
    np.testing.assert_allclose(actual.deviation, frames.std(axis=(0, 1, 2)), rtol=1e-12)


def test_tasks(robomimic, tmp_path) -> None:
    """The manifest counts the episodes of each instruction."""
    version = ingest([robomimic(3, 4), robomimic(5, name="b.hdf5")], root=tmp_path / "root", name="x")
    assert open_dataset(Path(version.path)).manifest.instructions == {"reach 0": 2, "reach 1": 1}


@pytest.fixture
def odd(robomimic) -> Path:
    """A recording of four episodes, of which the second and the third are not whole."""
    path = robomimic(5, 6, 7, 8)
    with h5py.File(path, "r+") as file:
        for number in (1, 2):
            del file[f"data/demo_{number}/rewards"]
            file[f"data/demo_{number}/rewards"] = np.zeros(3, np.float32)
    return path


def test_refused_recordings_are_no_episodes(odd, tmp_path) -> None:
    """A recording that is refused as a whole is not counted as an episode."""
    (tmp_path / "torn.hdf5").write_bytes(odd.read_bytes()[:3000])
    with pytest.raises(DataError, match="2 of 4 "):
        ingest([odd, tmp_path / "torn.hdf5"], root=tmp_path / "root", name="x")


def test_refused(odd, tmp_path, capsys) -> None:
    """Every refused episode is named before the ingest is refused, nothing is left of it, and the report says why."""
    with pytest.raises(DataError, match="2 of 4 episodes are refused"):
        ingest([odd], root=tmp_path / "root", name="x", report=tmp_path / "report.jsonl")
    talk = capsys.readouterr().err
    assert "demo_1" in talk
    assert "demo_2" in talk
    assert not (tmp_path / "root").exists()
    lines = [json.loads(line) for line in (tmp_path / "report.jsonl").read_text().splitlines()]
    assert [(line["episode"], line["accepted"]) for line in lines] == [
        ("demo_0", True),
        ("demo_3", True),
        ("demo_1", False),
        ("demo_2", False),
    ]
    assert "rewards has 3 steps" in lines[2]["reason"]


def test_skip_rejected(odd, robomimic, tmp_path) -> None:
    """With skip_rejected the others make a version; its splits and its provenance are without the rejected ones."""
    broken = tmp_path / "none.hdf5"
    broken.write_text("no")
    paths = [odd, broken]
    version = ingest(paths, root=tmp_path / "root", name="x", skip_rejected=True, report=tmp_path / "report.jsonl")
    opened = open_dataset(Path(version.path))
    assert [episode["name"] for episode in opened.episodes] == ["demo_0", "demo_3"]
    assert opened.splits == {"train": [1], "valid": [0]}
    (provenance,) = opened.manifest.recordings
    assert provenance["rejected"] == ["demo_1", "demo_2"]
    assert not ingest(paths, root=tmp_path / "root", name="x", skip_rejected=True).new
    assert '"file":"' + str(broken) in (tmp_path / "report.jsonl").read_text()
    with pytest.raises(DataError, match="no episode is left"):
        ingest([broken], root=tmp_path / "root", name="x", skip_rejected=True)


def test_many_recordings(robomimic, tmp_path) -> None:
    """More recordings than one process looks at keep their natural order."""
    paths = [robomimic(2, name=f"r{i}.hdf5", seed=i) for i in range(20)]
    version = ingest(paths[::-1], root=tmp_path / "root", name="x", workers=2)
    assert [record["file"] for record in open_dataset(Path(version.path)).manifest.recordings] == [
        f"r{i}.hdf5" for i in range(20)
    ]


def test_schema(robomimic, tmp_path) -> None:
    """A transform renames and drops; its text is part of the provenance, and makes another version."""
    path, transform = robomimic(4), tmp_path / "transform.toml"
    transform.write_text('drop = ["done"]\n[rename]\n"obs/eye_image" = "obs/front_image"\n')
    version = ingest([path], root=tmp_path / "root", name="x", transform=transform)
    opened = open_dataset(Path(version.path))
    assert set(opened.arrays) == {"action", "reward", "obs/front_image"}
    assert opened.manifest.recordings[0]["transform"]["text"] == transform.read_text()
    assert not ingest([path], root=tmp_path / "root", name="x", transform=transform).new
    assert ingest([path], root=tmp_path / "root", name="x").new


def test_folders(robomimic, tmp_path) -> None:
    """A recording that is a folder, here a version of ours, is one record: its digest is that of all its files."""
    first = ingest([robomimic(5, 6)], root=tmp_path / "root", name="x")
    version = ingest([Path(first.path)], root=tmp_path / "root", name="y", layout="zarr")
    one, two = open_dataset(Path(first.path)), open_dataset(Path(version.path))
    for name in one.arrays:
        np.testing.assert_array_equal(one.read(name, 0, 11), two.read(name, 0, 11))
    (provenance,) = two.manifest.recordings
    assert (provenance["file"], provenance["layout"]) == (first.version, "zarr")
    assert provenance["digest"].startswith("xxh3_128:")
    assert not ingest([Path(first.path)], root=tmp_path / "root", name="y", layout="zarr").new


def test_what_is_odd_is_told_once(robomimic, tmp_path, capsys) -> None:
    """A note of a recording, and recordings that are the same to the byte, are said on stderr, each once."""
    folder = tmp_path / "z.zarr"
    group = zarr.create_group(folder)
    for name in ("action", "reward"):
        group.create_array(name, shape=(9, 7), chunks=(3, 7), dtype="f4", fill_value=0)[:] = 1
    group.create_array("episode_ends", data=np.array([4, 9]))
    (folder / "reward/c/1/0").unlink()
    ingest([folder], root=tmp_path / "root", name="z", workers=2)
    (note,) = capsys.readouterr().err.splitlines()
    assert note.startswith(f"pit: note: {folder}: reward: 1 chunks ")
    paths = [robomimic(3, name="a.hdf5"), robomimic(3, name="b.hdf5")]
    ingest(paths, root=tmp_path / "root", name="x", skip_arrays=["next_obs/*"])
    assert capsys.readouterr().err == "pit: note: b.hdf5 has the same bytes as a.hdf5\n"
    (tmp_path / "other").mkdir()
    paths[1] = paths[1].rename(tmp_path / "other/a.hdf5")
    ingest(paths, root=tmp_path / "root", name="y", skip_arrays=["next_obs/*"])
    assert capsys.readouterr().err.count("a.hdf5") == 2


def test_keys_of_records(robomimic, tmp_path) -> None:
    """The keys that scripts read are these; more may come, none may go."""
    version = ingest([robomimic(3)], root=tmp_path / "root", name="x", report=tmp_path / "report.jsonl")
    assert list(msgspec.to_builtins(version)) == [
        "schema",
        "name",
        "version",
        "path",
        "episodes",
        "steps",
        "bytes",
        "files",
        "recording_bytes",
        "published",
        "new",
    ]
    assert list(json.loads((tmp_path / "report.jsonl").read_text())) == [
        "schema",
        "file",
        "episode",
        "steps",
        "instruction",
        "accepted",
        "reason",
    ]
    assert EpisodeRecord.__struct_config__.tag == "pit.dataset-scanned-episode/1"
    record = json.loads((Path(version.path) / "manifest.json").read_text())
    assert set(record) == {
        "schema",
        "name",
        "episodes",
        "steps",
        "arrays",
        "files",
        "recordings",
        "parent",
        "statistics",
        "instructions",
    }
    assert set(record["recordings"][0]) == {"file", "bytes", "digest", "layout", "codec", "skip_arrays", "pitools"}
    assert set(record["statistics"]["action"]) == {"rows", "minimum", "maximum", "mean", "deviation", "non_finite"}
    lines = bytes(zarr.open_array(Path(version.path) / "episode_json", mode="r")[:]).splitlines()
    assert list(json.loads(lines[0])) == ["name", "recording", "steps", "instruction", "attributes"]
