from __future__ import annotations

import json
import shutil
from pathlib import Path
from unittest.mock import patch

import h5py
import msgspec
import numpy as np
import pytest

from pitools.core.errors import DataError, UsageError
from pitools.dataset.catalog import compare
from pitools.dataset.ingest.ingest import ingest
from pitools.dataset.reader import open_dataset
from pitools.dataset.rebuild import rebuild_version
from pitools.dataset.versions import describe_version
from pitools.store import digest, version_state
from pitools.store import manifest as manifests
from pitools.store.manifest import Statistics, Subset


def test_quarantine_is_carried_over(robomimic, tmp_path, monkeypatch) -> None:
    """What an other release of pitools rebuilds leaves the same episodes out of training."""
    version = Path(ingest([robomimic(3, 4)], root=tmp_path / "data", name="pick").path)
    record = version_state.Quarantine(whole_version=False, set_at="", set_by="", episodes={1: ("dark",)})
    version_state.set_quarantine(version, record)
    monkeypatch.setattr("pitools.dataset.ingest.ingest.__version__", "99.0")
    result, _ = rebuild_version(version, [tmp_path], to_publish=True)
    assert result.state == "same-data"
    rebuilt = version_state.read_quarantine(Path(result.path))
    assert rebuilt is not None
    assert rebuilt.episodes == {1: ("dark",)}


@pytest.fixture
def archive(tmp_path) -> Path:
    """Where recordings went after they were ingested."""
    folder = tmp_path / "archive" / "2026" / "november"
    folder.mkdir(parents=True)
    return folder


def test_identical(robomimic, archive, below, tmp_path) -> None:
    """From the recordings, wherever they are now, comes the same version, and nothing of the trial stays."""
    files = [robomimic(3, 4, name=f"take_{number}.hdf5", seed=number) for number in (2, 10)]
    version = ingest(files, root=tmp_path / "root", name="x", codec="zstd", skip_arrays=["reward"])
    for file in files:
        file.rename(archive / file.name)
    (archive / "other").mkdir()
    (archive / "other/take_2.hdf5").write_bytes(b"another one of that name")
    before = below(tmp_path / "root")
    record, differences = rebuild_version(Path(version.path), [tmp_path / "archive"])
    assert (record.state, record.rebuilt, differences) == ("identical", version.version, [])
    assert {name for name in below(tmp_path / "root") if ".catalog" not in name} == before


def test_appended(robomimic, archive, tmp_path) -> None:
    """A version that was appended to another is rebuilt on that one, from its own recordings alone."""
    version = ingest([robomimic(3, name="a.hdf5")], root=tmp_path / "root", name="x")
    two = ingest([robomimic(5, name="b.hdf5", seed=1)], root=tmp_path / "root", name="x", append=Path(version.path))
    (tmp_path / "a.hdf5").unlink()
    assert rebuild_version(Path(two.path), [tmp_path])[0].state == "identical"
    shutil.rmtree(version.path)
    with pytest.raises(UsageError, match=version.version):
        rebuild_version(Path(two.path), [tmp_path])


def test_schema(robomimic, tmp_path) -> None:
    """The transform is taken from provenance, not from a file that may have changed."""
    transform = tmp_path / "transform.toml"
    transform.write_text('[rename]\naction = "command"\n')
    version = ingest([robomimic(3, 4)], root=tmp_path / "root", name="x", transform=transform)
    assert "command" in describe_version(Path(version.path))[1].arrays
    transform.unlink()
    assert rebuild_version(Path(version.path), [tmp_path])[0].state == "identical"


def test_changed_recording(robomimic, tmp_path) -> None:
    """A recording of the same name and size with other bytes in it gives another version, and what differs is told."""
    version = ingest([robomimic(3, 4)], root=tmp_path / "root", name="x")
    robomimic(3, 4, seed=1)
    record, differences = rebuild_version(Path(version.path), [tmp_path])
    assert record.state == "differs"
    assert {("recording", "changed"), ("files", "changed")} <= {(each.kind, each.change) for each in differences}
    assert not (tmp_path / "root/x" / record.rebuilt).exists()
    published, _ = rebuild_version(Path(version.path), [tmp_path], to_publish=True)
    assert open_dataset(Path(published.path)).version.version == record.rebuilt


def test_other_release(robomimic, tmp_path, monkeypatch) -> None:
    """What another release of ours made is the same in its files, and only what the manifest says of it differs."""
    monkeypatch.setattr("pitools.dataset.ingest.ingest.__version__", "0.0.1")
    version = ingest([robomimic(3, 4)], root=tmp_path / "root", name="x")
    monkeypatch.undo()
    record, differences = rebuild_version(Path(version.path), [tmp_path])
    assert record.state == "same-data"
    assert [(each.kind, each.subject, each.before) for each in differences if each.change != "shared"] == [
        ("option", "pitools", "0.0.1")
    ]


