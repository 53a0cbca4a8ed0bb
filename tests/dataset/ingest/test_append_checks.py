from __future__ import annotations

import gc
import json
import os
from datetime import timedelta
from pathlib import Path

import h5py
import pytest

from pitools.core.errors import DataError
from pitools.dataset.catalog import retirement
from pitools.dataset.ingest import append_checks, finalize
from pitools.dataset.ingest.ingest import ingest
from pitools.dataset.reader import open_dataset
from pitools.dataset.rebuild import rebuild_version
from pitools.store import version_state
from pitools.store.publish import BUILD_DIR
from pitools.store.resolve import unusable_reason
from pitools.store.version_state import Quarantine


@pytest.fixture
def first(robomimic, tmp_path) -> Path:
    """A version of five episodes."""
    return Path(ingest([robomimic(*[30] * 5)], root=tmp_path / "root", name="x").path)


@pytest.fixture
def drifted(robomimic) -> Path:
    """Five episodes whose actions are in other units."""
    path = robomimic(*[30] * 5, name="mm.hdf5", seed=1)
    with h5py.File(path, "r+") as file:
        for demo in file["data"].values():
            demo["actions"][...] = demo["actions"][...] * 1000
    return path


def test_drift_is_refused(pit, first, drifted, tmp_path) -> None:
    """Drift from the parent is refused with each finding and what to check, and is taken where it is accepted."""
    words = ("dataset", "ingest", str(drifted), "--to", "root", "--name", "x", "--append", "root/x")
    done = pit(*words)
    assert (done.returncode, done.stdout) == (5, "")
    lines = [line for line in done.stderr.splitlines() if line.startswith("pit: fault: ")]
    assert {line.split()[2] for line in lines} >= {"deviation-drift:", "range-drift:"}
    assert all("units" in line for line in lines)
    assert "--accept-drift" in done.stderr
    assert [path.parent for path in (tmp_path / "root/x").glob("*/manifest.json")] == [first]
    done = pit(*words, "--accept-drift")
    assert done.returncode == 0, done.stderr
    assert "pit: fault: " in done.stderr
    assert json.loads(done.stdout)["episodes"] == 10


def test_accepted_it_is_not_made_again(first, drifted, tmp_path) -> None:
    """What was made before it was refused is kept, is published once it is accepted, and can be rebuilt."""
    root = tmp_path / "root"
    with pytest.raises(append_checks.DriftError):
        ingest([drifted], root=root, name="x", append=first)
    (store,) = root.glob(f"{BUILD_DIR}/x.*/store")
    before = {name: (store / name).stat().st_ino for name in ("action/c/0/0", "obs/eye_image/c/0/0/0/0", "done/c/0")}
    version = ingest([drifted], root=root, name="x", append=first, accept_drift=True)
    assert {name: (Path(version.path) / name).stat().st_ino for name in before} == before
    assert not (root / BUILD_DIR).exists()
    assert rebuild_version(Path(version.path), [tmp_path])[0].state == "identical"


def test_warnings_are_told(first, robomimic, tmp_path, capsys) -> None:
    """What is only worth a look is said, and the version is published."""
    path = robomimic(*[30] * 3, name="more.hdf5", seed=1)
    with h5py.File(path, "r+") as file:
        for demo in file["data"].values():
            demo["rewards"][10:] = 1
    assert ingest([path], root=tmp_path / "root", name="x", append=first).new
    assert "pit: warning: constant-drift: reward" in capsys.readouterr().err


def test_parent_is_held(first, robomimic, tmp_path, monkeypatch) -> None:
    """While an append is at work `gc` is told to leave the parent, and no longer once it is done or has failed."""
    manifest, observed = finalize.write_metadata, []

    def looking(*args):
        held = version_state.lease_records(
            tmp_path / "root", "x", first.name, version_state.utc_now() + timedelta(days=6)
        )
        observed.append([reader.purpose for reader in held])
        if len(observed) == 2:
            raise DataError("no")
        return manifest(*args)

    monkeypatch.setattr(finalize, "write_metadata", looking)
    ingest([robomimic(30, name="b.hdf5", seed=1)], root=tmp_path / "root", name="x", append=first)
    with pytest.raises(DataError):
        ingest([robomimic(30, name="c.hdf5", seed=2)], root=tmp_path / "root", name="x", append=first)
    assert observed == [["an append"], ["an append"]]
    assert version_state.lease_records(tmp_path / "root", "x", first.name, version_state.utc_now()) == []


def test_a_discarded_parent(pit, first, robomimic) -> None:
    """A version that is retired, or in quarantine as a whole, is not begun with, and the way back is named."""
    words = ("dataset", "ingest", str(robomimic(30, name="b.hdf5", seed=1)), "--to", "root", "--name", "x")
    retirement.retire_version(first, reason="wrong gripper")
    done = pit(*words, "--append", str(first))
    assert done.returncode == 2
    assert "wrong gripper" in done.stderr
    assert "pit dataset retire --undo" in done.stderr
    retirement.undo_retirement(first.parent.parent, "x", first.name)
    version_state.set_quarantine(
        first, Quarantine(whole_version=True, set_at="", set_by="", reasons=("a shard is damaged",))
    )
    done = pit(*words, "--append", str(first))
    assert done.returncode == 2
    assert "a shard is damaged" in done.stderr
    assert "--lift-quarantine" in done.stderr
    version_state.set_quarantine(first, None)
    assert pit(*words, "--append", str(first)).returncode == 0


