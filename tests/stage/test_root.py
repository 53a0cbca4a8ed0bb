from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from pitools.core import proc
from pitools.core.errors import ClusterError, NoSpace, TryLater
from pitools.stage import root as roots
from pitools.stage.run import stage
from pitools.stage.source import load


def test_too_little_space_is_refused_before_the_first_byte(small: Path, tmpfs):
    """The error names what is needed and what is free, and asks to try later."""
    disk = tmpfs("size=9m")
    with pytest.raises(NoSpace, match=r"11\.1 MiB needed, 9\.0 MiB free"):
        stage(load(small), disk / "pit", advance=lambda _: pytest.fail("a byte was written"))
    assert os.listdir(disk / "pit/objects") == []


def test_a_disk_that_fills_up_midway_is_left_as_it_was(make_dataset, tmpfs, residue, once):
    """Another job took the space that was free a moment ago: try later, and nothing of ours remains."""
    folder = make_dataset({f"c/{i}": os.urandom(1 << 20) for i in range(16)})
    disk = tmpfs("size=40m")

    def fill() -> None:
        with (disk / "theirs").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(1 << 20)):
                pass

    with pytest.raises(NoSpace):
        stage(load(folder), disk / "pit", advance=once(fill))
    assert os.listdir(disk / "pit/objects") == []
    assert residue(disk / "pit") == []
    (disk / "theirs").unlink()
    assert stage(load(folder), disk / "pit").state == "staged"


def test_a_read_only_disk_refuses_a_copy_but_serves_what_it_has(small: Path, make_dataset, tmpfs):
    """Exit 4 for what would have to be written; `present` for what is there."""
    disk = tmpfs("size=32m")
    stage(load(small), disk / "pit")
    assert proc.run(["mount", "-o", "remount,ro", str(disk)], timeout_s=10).code == 0
    assert stage(load(small), disk / "pit").state == "present"
    assert stage(load(small), disk / "pit", verify=True).state == "present"
    other = load(make_dataset({"a": b"1"}, "other"))
    for place in ("pit", "new"):
        with pytest.raises(ClusterError, match="Read-only"):
            stage(other, disk / place)


@pytest.mark.parametrize("folder", ["objects", ".tmp", ".locks"])
@pytest.mark.parametrize("kind", ["link", "owner", "writable", "file"])
def test_a_root_that_others_could_exchange_is_refused(small: Path, root: Path, folder: str, kind: str):
    """Neither a link out of the root nor a folder of another user is written to, or believed."""
    root.mkdir(parents=True)
    place = root / folder
    if kind == "link":
        (root.parent / "theirs").mkdir()
        place.symlink_to(root.parent / "theirs")
    elif kind == "file":
        place.touch()
    else:
        place.mkdir()
        if kind == "writable":
            place.chmod(0o1777)
        elif os.geteuid():
            pytest.skip("only root can give a folder away")
        else:
            os.chown(place, 54321, -1)
    with pytest.raises(ClusterError) as error:
        stage(load(small), root)
    assert error.value.where == str(place)
    assert list((root.parent / "theirs").glob("*")) == [] if kind == "link" else True


def test_a_root_below_a_file_is_refused(small: Path, tmp_path: Path):
    """A wrong --to is an error of ours, not a traceback."""
    (tmp_path / "file").touch()
    with pytest.raises(ClusterError):
        stage(load(small), tmp_path / "file" / "pit")


def test_staged_data_is_private_unless_the_root_says_otherwise(small: Path, root: Path):
    """A copy on a shared node is not readable by more users than its source, until someone opens `objects`."""
    final = Path(stage(load(small), root).path)
    assert (root / "objects").stat().st_mode & 0o077 == 0
    assert (final / "zarr.json").stat().st_mode & 0o222 == 0


def test_one_version_waits_for_its_lock_and_gives_up_in_time(small: Path, root: Path):
    """Who waits says so once, and is told to try later when the other takes too long."""
    waits: list[int] = []
    roots.prepare(root)
    with roots.locked(root, small.name, timeout_s=0), pytest.raises(TryLater):
        stage(load(small), root, timeout_s=0.2, waiting=lambda: waits.append(1))
    assert waits == [1]
    assert stage(load(small), root).state == "staged"


def test_two_versions_are_staged_at_once(small: Path, make_dataset, root: Path, residue, once):
    """A stager that begins in the middle of another's copy does not take its unfinished folder for rubbish."""
    other = make_dataset({"a": os.urandom(1000)}, "other")
    inner = once(lambda: stage(load(other), root))
    assert stage(load(small), root, advance=inner).state == "staged"
    assert sorted(os.listdir(root / "objects")) == sorted([small.name, other.name])
    assert residue(root) == []
