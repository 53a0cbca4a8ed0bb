"""What `gc` meets: others at work, clocks that are wrong, links, and what it may not read or delete."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import time
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest

from pitools.core.errors import ClusterError, PitError, TryLater, UsageError
from pitools.dataset.catalog.retirement import retire_version, undo_retirement
from pitools.dataset.gc.collect import collect_garbage
from pitools.store import tags, version_state
from pitools.store.version_state import Quarantine

LATER = version_state.utc_now() + timedelta(days=8)


def run(root: Path, **settings) -> dict[str, tuple[str, str]]:
    """State and reason by version, after `gc` a week later."""
    return {
        actual.version: (actual.state, actual.reason) for actual in collect_garbage(root, **{"now": LATER} | settings)
    }


def at_rename(old: Path, act):
    """Does `act` once, right after `old` was renamed."""
    rename, done = os.rename, []

    def renamed(one, two):
        rename(one, two)
        if Path(one) == old and not done:
            done.append(True)
            act()

    return patch("os.rename", renamed)


def test_another_gc_forgets_nothing(publish, tmp_path) -> None:
    """What is said of a version stands while one `gc` has it aside and another comes by, however that ends."""
    version = publish(tmp_path, "x")
    retire_version(version)
    version_state.set_quarantine(
        version, record := Quarantine(whole_version=False, episodes={3: ("black",)}, set_at="", set_by="")
    )
    name = version_state.tags_dir(tmp_path, "x") / "prod/1.json"

    def another() -> None:
        listed = version_state.list_names  # as it was before the first one took the version
        with patch(
            "pitools.store.version_state.list_names",
            lambda path, end="": [] if path.name == ".trash" else listed(path, end),
        ):
            assert run(tmp_path) == {}
        version_state.write_catalog_record(name, tags._Move(version=version.name, moved_at="", moved_by=""))

    with at_rename(version, another):
        assert run(tmp_path)[version.name] == ("kept", "tag prod")
    assert version_state.read_quarantine(version) == record
    assert run(tmp_path)[version.name] == ("kept", "tag prod")  # and it is still retired


def test_two_take_one(publish, tmp_path) -> None:
    """Of two that collect the same version one tells that it removed it, and nothing is left of it."""
    version = publish(tmp_path, "x")
    retire_version(version)
    reported = []
    with at_rename(version, lambda: reported.append(run(tmp_path))):
        reported.append(run(tmp_path))
    assert sorted(len(records) for records in reported) == [0, 1]
    assert not [path for path in tmp_path.rglob("*") if version.name in path.name]


def aside(root: Path, version: Path, end: str = "") -> Path:
    """Where a killed `gc` leaves a version that it has taken, or (end) that it has decided about."""
    (root / version_state.TRASH).mkdir(exist_ok=True)
    return version.rename(root / version_state.TRASH / f"x.{version.name}.{'0' * 8}{end}")


def test_killed_before_it_forgot(publish, tmp_path) -> None:
    """What was said of a version that went is forgotten by the next `gc`, but not what was said of the same content,
    ingested again."""
    version = publish(tmp_path, "x")
    old, new = (Quarantine(whole_version=True, set_at=when, set_by="") for when in ("then", "now"))
    for again in (False, True):
        retire_version(version)
        version_state.set_quarantine(version, old)
        aside(tmp_path, version, ".deleting")
        if again:
            version_state.set_quarantine(publish(tmp_path, "x"), new)
        assert run(tmp_path) == {}
        assert not (tmp_path / version_state.TRASH).exists()
        assert version_state.read_quarantine(version) == (new if again else None)
        assert version_state.retired_file(tmp_path, "x", version.name).exists() == again
        publish(tmp_path, "x")


def test_ancestors(publish, tmp_path) -> None:
    """A version keeps those it was made of, however far back, also as a part of one."""
    version = publish(tmp_path, "x")
    two = publish(tmp_path, "x", 1, parent=version.name)
    three = publish(tmp_path, "y", 2, part_of=two.name)
    for path in (version, two):
        retire_version(path)
    assert run(tmp_path) == {
        version.name: ("kept", f"parent of x/{two.name}"),
        two.name: ("kept", f"parent of y/{three.name}"),
    }


def test_child_that_was_left_aside(publish, tmp_path) -> None:
    """A child that a killed `gc` left aside keeps no parent when it goes itself."""
    one = publish(tmp_path, "x")
    two = publish(tmp_path, "x", 1, parent=one.name)
    retire_version(one)
    retire_version(two)
    aside(tmp_path, two)
    assert {version: state for version, (state, _) in run(tmp_path).items()} == {
        one.name: "removed",
        two.name: "removed",
    }


def test_made_again_while_it_was_aside(publish, tmp_path) -> None:
    """A version that was left aside and is there again is only a copy: it goes, whatever names the version."""
    version = publish(tmp_path, "x")
    retire_version(version)
    aside(tmp_path, version)
    assert publish(tmp_path, "x") == version
    version_state.write_catalog_record(
        version_state.tags_dir(tmp_path, "x") / "prod/1.json",
        tags._Move(version=version.name, moved_at="", moved_by=""),
    )
    assert {state for state, _ in run(tmp_path).values()} == {"removed"}
    assert (version / "action/c/0").exists()
    assert not (tmp_path / version_state.TRASH).exists()
    assert tags.read_tags(tmp_path, "x")["prod"].version == version.name


def test_what_a_network_file_system_remembers(publish, tmp_path) -> None:
    """Before the last look, every folder in which something may name a version is looked at anew."""
    root, runs = tmp_path / "root", tmp_path / "runs"
    (runs / "r").mkdir(parents=True)
    version = publish(root, "x")
    publish(root, "y", 1)
    tags.move_tag(root, "x", "prod", version.name)
    tags.move_tag(root, "x", "prod", "")
    retire_version(version)
    fresh: list[Path] = []
    with at_rename(version, fresh.clear), patch("pitools.store.version_state.revalidate_nfs", fresh.append):
        assert run(root, runs=[runs])[version.name][0] == "removed"
    retained = version_state.catalog_dir(root, "x")
    assert {
        root,
        root / "x",
        root / "y",
        runs,
        runs / "r",
        retained,
        retained / "tags",
        retained / "tags/prod",
        retained / "retired",
    } <= {*fresh}


def test_undo_as_it_comes_back(publish, tmp_path) -> None:
    """A version that `gc` brings back while its retirement is taken back is there."""
    version = publish(tmp_path, "x")
    retire_version(version)
    left = aside(tmp_path, version)
    with patch("pitools.store.version_state.list_names", lambda folder: (left.rename(version), [])[1]):
        undo_retirement(tmp_path, "x", version.name)
    assert run(tmp_path) == {}


def test_interrupted(publish, tmp_path) -> None:
    """After Ctrl-C, or an error, nothing stays aside that was not decided."""
    version = publish(tmp_path, "x")
    retire_version(version)
    for error in (KeyboardInterrupt, OSError):
        with patch("pitools.dataset.gc.collect._revalidate_references", side_effect=error), pytest.raises(error):
            run(tmp_path)
        assert (version / "manifest.json").is_file()
    assert run(tmp_path)[version.name][0] == "removed"


@pytest.mark.parametrize("folder", ["root", "x", "y", "runs", ".catalog/tags", ".catalog/leases"])
def test_unreadable_folder_keeps(publish, tmp_path, folder) -> None:
    """A folder that may not be listed may hold what names a version."""
    root, runs = tmp_path / "root", tmp_path / "runs"
    runs.mkdir()
    version = publish(root, "x")
    publish(root, "y", 1, parent=version.name)
    retire_version(version)
    (version_state.tags_dir(root, "x") / "old").mkdir(parents=True)
    listdir = os.listdir

    def refused(path):
        if str(path).endswith(f"/{folder}") or (folder.endswith("leases") and "/leases/" in str(path)):
            raise PermissionError(13, "Permission denied", str(path))
        return listdir(path)

    with patch("os.listdir", refused):
        if folder == "root":
            with pytest.raises(ClusterError):
                run(root, runs=[runs])
        else:
            assert run(root, runs=[runs])[version.name][0] == "kept"
    assert version.exists()


@pytest.mark.parametrize("what", ["plan", "manifest", "lease"])
def test_what_would_keep_it_waiting(publish, tmp_path, what) -> None:
    """A pipe in the place of a file that may name a version is not read, and keeps it."""
    root, run_dir = tmp_path / "root", tmp_path / "runs/r"
    run_dir.mkdir(parents=True)
    version = publish(root, "x")
    retire_version(version)
    path = {
        "plan": run_dir / "plan.json",
        "manifest": root / "y" / ("1" * 32) / "manifest.json",
        "lease": version_state.leases_dir(root, "x", version.name) / "a.json",
    }[what]
    path.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(path)
    assert run(root, runs=[tmp_path / "runs"])[version.name][0] == "kept"


@pytest.mark.parametrize("until", ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00", "soon", ""])
def test_strange_lease_keeps(publish, tmp_path, until) -> None:
    """A lease whose end is no time that we know has none."""
    version = publish(tmp_path, "x")
    retire_version(version)
    record = version_state.LeaseRecord(until=until, host="h", pid=1, purpose="w")
    version_state.write_catalog_record(version_state.leases_dir(tmp_path, "x", version.name) / "a.json", record)
    assert run(tmp_path)[version.name][0] == "kept"


def test_clock_that_is_ahead(publish, tmp_path) -> None:
    """Where our clock is a month ahead of the file system's, no grace and no lease is over before its time."""
    first, two = (publish(tmp_path, "x", number) for number in range(2))
    retire_version(first)
    retire_version(two)
    with (
        version_state.leased_version(two, 3600, "job"),
        patch("pitools.store.version_state.utc_now", lambda: LATER + timedelta(days=30)),
    ):
        (collected, _) = collect_garbage(tmp_path)
        assert "within its grace" in collected.reason
        actual = {record.version: record.state for record in collect_garbage(tmp_path, grace_s=-9)}
    assert actual == {first.name: "removed", two.name: "kept"}


