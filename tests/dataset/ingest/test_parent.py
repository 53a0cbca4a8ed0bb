from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from unittest.mock import patch

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pitools.core.errors import DataError, UsageError
from pitools.core.fs import exchange_names
from pitools.dataset.ingest import chunking, finalize, shard_worker, statistics
from pitools.dataset.ingest.ingest import ingest
from pitools.dataset.reader import open_dataset
from pitools.store import manifest as manifests


def record(path: Path, lengths: list[int], seed: int) -> Path:
    """Episodes of noise with a vector, a flag and images."""
    rng = np.random.default_rng(seed)
    with h5py.File(path, "w") as file:
        file.create_group("data").attrs["env_args"] = "{}"
        for i, steps in enumerate(lengths):
            demo = file.create_group(f"data/demo_{i}")
            demo.attrs["language"] = f"task {rng.integers(3)}"
            demo["actions"] = rng.normal(size=(steps, 7)).astype(np.float32)
            demo["dones"] = np.arange(steps) == steps - 1
            demo["obs/eye_image"] = rng.integers(0, 256, (steps, 4, 5, 3), np.uint8)
        file["mask/train"] = np.array([f"demo_{i}" for i in range(len(lengths)) if rng.integers(2)], "S")
    return path


def content(version) -> dict[str, bytes]:
    """Every file of a version but its manifest and the time of its publication."""
    folder = Path(version.path)
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name not in ("manifest.json", "published.json")
    }


lengths = st.lists(st.integers(1, 60), min_size=1, max_size=4)


@settings(max_examples=8, deadline=None)
@given(
    first=lengths,
    others=st.lists(lengths, min_size=1, max_size=2),
    codec=st.sampled_from(chunking.CODECS),
    shard=st.sampled_from([1024, 4096]),
)
def test_append_is_ingest_of_all(first, others, codec, shard) -> None:
    """Appended one after the other, recordings give every file that one ingest of all gives, to the byte, and the same
    statistics and instructions; each version names the one before."""
    with tempfile.TemporaryDirectory() as created, patch.multiple(chunking, CHUNK_BYTES=512, SHARD_BYTES=shard):
        folder = Path(created)
        paths = [record(folder / f"r{i}.hdf5", steps, i) for i, steps in enumerate([first, *others])]
        last = ingest(paths[:1], root=folder / "root", name="x", codec=codec)
        for path in paths[1:]:
            appended = ingest([path], root=folder / "root", name="x", append=Path(last.path), accept_drift=True)
            parent, last = last, appended
            assert open_dataset(Path(last.path)).manifest.parent == parent.version
        full = ingest(paths, root=folder / "whole", name="x", codec=codec)
        assert content(last) == content(full)
        manifest, theirs = (manifests.load_manifest(Path(version.path))[0] for version in (last, full))
        assert (manifest.statistics, manifest.instructions, manifest.recordings, manifest.files) == (
            theirs.statistics,
            theirs.instructions,
            theirs.recordings,
            theirs.files,
        )


@pytest.fixture
def small():
    """Shards of a few KiB, as a large recording has many."""
    with patch.multiple(chunking, CHUNK_BYTES=512, SHARD_BYTES=2048):
        yield


def shards_of(version) -> dict[str, os.stat_result]:
    folder = Path(version.path)
    return {str(path.relative_to(folder)): path.stat() for path in folder.rglob("c/**/*") if path.is_file()}


@pytest.mark.parametrize("links", [True, False])
def test_full_shards_are_shared(tmp_path, small, monkeypatch, links) -> None:
    """Full shards of the parent are the same files, or copies where links are not possible; only the rest is new."""
    one, two = record(tmp_path / "a.hdf5", [100, 90], 1), record(tmp_path / "b.hdf5", [80], 2)
    first = ingest([one], root=tmp_path / "root", name="x", codec="raw")
    version = ingest([one, two], root=tmp_path / "whole", name="x", codec="raw")
    if not links:

        def refuse(*_: object) -> None:
            raise OSError(errno.EMLINK, "too many links")

        monkeypatch.setattr(shard_worker.os, "link", refuse)
    second = ingest([two], root=tmp_path / "root", name="x", append=Path(first.path))
    assert content(second) == content(version)
    before, after = shards_of(first), shards_of(second)
    shared = [key for key in before if before[key].st_ino == after[key].st_ino]
    images = [key for key in before if key.startswith("obs/")]
    assert len(images) > 4
    assert len(set(images) - set(shared)) <= (1 if links else len(images))  # the last one was not full
    assert bool(shared) == links


