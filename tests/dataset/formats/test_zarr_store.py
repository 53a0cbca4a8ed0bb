from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import msgspec
import numpy as np
import pytest
import zarr

from pitools.core.errors import DataError
from pitools.core.fs import exchange_names
from pitools.dataset.formats import detect
from pitools.dataset.ingest import chunking
from pitools.dataset.ingest.ingest import ingest
from pitools.store import manifest as manifests
from pitools.store import version_state
from pitools.store.manifest import Subset
from pitools.store.version_state import Quarantine

LENGTHS = (7, 30, 5)
OFFSETS = (0, 7, 37, 42)


@pytest.fixture
def buffer(tmp_path: Path) -> Callable[..., tuple[Path, dict[str, np.ndarray]]]:
    """Writes a replay buffer as diffusion-policy does, and says what is in it."""

    def write(zarr_format: int = 2, **options: object) -> tuple[Path, dict[str, np.ndarray]]:
        rng, path = np.random.default_rng(0), tmp_path / "buffer.zarr"
        arrays = {
            "img": rng.integers(0, 256, (42, 9, 8, 3), np.uint8),
            "action": rng.normal(size=(42, 2)).astype(np.float32),
            "reward": np.zeros(42, np.float32),
        }
        root = zarr.open_group(path, mode="w", zarr_format=zarr_format)
        root.attrs["robot"] = "pusht"
        for name, values in arrays.items():
            settings = {"chunks": (10, *values.shape[1:])} | options
            array = root.create_array(f"data/{name}", shape=values.shape, dtype=values.dtype, **settings)
            array[:] = values
        root.create_array("meta/episode_ends", data=np.array(OFFSETS[1:]))
        return path, arrays

    return write


@pytest.mark.parametrize("part", [0, 4])
@pytest.mark.parametrize(
    ("zarr_format", "options"),
    [
        (2, {}),
        (2, {"compressors": None}),
        (2, {"chunks": "row cut"}),
        (3, {}),
        (3, {"compressors": None}),
        (3, {"chunks": "row cut"}),
        (3, {"shards": "yes"}),
    ],
)
def test_replay_buffer(buffer, whole, zarr_format, options, part) -> None:
    """A replay buffer of either format, however it is cut, is its episodes, read in one go or in parts."""
    if options.get("chunks"):
        path, arrays = buffer(zarr_format, chunks="auto")
        root = zarr.open_group(path, mode="r+")
        del root["data/img"]
        array = root.create_array("data/img", shape=(42, 9, 8, 3), dtype="u1", chunks=(4, 5, 8, 2))
        array[:] = arrays["img"]
    elif options.get("shards"):
        path, arrays = buffer(zarr_format, chunks="auto")
        root = zarr.open_group(path, mode="r+")
        del root["data/img"]
        array = root.create_array(
            "data/img", shape=(42, 9, 8, 3), dtype="u1", chunks=(3, 9, 8, 3), shards=(12, 9, 8, 3)
        )
        array[:] = arrays["img"]
    else:
        path, arrays = buffer(zarr_format, **options)
    recording = detect.scan_recording(path, "auto")
    assert (recording.layout, recording.rejected, recording.attributes) == ("zarr", (), {"robot": "pusht"})
    assert [(episode.name, episode.steps) for episode in recording.episodes] == [
        (f"episode_{i}", steps) for i, steps in enumerate(LENGTHS)
    ]
    for episode, low, high in zip(recording.episodes, OFFSETS[:-1], OFFSETS[1:], strict=True):
        contents = whole(episode, part)
        assert set(contents) == set(arrays)
        for name, values in arrays.items():
            np.testing.assert_array_equal(contents[name], values[low:high])
    assert {str(file.relative_to(path)) for file in recording.files} == {
        str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()
    }


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_holes(buffer, whole, zarr_format) -> None:
    """A missing chunk of frames rejects its episodes; one of rewards is read as the fill value, with a note."""
    path, arrays = buffer(zarr_format)
    recording = detect.scan_recording(path, "auto")
    (note,) = recording.notes
    assert note.startswith("reward: 5 chunks ")
    assert (whole(recording.episodes[1])["reward"] == 0).all()
    (path / "data/img" / ("c/3/0/0/0" if zarr_format == 3 else "3.0.0.0")).unlink()
    recording = detect.scan_recording(path, "auto")
    assert [episode.name for episode in recording.episodes] == ["episode_0"]
    assert [(item.name, item.reason) for item in recording.rejected] == [
        (f"episode_{i}", "img: no file for steps 30 to 40") for i in (1, 2)
    ]
    np.testing.assert_array_equal(whole(recording.episodes[0])["img"], arrays["img"][:7])


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_lost_actions(buffer, zarr_format) -> None:
    """A missing chunk of actions, which would read as zeros, rejects its episodes."""
    path, _ = buffer(zarr_format)
    (path / ("data/action/1.0" if zarr_format == 2 else "data/action/c/1/0")).unlink()
    recording = detect.scan_recording(path, "auto")
    assert [(item.name, item.reason) for item in recording.rejected] == [
        ("episode_1", "action: no file for steps 10 to 20")
    ]