def test_clock_that_was_behind(publish, tmp_path) -> None:
    """A version that was retired by a clock of 1970 has its grace from when that was written."""
    version = publish(tmp_path, "x")
    retire_version(version, now=version_state.utc_now() - timedelta(days=9999))
    assert "within its grace" in run(tmp_path, now=LATER - timedelta(days=2))[version.name][1]
    assert run(tmp_path)[version.name][0] == "removed"


def test_dataset_that_is_a_link(publish, tmp_path) -> None:
    """Of a dataset that is another root's, a link leads, nothing goes: what names it is in that root. But what is
    in it names versions of this one."""
    other, root = tmp_path / "other", tmp_path / "root"
    version = publish(other, "x")
    publish(other, "z", 1, parent=version.name)
    ours = publish(root, "y", 2)
    publish(other, "x", 3, parent=ours.name)
    (root / "x").symlink_to(other / "x")
    retire_version(version)
    retire_version(ours)
    for dry_run in (True, False):
        result = run(root, dry_run=dry_run)
        assert {state for state, _ in result.values()} == {"kept"}
        assert "a link" in result[version.name][1]
        assert "parent of x/" in result[ours.name][1]


def test_folders_of_others(publish, tmp_path) -> None:
    """Of a `.tmp` or `.trash` that is a link, or used by somebody else, nothing is touched."""
    root, home = tmp_path / "root", tmp_path / "home"
    publish(root, "x")
    names = ("notes", "x.deleting", "a.1234", f"old.{'1' * 32}")
    for folder in (home, root / ".tmp", root / ".trash"):
        for name in names:
            (folder / name).mkdir(parents=True)
            os.utime(folder / name, (0, 0))
    collected = list(collect_garbage(root, now=LATER))
    assert [record.name for record in collected] == [names[-1]]  # in `.tmp` it is an ingest's
    assert sorted(path.name for path in (root / ".trash").iterdir()) == sorted(names)
    shutil.rmtree(root / ".tmp")
    (root / ".tmp").symlink_to(home)
    assert list(collect_garbage(root, now=LATER)) == []
    shutil.rmtree(root / ".trash")
    (root / ".trash").symlink_to(home)
    with pytest.raises(ClusterError, match="link"):
        list(collect_garbage(root, now=LATER))
    assert sorted(path.name for path in home.iterdir()) == sorted(names)