def test_repairs(robomimic, tmp_path) -> None:
    """Of a version whose files were lost or damaged, exactly these are replaced, and it is whole again."""
    version = ingest([robomimic(3, 4)], root=tmp_path / "root", name="x")
    path = Path(version.path)
    shards = sorted(file for file in path.glob("obs/*/c/**/*") if file.is_file())
    shards[0].unlink()
    (path / "reward/c/0").write_bytes(bytes(9))
    record, _ = rebuild_version(path, [tmp_path], to_publish=True)
    assert (record.state, record.repaired_files, record.path) == ("identical", 2, str(path))
    entries = manifests.load_manifest(path)[0].files
    assert all(digest.digest_file(path / entry.path) == (entry.bytes, entry.digest) for entry in entries)


def test_one_of_several(robomimic, archive, tmp_path) -> None:
    """Of several recordings of one name and size the one with the right bytes is taken; a dangling link is none."""
    file = robomimic(3, 4)
    version = ingest([file], root=tmp_path / "root", name="x")
    (tmp_path / "right").mkdir()
    right = file.rename(tmp_path / "right" / file.name)
    for number in range(3):
        (archive / f"{number}").mkdir()
        (archive / f"{number}" / file.name).write_bytes(right.read_bytes()[:-1] + bytes([number]))
    (archive / "link").mkdir()
    (archive / "link" / file.name).symlink_to("/nowhere")
    assert rebuild_version(Path(version.path), [archive, right.parent])[0].state == "identical"


@pytest.mark.parametrize("seeds", [(0, 0), (0, 1)])
def test_one_name_for_all(robomimic, archive, tmp_path, seeds) -> None:
    """Recordings of one name, of the same bytes or others, make the same version again, wherever they are now."""
    for folder, seed in zip("ab", seeds, strict=True):
        (tmp_path / folder).mkdir()
        robomimic(3, 4, name=f"{folder}/demo.hdf5", seed=seed)
    version = ingest([tmp_path / folder / "demo.hdf5" for folder in "ab"], root=tmp_path / "root", name="x")
    (tmp_path / "a").rename(archive / "z")
    (tmp_path / "b").rename(archive / "c")
    assert rebuild_version(Path(version.path), [archive])[0].state == "identical"


def test_refused_episodes(robomimic, tmp_path) -> None:
    """Episodes that were left out are left out again."""
    with h5py.File(file := robomimic(3, 4), "r+") as opened:
        del opened["data/demo_1/actions"]
        opened["data/demo_1/actions"] = np.zeros((2, 7), np.float32)
    version = ingest([file], root=tmp_path / "root", name="x", skip_rejected=True)
    assert version.episodes == 1
    assert rebuild_version(Path(version.path), [tmp_path])[0].state == "identical"


def test_held_meanwhile(robomimic, tmp_path) -> None:
    """Neither the version nor its parent can be collected while it is rebuilt; afterwards both can."""
    root = tmp_path / "root"
    version = ingest([robomimic(3, name="a.hdf5")], root=root, name="x")
    two = ingest([robomimic(3, name="b.hdf5", seed=1)], root=root, name="x", append=Path(version.path))

    def readers() -> list[int]:
        actual = (
            version_state.lease_records(root, "x", each.version, version_state.utc_now()) for each in (version, two)
        )
        return [sum(reader.purpose.startswith("rebuild") for reader in each) for each in actual]

    observed = []
    with patch(
        "pitools.dataset.ingest.ingest.ingest",
        lambda *files, **asked: (observed.append(readers()), ingest(*files, **asked))[1],
    ):
        rebuild_version(Path(two.path), [tmp_path])
    assert observed == [[1, 1]]
    assert readers() == [0, 0]


def test_part(publish, tmp_path) -> None:
    """A part of a version is refused, and told where it came from."""
    path = publish(tmp_path, "x", part_of="1" * 32)
    with pytest.raises(UsageError) as caught:
        rebuild_version(path, [tmp_path])
    assert "1" * 32 in caught.value.hint


def test_another_in_its_place(robomimic, tmp_path) -> None:
    """Into a folder that has the version's name, but says something else of itself, no file is put."""
    version = ingest([robomimic(3, 4)], root=tmp_path / "root", name="x")
    robomimic(3, 4, seed=1)
    path = Path(rebuild_version(Path(version.path), [tmp_path], to_publish=True)[0].path)
    (path / "reward/c/0").unlink()
    (path / "manifest.json").write_bytes((Path(version.path) / "manifest.json").read_bytes())
    with pytest.raises(DataError):
        rebuild_version(Path(version.path), [tmp_path], to_publish=True)
    assert not (path / "reward/c/0").exists()