def test_lost_while_read(buffer, whole) -> None:
    """Reading a truncated chunk raises an error with its array."""
    path, _ = buffer(3)
    recording = detect.scan_recording(path, "auto")
    chunk = path / "data/img/c/0/0/0/0"
    chunk.write_bytes(chunk.read_bytes()[:-5])
    with pytest.raises(DataError, match="img"):
        whole(recording.episodes[0])


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda root: root.__delitem__("meta/episode_ends"), "meta/episode_ends"),
        (lambda root: root.create_array("data/short", data=np.zeros((41, 2))), r"data/short: .*\(41, 2\)"),
        (lambda root: root.create_array("data/when", data=np.zeros(42, "M8[s]")), "data/when: dtype datetime64"),
        (lambda root: root["meta/episode_ends"].__setitem__(1, 3), "meta/episode_ends.*ascending"),
        (lambda root: root.create_array("meta/version", data=np.zeros(3)), r"meta/version: .*\(3,\)"),
    ],
)
def test_what_cannot_be_stored(buffer, change, what) -> None:
    """The error of an array without a row per step, or not of numbers, names it; it is never left out silently."""
    path, _ = buffer(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # datetimes have no place in Zarr v3's specification yet
        change(zarr.open_group(path, mode="r+"))
    with pytest.raises(DataError, match=what) as caught:
        detect.scan_recording(path, "auto")
    assert caught.value.where.startswith(str(path))


def test_empty_episode(buffer) -> None:
    """An episode without steps is rejected, the others are not."""
    path, _ = buffer(3)
    zarr.open_group(path, mode="r+")["meta/episode_ends"][:] = [7, 7, 42]
    recording = detect.scan_recording(path, "auto")
    assert [item.name for item in recording.rejected] == ["episode_1"]
    assert [episode.steps for episode in recording.episodes] == [7, 35]


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_published_version(robomimic, whole, tmp_path, codec) -> None:
    """A published version is a recording with the same episodes, instructions, attributes and splits."""
    paths = [robomimic(30, 41, name="a.hdf5"), robomimic(5, 6, 7, name="b.hdf5", seed=1)]
    version = Path(ingest(paths, root=tmp_path / "root", name="x", codec=codec).path)
    recording = detect.scan_recording(version, "auto")
    before = [episode for path in paths for episode in detect.scan_recording(path, "auto").episodes]
    assert [episode.name for episode in recording.episodes] == [
        "a/demo_0",
        "a/demo_1",
        "b/demo_0",
        "b/demo_1",
        "b/demo_2",
    ]
    assert recording.splits == {"train": ("a/demo_1", "b/demo_1", "b/demo_2"), "valid": ("a/demo_0", "b/demo_0")}
    assert recording.attributes["version"] == version.name
    assert recording.files == (version / "manifest.json",)
    for old, new in zip(before, recording.episodes, strict=True):
        assert (new.steps, new.instruction, new.attributes) == (old.steps, old.instruction, old.attributes)
        was, now = whole(old), whole(new, 7)
        assert set(now) == set(was)
        for name, values in was.items():
            np.testing.assert_array_equal(now[name], values)


def test_damaged_version(robomimic, whole, tmp_path) -> None:
    """Reading a flipped bit or a missing shard of a version raises, and never returns zeros."""
    version = Path(ingest([robomimic(30, 41)], root=tmp_path / "root", name="x", codec="raw").path)
    recording = detect.scan_recording(version, "auto")
    shard = version / "obs/eye_image/c/0/0/0/0"
    data = bytearray(shard.read_bytes())
    data[1000] ^= 1
    shard.write_bytes(data)
    with pytest.raises(DataError, match="obs/eye_image/c/0/0/0/0"):
        whole(recording.episodes[0])
    shard.unlink()
    with pytest.raises(DataError, match="No such file"):
        whole(recording.episodes[0])


def test_what_is_said_against_a_version(robomimic, tmp_path) -> None:
    """The scan of a version notes the quarantine of the version, or of its episodes."""
    version = Path(ingest([robomimic(30, 41)], root=tmp_path / "root", name="x").path)
    assert detect.scan_recording(version, "auto").notes == ()
    version_state.set_quarantine(
        version, Quarantine(whole_version=False, set_at="", set_by="", episodes={1: ("frozen",)})
    )
    assert "1 episodes in quarantine" in detect.scan_recording(version, "auto").notes[0]
    version_state.set_quarantine(version, Quarantine(whole_version=True, set_at="", set_by="", reasons=("dark",)))
    assert "in quarantine: dark" in detect.scan_recording(version, "auto").notes[0]


@pytest.mark.parametrize("damage", ["shards", "fill value", "lengths", "name"])
def test_damage_that_checksums_do_not_show(robomimic, tmp_path, damage) -> None:
    """Files with valid checksums that contradict the manifest are refused: a new version would make them permanent."""
    with patch.multiple(chunking, CHUNK_BYTES=512, SHARD_BYTES=2048):
        version = Path(ingest([robomimic(30, 41)], root=tmp_path / "root", name="x", codec="raw").path)
        path = Path(ingest([robomimic(41, 30)], root=tmp_path / "other", name="x", codec="raw").path)
    if damage == "shards":
        exchange_names(version / "obs/eye_image/c/0/0/0/0", version / "obs/eye_image/c/1/0/0/0")
    elif damage == "fill value":
        metadata = version / "action/zarr.json"
        metadata.write_bytes(metadata.read_bytes().replace(b'"fill_value": 0.0', b'"fill_value": 7.0'))
    elif damage == "lengths":
        exchange_names(version / "episode_offsets/c/0", path / "episode_offsets/c/0")
    else:
        version = version.rename(version.with_name("0" * 32))
    with pytest.raises(DataError, match="manifest"):
        ingest([version], root=tmp_path / "new", name="x")
    assert not list((tmp_path / "new").glob("x/*"))


@pytest.mark.parametrize("name", ["img", "action", "reward"])
def test_hole_in_a_shard(buffer, whole, name) -> None:
    """Missing chunks in a shard are an error for frames and actions; rewards read as 0."""
    path, arrays = buffer(3)
    root = zarr.open_group(path, mode="r+")
    del root[f"data/{name}"]
    row = arrays[name].shape[1:]
    array = root.create_array(
        f"data/{name}", shape=(42, *row), dtype=arrays[name].dtype, chunks=(2, *row), shards=(10, *row)
    )
    array[:4] = array[6:] = 1
    first, *others = detect.scan_recording(path, "auto").episodes
    assert all(whole(other)[name].all() for other in others)
    if name != "reward":
        with pytest.raises(DataError, match=f"data/{name}: steps 0 to 7"):
            whole(first)
    else:
        assert whole(first)[name].tolist() == [1, 1, 1, 1, 0, 0, 1]


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("hostile", ["steps", "row", "chunk", "ends", "end chunk"])
def test_metadata_that_declare_too_much(tmp_path, hostile, sharded) -> None:
    """A small store whose metadata declare terabytes is refused before anything of that size is read."""
    path, steps = tmp_path / "small.zarr", 1 << 40 if hostile == "steps" else 4
    root = zarr.open_group(path, mode="w")
    row, chunk = 1 << 36 if hostile == "row" else 2, 1 << 40 if hostile == "chunk" else 2
    shards = {"shards": (2 * chunk, row)} if sharded else {}
    root.create_array("data/state", shape=(steps, row), chunks=(chunk, row), dtype="float32", **shards)
    ends = np.array([2, steps])
    if hostile.startswith("end"):
        size = 1 << 42
        shape, chunks = ((size,), (1 << 20,)) if hostile == "ends" else ((2,), (size,))
        root.create_array("meta/episode_ends", shape=shape, chunks=chunks, dtype="int64")
    else:
        root.create_array("meta/episode_ends", data=ends)
    with pytest.raises(DataError) as caught:
        detect.scan_recording(path, "auto")
    assert caught.value.where.startswith(str(path))


@pytest.mark.parametrize("name", ["data/img/c/0/0/0/0", "data/action/zarr.json", "notes"])
def test_a_pipe_in_a_store(buffer, name) -> None:
    """A pipe, which would block its reader, is refused by its name; links to files are read."""
    path, _ = buffer(3)
    retained = path.with_name("kept")
    (path / "data/action/zarr.json").rename(retained)
    (path / "data/action/zarr.json").symlink_to(retained)
    assert len(detect.scan_recording(path, "auto").episodes) == 3
    (path / name).unlink(missing_ok=True)
    os.mkfifo(path / name)
    with pytest.raises(DataError) as caught:
        detect.scan_recording(path, "auto")
    assert caught.value.where == str(path / name)


def test_checksum(buffer, whole) -> None:
    """In a store with checksums, reading a flipped bit raises, even in a chunk that was read before."""
    from zarr.codecs import Crc32cCodec

    path, _ = buffer(3, compressors=[Crc32cCodec()])
    recording = detect.scan_recording(path, "auto")
    whole(recording.episodes[0])
    chunk = path / "data/img/c/0/0/0/0"
    data = bytearray(chunk.read_bytes())
    data[100] ^= 1
    chunk.write_bytes(data)
    with pytest.raises(DataError, match="img"):
        whole(recording.episodes[0])


@pytest.mark.parametrize("change", ["subset", "episodes"])
def test_part_of_a_version(robomimic, tmp_path, change) -> None:
    """A subset of a version, and a version whose records contradict its episodes, are refused."""
    version = Path(ingest([robomimic(30, 41)], root=tmp_path / "root", name="x").path)
    manifest, _ = manifests.load_manifest(version)
    part = Subset(whole=version.name, arrays=tuple(sorted(manifest.arrays)), steps=((0, 30),))
    changed = msgspec.structs.replace(manifest, **({"subset": part} if change == "subset" else {"episodes": 3}))
    data = manifests.encode_manifest(changed)
    (version / manifests.MANIFEST_FILE).chmod(0o644)
    (version / manifests.MANIFEST_FILE).write_bytes(data)
    path = version.rename(version.with_name(manifests.version_of(data)))
    with pytest.raises(DataError) as caught:
        detect.scan_recording(path, "auto")
    assert (version.name in caught.value.hint) is (change == "subset")


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_two_arrays_of_one_name(buffer, whole, zarr_format) -> None:
    """The error of two arrays that would have the same name has both; --skip-array leaves one out."""
    path, arrays = buffer(zarr_format)
    root = zarr.open_group(path, mode="r+")
    for number, name in enumerate(("action", "data/actions"), 1):
        root.create_array(name, data=arrays["action"] + number)
    with pytest.raises(DataError) as caught:
        detect.scan_recording(path, "auto")
    assert "action and data/action " in caught.value.message
    with pytest.raises(DataError):
        detect.scan_recording(path, "auto", ["data/action"])
    recording = detect.scan_recording(path, "auto", ["data/action", "data/actions"])
    np.testing.assert_array_equal(whole(recording.episodes[0])["action"], arrays["action"][:7] + 1)