def test_nothing_to_do_says_when_it_is_discarded(pit, first, tmp_path) -> None:
    """Who ingests again what was retired or put in quarantine hears of that."""
    words = ("dataset", "ingest", "reach.hdf5", "--to", "root", "--name", "x")
    assert "but that version" not in pit(*words).stderr
    retirement.retire_version(first, reason="wrong gripper")
    assert "but that version is retired since" in pit(*words).stderr
    retirement.undo_retirement(first.parent.parent, "x", first.name)
    version_state.set_quarantine(first, Quarantine(whole_version=True, set_at="", set_by="", reasons=("dark",)))
    assert "but that version is in quarantine: dark" in pit(*words).stderr


def test_quarantine_goes_on(first, robomimic, tmp_path) -> None:
    """Episodes that are kept from training in the parent are so in what is appended to it, from the first moment."""
    quarantine = Quarantine(whole_version=False, set_at="2026-11-01T00:00:00Z", set_by="me", episodes={1: ("frozen",)})
    version_state.set_quarantine(first, quarantine)
    version = ingest([robomimic(30, name="b.hdf5", seed=1)], root=tmp_path / "root", name="x", append=first)
    assert version_state.read_quarantine(Path(version.path)) == quarantine
    version_state.set_quarantine(Path(version.path), None)
    append_checks.inherit_quarantine(
        first, Path(version.path)
    )  # as of one that comes late, when it is published already
    ingest([robomimic(30, name="b.hdf5", seed=1)], root=tmp_path / "root", name="x", append=first)
    assert version_state.read_quarantine(Path(version.path)) is None


def test_a_parent_that_cannot_be_held(robomimic, mounted, tmp_path, capsys) -> None:
    """Append to a parent in a read-only root of another file system: copied, with a note that it has no lease."""
    point = mounted("size=30m")
    first = Path(ingest([robomimic(300, 300)], root=point / "root", name="x", codec="raw").path)
    assert os.system(f"mount -o remount,ro {point}") == 0
    more = robomimic(300, name="z.hdf5", seed=1)
    version = ingest([more], root=tmp_path / "root", name="x", append=first)
    full = ingest([tmp_path / "reach.hdf5", more], root=tmp_path / "whole", name="x", codec="raw")
    note = capsys.readouterr().err
    assert str(point) in note
    assert "`gc`" in note
    one, two = (open_dataset(Path(item.path)).manifest for item in (version, full))
    assert (one.files, one.statistics) == (two.files, two.statistics)
    gc.collect()  # what reads the parent is closed when the last one lets go of it


@pytest.mark.parametrize(
    ("name", "old", "new"), [("zarr.json", b'"train"', b'"trail"'), ("action/zarr.json", b": {}", b":{ }")]
)
def test_damaged_metadata_of_the_parent(first, robomimic, tmp_path, name, old, new) -> None:
    """Metadata of the parent that are no longer what they were are not passed on."""
    path = first / name
    assert old in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(old, new))
    with pytest.raises(DataError, match=rf"{name}: damaged"):
        ingest([robomimic(9, name="b.hdf5", seed=1)], root=tmp_path / "root", name="x", append=first)
    assert not unusable_reason(first)


def test_a_quarantine_that_cannot_be_read(first, robomimic, tmp_path, monkeypatch) -> None:
    """What is kept from training in the parent has to be known, before anything is made."""
    version_state.set_quarantine(
        first, Quarantine(whole_version=False, set_at="", set_by="", episodes={1: ("frozen",)})
    )
    version_state.quarantine_file(tmp_path / "root", "x", first.name).write_text("{")
    monkeypatch.setattr("pitools.dataset.ingest.ingest.open_work_dir", None)
    with pytest.raises(DataError, match="not a record of a quarantine"):
        ingest([robomimic(30, name="b.hdf5", seed=1)], root=tmp_path / "root", name="x", append=first)


def test_append_without_splits(robomimic, tmp_path, capsys) -> None:
    """An append of recordings without masks to a version with splits says that no split has the new episodes."""
    parent = Path(ingest([robomimic(3, 4)], root=tmp_path / "root", name="x").path)
    capsys.readouterr()
    told = []
    for name in ("with.hdf5", "without.hdf5"):
        more = robomimic(5, 6, name=name, seed=1)
        if name == "without.hdf5":
            with h5py.File(more, "r+") as file:
                del file["mask"]
        ingest([more], root=tmp_path / "root", name="x", append=parent)
        told.append("train" in capsys.readouterr().err)
    assert told == [False, True]