def test_a_shard_in_a_links_place(tmp_path, small, monkeypatch) -> None:
    """What lies damaged where a parent's shard belongs, in what a killed append left, is replaced, and nothing is ever
    written into a file that the parent has too."""
    one, two = record(tmp_path / "a.hdf5", [100, 90], 1), record(tmp_path / "b.hdf5", [80], 2)
    first = ingest([one], root=tmp_path / "root", name="x", codec="raw")
    before = content(first)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    whole_manifest = finalize.write_metadata
    monkeypatch.setattr(finalize, "write_metadata", stop)
    with pytest.raises(KeyboardInterrupt):
        ingest([two], root=tmp_path / "root", name="x", append=Path(first.path))
    monkeypatch.setattr(finalize, "write_metadata", whole_manifest)
    linked = [
        path for path in (tmp_path / "root" / ".tmp").rglob("c/**/*") if path.is_file() and path.stat().st_nlink > 1
    ]
    assert len(linked) > 4
    for path in linked:
        path.unlink()
        path.write_bytes(b"damage")
    second = ingest([two], root=tmp_path / "root", name="x", append=Path(first.path))
    version = ingest([one, two], root=tmp_path / "whole", name="x", codec="raw")
    assert content(second) == content(version)
    assert content(first) == before
    assert not list((tmp_path / "root").rglob("part/*"))


def test_again_changes_nothing(tmp_path) -> None:
    """The same append again publishes nothing; a fresh ingest of the new recording alone is another version."""
    one, two = record(tmp_path / "a.hdf5", [9], 1), record(tmp_path / "b.hdf5", [8], 2)
    first = ingest([one], root=tmp_path / "root", name="x")
    appended = ingest([two], root=tmp_path / "root", name="x", append=Path(first.path))
    version = ingest([two], root=tmp_path / "root", name="x", append=Path(first.path))
    assert (version.version, version.new) == (appended.version, False)
    assert ingest([two], root=tmp_path / "root", name="x").new
    opened = open_dataset(Path(appended.path))
    assert [record["file"] for record in opened.manifest.recordings] == ["a.hdf5", "b.hdf5"]
    assert [episode["recording"] for episode in opened.episodes] == [0, 1]


def test_a_recording_of_the_parent_is_refused(tmp_path) -> None:
    """What the parent has, under whatever name, is refused by both names, and nothing stays."""
    one, two = record(tmp_path / "a.hdf5", [9], 1), record(tmp_path / "b.hdf5", [8], 2)
    first = ingest([one], root=tmp_path / "root", name="x")
    (tmp_path / "copy.hdf5").write_bytes(one.read_bytes())
    with pytest.raises(UsageError, match=r"copy\.hdf5.* a\.hdf5"):
        ingest([tmp_path / "copy.hdf5", two], root=tmp_path / "root", name="x", append=Path(first.path))
    assert [path.name for path in (tmp_path / "root").iterdir()] == ["x"]


def test_what_does_not_go_together(tmp_path) -> None:
    """Another codec, another dataset's version, other arrays, and a damaged parent are each refused by name."""
    one, two = record(tmp_path / "a.hdf5", [9], 1), record(tmp_path / "b.hdf5", [8], 2)
    first = ingest([one], root=tmp_path / "root", name="x", codec="raw")
    with pytest.raises(UsageError, match=r"raw.*lz4"):
        ingest([two], root=tmp_path / "root", name="x", append=Path(first.path), codec="lz4")
    with pytest.raises(UsageError):
        ingest([two], root=tmp_path / "root", name="y", append=Path(first.path))
    with pytest.raises(DataError, match="has no done, which the parent has"):
        ingest([two], root=tmp_path / "root", name="x", append=Path(first.path), skip_arrays=["done"])
    (Path(first.path) / "action/c/0/0").unlink()
    with pytest.raises(DataError, match="action/c/0/0"):
        ingest([two], root=tmp_path / "root", name="x", append=Path(first.path))