def test_what_cannot_be_moved_back_or_deleted(publish, tmp_path) -> None:
    """Where a version that is kept, or files of one that is not, stay in the trash, the record says where."""
    version = publish(tmp_path, "x")
    retire_version(version)
    rename = os.rename

    def stuck(old, new):
        if Path(new) == version:
            raise PermissionError(13, "Permission denied")
        rename(old, new)
        if Path(old) == version:
            version_state.write_catalog_record(
                version_state.tags_dir(tmp_path, "x") / "a/1.json",
                tags._Move(version=version.name, moved_at="", moved_by=""),
            )

    with patch("os.rename", stuck):
        state, why = run(tmp_path)[version.name]
    assert (state, why.split(";")[0]) == ("kept", "tag a")
    assert f"{tmp_path / '.trash'}/x.{version.name}" in why
    with pytest.raises(TryLater, match="gc"):
        undo_retirement(tmp_path, "x", version.name)
    run(tmp_path)
    assert version.exists()
    tags.move_tag(tmp_path, "x", "a", "")
    retire_version(version)
    with patch("shutil.rmtree"):
        assert str(tmp_path / version_state.TRASH) in run(tmp_path)[version.name][1]
    with pytest.raises(UsageError):  # decided, though files of it are there
        undo_retirement(tmp_path, "x", version.name)
    assert run(tmp_path) == {}
    assert not (tmp_path / version_state.TRASH).exists()


def _collect(root: Path, stop) -> None:
    until = time.monotonic() + 60  # should the test be killed
    while not stop.is_set() and time.monotonic() < until:
        list(collect_garbage(root, grace_s=-9))


def test_everybody_at_once(publish, tmp_path) -> None:
    """Versions are retired, tagged, leased and collected by several at once: what a tag names in the end is there."""
    versions = [publish(tmp_path, "x", number) for number in range(40)]
    context = multiprocessing.get_context("fork")
    stop = context.Event()
    collectors = [context.Process(target=_collect, args=(tmp_path, stop), daemon=True) for _ in range(2)]
    for collector in collectors:
        collector.start()
    named, won = {}, 0
    for i, path in enumerate(versions):
        try:
            retire_version(path)
            undo_retirement(tmp_path, "x", path.name)
            tags.move_tag(tmp_path, "x", f"t{i}", path.name)
        except PitError:
            continue
        named[f"t{i}"] = path
        won += 1
        with pytest.raises(UsageError):  # its tag, or that it is aside for a moment
            retire_version(path)
    stop.set()
    for collector in collectors:
        collector.join()
        assert collector.exitcode == 0
    run(tmp_path)
    held = {tag: value.version for tag, value in tags.read_tags(tmp_path, "x").items()}
    assert {tag: path.name for tag, path in named.items()} == held
    assert all((path / "action/c/1").exists() for path in named.values())
    assert not (tmp_path / version_state.TRASH).exists()