def test_damage_that_the_parent_shares(robomimic, tmp_path, monkeypatch) -> None:
    """What is linked from a parent is not called repaired where the parent's own file is damaged."""
    monkeypatch.setattr("pitools.dataset.ingest.chunking.CHUNK_BYTES", 512)
    monkeypatch.setattr("pitools.dataset.ingest.chunking.SHARD_BYTES", 2048)
    version = ingest([robomimic(70, name="a.hdf5")], root=tmp_path / "root", name="x")
    two = ingest([robomimic(5, name="b.hdf5", seed=1)], root=tmp_path / "root", name="x", append=Path(version.path))
    linked = [file for file in Path(two.path).rglob("*") if file.is_file() and file.stat().st_nlink > 1]
    linked[0].write_bytes(bytes(linked[0].stat().st_size))
    with pytest.raises(DataError, match=str(linked[0].relative_to(two.path))) as caught:
        rebuild_version(Path(two.path), [tmp_path], to_publish=True)
    assert version.version in caught.value.hint
    assert rebuild_version(Path(version.path), [tmp_path], to_publish=True)[0].repaired_files == 1
    assert rebuild_version(Path(two.path), [tmp_path], to_publish=True)[0].repaired_files == 1


def test_same_files_of_another_recording(robomimic, tmp_path) -> None:
    """A recording with other bytes that gives the same files is told, and is no success."""
    version = ingest([robomimic(3, 4)], root=tmp_path / "root", name="x")
    with h5py.File(tmp_path / "reach.hdf5", "r+") as file:
        data = (tmp_path / "reach.hdf5").stat().st_size
        file["data"].move("demo_0/rewards", "demo_0/rewardz")
        file["data"].move("demo_0/rewardz", "demo_0/rewards")
    size = (tmp_path / "reach.hdf5").stat().st_size
    assert size == data
    done = rebuild_version(Path(version.path), [tmp_path])
    assert done[0].state == "differs"
    assert [(each.kind, each.change) for each in done[1]] == [("recording", "changed"), ("files", "shared")]


def test_every_field_is_compared(publish, tmp_path) -> None:
    """Two manifests that differ in anything have a difference that says so."""
    manifest = manifests.load_manifest(publish(tmp_path, "x"))[0]
    numbers = Statistics(rows=1, minimum=(0.0,), maximum=(1.0,), mean=(0.5,), deviation=(0.0,))
    for field, value in (
        ("name", "y"),
        ("episodes", 2),
        ("steps", 11),
        ("parent", "1" * 32),
        ("instructions", {"pick": 1}),
        ("arrays", {}),
        ("files", ()),
        ("recordings", ()),
        ("statistics", {"action": numbers}),
        ("subset", Subset(whole="1" * 32, arrays=(), steps=())),
    ):
        two = msgspec.structs.replace(manifest, **{field: value})
        for pair in ((manifest, two), (two, manifest)):
            reported = [each for each in compare.compare_manifests(*pair) if each.change != compare.SHARED]
            assert reported, field
    other = msgspec.structs.replace(numbers, mean=(0.5, 0.5))
    a, b = (msgspec.structs.replace(manifest, statistics={"action": each}) for each in (numbers, other))
    assert next((each.kind, each.shift) for each in compare.compare_manifests(a, b)) == ("statistics", None)
    moved = msgspec.structs.replace(manifest, statistics={"action": msgspec.structs.replace(numbers, mean=(0.7,))})
    (difference,) = [each for each in compare.compare_manifests(a, moved) if each.kind == "statistics"]
    assert json.loads(msgspec.json.encode(difference))["shift"] > 1e6  # JSON has no infinity


def test_not_found(robomimic, publish, tmp_path) -> None:
    """A recording that is not there, or not as it was, is named, and so is a version that no ingest made."""
    version = ingest([robomimic(3, 4)], root=tmp_path / "root", name="x")
    (tmp_path / "else").mkdir()
    with pytest.raises(UsageError, match=r"reach\.hdf5.* \d+ bytes"):
        rebuild_version(Path(version.path), [tmp_path / "else"])
    with (tmp_path / "reach.hdf5").open("ab") as file:
        file.write(b"more")
    with pytest.raises(UsageError, match=r"reach\.hdf5"):
        rebuild_version(Path(version.path), [tmp_path])


def test_command(pit, robomimic, tmp_path) -> None:
    """`pit dataset rebuild` gives a record, and exit 0 where the result is the same."""
    ingest([robomimic(3, 4)], root=tmp_path / "root", name="x")
    done = pit("dataset", "rebuild", "root/x", "--from", ".")
    assert done.returncode == 0, done.stderr
    (line,) = map(json.loads, done.stdout.splitlines())
    assert (line["schema"], line["state"]) == ("pit.dataset-rebuild/1", "identical")