def test_a_renamed_dataset(tmp_path) -> None:
    """A dataset whose folder was renamed is appended to by its new name."""
    one, two = record(tmp_path / "a.hdf5", [9], 1), record(tmp_path / "b.hdf5", [8], 2)
    first = Path(ingest([one], root=tmp_path / "root", name="x").path)
    renamed = first.parent.rename(tmp_path / "root/y")
    second = ingest([two], root=tmp_path / "root", name="y", append=renamed / first.name)
    assert Path(second.path).parent == renamed


@pytest.mark.parametrize("damage", ["swapped", "flipped", "last", "lengths"])
def test_damage_of_the_parent_is_not_passed_on(tmp_path, small, damage) -> None:
    """A shard that is linked, one that is made again, and what is said of episodes are the parent's, or refused."""
    first, two, second = (record(tmp_path / f"{i}.hdf5", [100, 90 + i], i) for i in range(3))
    parent = Path(ingest([first], root=tmp_path / "root", name="x", codec="raw").path)
    shards = sorted((parent / "action/c").glob("*/0"), key=lambda path: int(path.parent.name))
    name = "action/c/0/0"
    if damage == "swapped":
        exchange_names(shards[0], shards[1])
    elif damage == "flipped":
        data = shards[0].read_bytes()
        shards[0].write_bytes(bytes([data[0] ^ 1]) + data[1:])
    else:
        third = Path(ingest([second], root=tmp_path / "other", name="x", codec="raw").path)
        name = "episode_offsets/c/0" if damage == "lengths" else str(shards[-1].relative_to(parent))
        exchange_names(parent / name, third / name)
        assert (parent / name).stat().st_size == (third / name).stat().st_size
    with pytest.raises(DataError, match=name):
        ingest([two], root=tmp_path / "root", name="x", append=parent)
    assert [path.name for path in (tmp_path / "root").iterdir()] == ["x"]


def test_a_parent_without_folded_statistics(tmp_path, small) -> None:
    """Where the parent has not kept what an append builds on, it is made again from the parent's shards."""
    one, two = record(tmp_path / "a.hdf5", [100, 90], 1), record(tmp_path / "b.hdf5", [80], 2)
    with patch("pitools.dataset.ingest.finalize.statistics_attribute", lambda *_: {}):
        first = ingest([one], root=tmp_path / "root", name="x", codec="raw")
    second = ingest([two], root=tmp_path / "root", name="x", append=Path(first.path))
    full = ingest([one, two], root=tmp_path / "whole", name="x", codec="raw")
    manifest, theirs = (manifests.load_manifest(Path(version.path))[0] for version in (second, full))
    assert manifest.statistics == theirs.statistics
    assert content(second) == content(full)


def test_a_parent_with_statistics_of_another_width(tmp_path, small) -> None:
    """Where the parent has numbers of each of many columns, for which there is one now, they are made again."""
    one, two = record(tmp_path / "a.hdf5", [100, 90], 1), record(tmp_path / "b.hdf5", [80], 2)
    first = ingest([one], root=tmp_path / "root", name="x", codec="raw")
    with patch.object(statistics, "MAX_COLUMNS", 6):
        second = ingest([two], root=tmp_path / "root", name="x", append=Path(first.path))
        full = ingest([one, two], root=tmp_path / "whole", name="x", codec="raw")
    manifest, theirs = (manifests.load_manifest(Path(version.path))[0] for version in (second, full))
    assert manifest.statistics == theirs.statistics
    assert len(manifest.statistics["action"].mean) == 1


def test_a_parent_without_names_of_axes(tmp_path, small) -> None:
    """The shards of a version that was written before axes had names are taken as they are, too."""
    one, two = record(tmp_path / "a.hdf5", [100, 90], 1), record(tmp_path / "b.hdf5", [80], 2)
    with patch("pitools.dataset.ingest.chunking.dimension_names", lambda *_, **__: ()):
        first = ingest([one], root=tmp_path / "root", name="x", codec="raw")
    second = ingest([two], root=tmp_path / "root", name="x", append=Path(first.path))
    assert (Path(second.path) / "action/c/0/0").samefile(Path(first.path) / "action/c/0/0")
    assert content(second) == content(ingest([one, two], root=tmp_path / "whole", name="x", codec="raw"))
