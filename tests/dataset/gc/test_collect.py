from __future__ import annotations

import json
import os
import shutil
import time
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest

from pitools.core.errors import DataError, TryLater, UsageError
from pitools.core.fs import open_regular
from pitools.dataset.catalog.retirement import retire_version, undo_retirement
from pitools.dataset.gc.collect import GRACE_S, collect_garbage
from pitools.store import retirement, tags, version_state

LATER = version_state.utc_now() + timedelta(days=8)
KEY = "1234" * 8  # of an ingest


def run(root: Path, **settings) -> dict[str, tuple[str, str]]:
    """State and reason by version, after `gc` a week later."""
    return {
        actual.version: (actual.state, actual.reason) for actual in collect_garbage(root, **{"now": LATER} | settings)
    }


def test_nothing_to_do(publish, tmp_path) -> None:
    """What is not retired is not even spoken of, and not one manifest is opened."""
    publish(tmp_path, "x")
    with patch("pitools.dataset.gc.references.References.update", side_effect=AssertionError):
        assert run(tmp_path) == {}


def test_grace(publish, tmp_path) -> None:
    """A retired version stays for the grace, its own where that is longer, and then goes with all its records."""
    first, two = (publish(tmp_path, "x", number) for number in range(2))
    retire_version(first, reason="bad labels")
    retire_version(two, grace_s=30 * 86400)
    version_state.set_quarantine(first, version_state.Quarantine(whole_version=True, set_at="", set_by=""))
    soon = run(tmp_path, now=LATER - timedelta(days=2))
    assert {state for state, _ in soon.values()} == {"kept"}
    assert "within its grace until" in soon[first.name][1]
    assert run(tmp_path, dry_run=True)[first.name] == ("would-remove", "")
    assert first.exists()
    result = run(tmp_path)
    assert (result[first.name], result[two.name][0]) == (("removed", ""), "kept")
    assert not first.exists()
    assert two.exists()
    assert not [path for path in tmp_path.rglob("*") if first.name in path.name]
    assert not (tmp_path / version_state.TRASH).exists()


def test_retired_again(publish, tmp_path) -> None:
    """Of a retired version the grace grows and the reason changes; a shorter grace or no reason leaves them."""
    version = publish(tmp_path, "x")
    first = retire_version(version, reason="bad", grace_s=5)
    second = retire_version(version, reason="worse", grace_s=30 * 86400)
    assert (second.reason, second.grace_s, second.retired_at) == ("worse", 30 * 86400, first.retired_at)
    assert retire_version(version) == second
    assert run(tmp_path)[version.name][0] == "kept"


def test_undo(publish, tmp_path) -> None:
    """A retirement that was taken back in time never was; of a version that is gone it cannot be."""
    version = publish(tmp_path, "x")
    retire_version(version)
    undo_retirement(tmp_path, "x", version.name)
    assert run(tmp_path) == {}
    retire_version(version)
    run(tmp_path)
    with pytest.raises(UsageError):
        undo_retirement(tmp_path, "x", version.name)


def test_same_content_again(publish, tmp_path) -> None:
    """A version that was ingested again is not retired by what was said of the one before."""
    version = publish(tmp_path, "x")
    retire_version(version)
    data = version_state.retired_file(tmp_path, "x", version.name).read_bytes()
    run(tmp_path)
    time.sleep(0.002)
    assert publish(tmp_path, "x") == version
    version_state.retired_file(tmp_path, "x", version.name).write_bytes(data)  # as a killed `gc` may leave it
    assert retirement.read_retirements(tmp_path, "x") == {}
    assert run(tmp_path) == {}
    assert version.exists()


def plan(runs: Path, name: str, *versions: str) -> None:
    (runs / name).mkdir(parents=True)
    data = [{"name": "d", "source": "/x", "version": version, "bytes": 1} for version in versions]
    (runs / name / "plan.json").write_text(json.dumps({"schema": "pit.plan/1", "name": "x", "data": data}))


def test_what_keeps(publish, tmp_path) -> None:
    """A lease, a run's plan, a child and a part of it each keep a retired version, and the reason names them."""
    root, runs = tmp_path / "root", tmp_path / "runs"
    leased, run_by, parent, loose = (publish(root, "x", number) for number in range(4))
    child = publish(root, "y", 4, parent=parent.name)
    for path in (leased, run_by, parent, loose):
        retire_version(path)
    plan(runs, "bc-1", "f" * 32, run_by.name)
    with version_state.leased_version(leased, 9 * 86400, "training bc-1"):
        result = run(root, runs=[runs])
    assert {version: state for version, (state, _) in result.items()} == {
        leased.name: "kept",
        run_by.name: "kept",
        parent.name: "kept",
        loose.name: "removed",
    }
    assert "training bc-1" in result[leased.name][1]
    assert result[run_by.name][1] == "run bc-1"
    assert result[parent.name][1] == f"parent of y/{child.name}"
    shutil.rmtree(runs / "bc-1")
    retire_version(child)
    assert {state for state, _ in run(root, runs=[runs]).values()} == {"removed"}  # parent and child at once


def test_real_plan() -> None:
    """The plan that a launch writes has the fields that `gc` reads of it."""
    from pitools.launch.plan import Plan, StagedDataset

    assert "data" in Plan.__struct_fields__
    assert "version" in StagedDataset.__struct_fields__


def test_tag_after_retirement(publish, tmp_path) -> None:
    """Where both happened at the same moment the tag keeps the version."""
    version = publish(tmp_path, "x")
    tags.move_tag(tmp_path, "x", "prod", version.name)
    with patch("pitools.store.tags.read_tags", return_value={}):
        retire_version(version)
    assert run(tmp_path) == {version.name: ("kept", "tag prod")}
    tags.move_tag(tmp_path, "x", "prod", "")
    assert run(tmp_path)[version.name][0] == "removed"


def test_leases_end(publish, tmp_path) -> None:
    """A lease lasts as long as it says and some minutes more, can be renewed, and what is left of it is removed."""
    version = publish(tmp_path, "x")
    retire_version(version)
    holder = version_state.leased_version(version, 3600, "job")
    lease = holder.__enter__()  # and killed
    over = timedelta(seconds=3600) + version_state.SKEW
    begin = version_state.utc_now()
    assert run(tmp_path, grace_s=0, now=begin + over - timedelta(seconds=9))[version.name][0] == "kept"
    lease.extend(7200)
    assert run(tmp_path, grace_s=0, now=begin + over + timedelta(seconds=9))[version.name][0] == "kept"
    live = publish(tmp_path, "x", 1)
    with version_state.leased_version(live, 60, "other"):
        assert run(tmp_path, grace_s=0, now=begin + 2 * over + timedelta(hours=1))[version.name][0] == "removed"
        assert version_state.list_names(version_state.leases_dir(tmp_path, "x", live.name)) == []  # over by that clock
    with pytest.raises(DataError, match="missing"), version_state.leased_version(version, 60, "job"):
        pass
    assert not version_state.leases_dir(tmp_path, "x", version.name).exists()


def test_unreadable_things_keep(publish, tmp_path) -> None:
    """A manifest, plan, lease or tag that cannot be read may name anything, so everything stays, and it is named."""
    root, runs = tmp_path / "root", tmp_path / "runs"
    one, damaged = publish(root, "x"), publish(root, "y", 1)
    retire_version(one)
    data = (damaged / "manifest.json").read_bytes()
    (damaged / "manifest.json").write_text("{")
    state, why = run(root)[one.name]
    assert (state, str(damaged) in why) == ("kept", True)
    (damaged / "manifest.json").write_bytes(data)
    plan(runs, "bc-1")
    (runs / "bc-1/plan.json").write_text("{")
    state, why = run(root, runs=[runs])[one.name]
    assert (state, "bc-1/plan.json" in why) == ("kept", True)
    leases = version_state.leases_dir(root, "x", one.name)
    leases.mkdir(parents=True)
    (leases / "a.json").write_text("{")
    assert run(root)[one.name] == ("kept", "lease of ?:0 (a.json) until 9999-12-31T00:00:00Z")
    (leases / "a.json").unlink()
    broken = version_state.tags_dir(root, "x") / "prod/1.json"
    broken.parent.mkdir(parents=True)
    broken.write_text("{")
    assert str(broken) in run(root)[one.name][1]
    broken.unlink()
    with pytest.raises(UsageError):
        run(root, runs=[tmp_path / "typo"])
    assert run(root)[one.name][0] == "removed"


@pytest.mark.parametrize("refusing", ["os.listdir", "pitools.dataset.gc.references.open_regular"])
def test_runs_of_other_users(publish, tmp_path, capsys, refusing) -> None:
    """A run of another user that may not be read keeps every version, and standard error names it once."""
    root, runs = tmp_path / "root", tmp_path / "runs"
    version = publish(root, "x")
    retire_version(version)
    plan(runs, "bc-1")
    with patch(refusing, side_effect=_refuse_below(runs, refusing)):
        assert run(root, runs=[runs])[version.name][0] == "kept"
    assert capsys.readouterr().err.count(str(runs)) == 1


def _refuse_below(folder: Path, name: str):
    call = os.listdir if name == "os.listdir" else open_regular

    def refuse(path):
        if Path(path).is_relative_to(folder):
            raise PermissionError(13, "Permission denied")
        return call(path)

    return refuse


def test_source_of_a_reencoded_version(publish, tmp_path) -> None:
    """A version that another was re-encoded from stays, as its recording; it goes with that one."""
    first = publish(tmp_path, "x")
    other = publish(tmp_path, "y", 1, recording=first.name)
    retire_version(first)
    assert run(tmp_path)[first.name] == ("kept", f"parent of y/{other.name}")
    retire_version(other)
    assert {state for state, _ in run(tmp_path).values()} == {"removed"}


def test_damaged_itself(publish, tmp_path) -> None:
    """A version whose own manifest is damaged can be retired and goes."""
    version = publish(tmp_path, "x")
    (version / "manifest.json").write_text("{")
    retire_version(version)
    assert run(tmp_path)[version.name][0] == "removed"


@pytest.mark.parametrize("what", ["tag", "lease", "run", "child", "undo"])
def test_named_at_the_last_moment(publish, tmp_path, what) -> None:
    """Whatever names a version after `gc` took it aside brings it back, whole."""
    root, runs = tmp_path / "root", tmp_path / "runs"
    runs.mkdir()
    version = publish(root, "x")
    content = sorted((path.relative_to(version), path.stat().st_ino) for path in version.rglob("*"))
    retire_version(version)
    rename, done = os.rename, []

    def act(old, new):
        rename(old, new)
        if Path(old) != version or done:
            return
        done.append(True)
        if what == "tag":
            link = version_state.tags_dir(root, "x") / "prod/1.json"
            version_state.write_catalog_record(link, tags._Move(version=version.name, moved_at="", moved_by=""))
        elif what == "lease":
            version_state.write_catalog_record(
                version_state.leases_dir(root, "x", version.name) / "a.json",
                version_state.LeaseRecord(until="2999-01-01T00:00:00Z", host="h", pid=1, purpose="w"),
            )
        elif what == "run":
            plan(runs, "bc-1", version.name)
        elif what == "child":
            publish(root, "z", 9, parent=version.name)
        else:
            with pytest.raises(TryLater, match="gc"):
                undo_retirement(root, "x", version.name)

    with patch("os.rename", act):
        result = run(root, runs=[runs])
    assert result[version.name][0] == "kept"
    assert sorted((path.relative_to(version), path.stat().st_ino) for path in version.rglob("*")) == content
    assert not (root / version_state.TRASH).exists()


def test_freed(publish, tmp_path) -> None:
    """A file that another version has a hard link to frees nothing, until the last of them goes."""
    version = publish(tmp_path, "x")
    two, three = (publish(tmp_path, "x", number, parent=version.name, shares=version) for number in (1, 2))
    data_by_path = {
        path: sum(file.stat().st_size for file in path.rglob("*") if file.is_file() and file.stat().st_nlink == 1)
        for path in (version, two, three)
    }
    shared = (version / "action/c/0").stat().st_size

    def freed(**settings) -> dict[str, int]:
        return {actual.version: actual.freed_bytes for actual in collect_garbage(tmp_path, now=LATER, **settings)}

    retire_version(three)
    assert freed(dry_run=True) == freed() == {three.name: data_by_path[three]}
    retire_version(two)
    retire_version(version)
    planned, done = freed(dry_run=True), freed()
    assert planned == done
    assert sum(done.values()) == data_by_path[version] + data_by_path[two] + shared


def test_unfinished(publish, tmp_path) -> None:
    """An unfinished ingest goes when nothing in it was written to for the grace, and not before."""
    publish(tmp_path, "x")
    other = f"rebuild.x.{'5' * 8}"
    created = tmp_path / f".tmp/x.{KEY}/store/action/c"
    created.mkdir(parents=True)
    (created / "0").write_bytes(b"x" * 100)
    (tmp_path / f".tmp/{other}").mkdir()

    def age(*paths: Path) -> None:
        for path in paths:
            os.utime(path, (LATER.timestamp() - GRACE_S - 9,) * 2)

    age(*[path for path in (tmp_path / ".tmp").rglob("*") if path.name not in (other, "0")])
    os.utime(created / "0", (LATER.timestamp(),) * 2)
    os.utime(tmp_path / f".tmp/{other}", (LATER.timestamp(),) * 2)
    unfinished = {f"x.{KEY}", other}
    for records in (
        list(collect_garbage(tmp_path, now=LATER)),
        list(collect_garbage(tmp_path, grace_s=0, now=LATER + timedelta(minutes=9))),
    ):
        assert {record.name for record in records if record.state == "kept" and record.reason} == unfinished
    age(created / "0")
    record, _ = sorted(
        collect_garbage(tmp_path, now=LATER, dry_run=True), key=lambda record: record.state != "would-remove"
    )
    assert (record.state, record.name, record.version, record.freed_bytes) == ("would-remove", f"x.{KEY}", "", 100)
    states = {record.name: record.state for record in collect_garbage(tmp_path, now=LATER)}
    assert states == {f"x.{KEY}": "removed", other: "kept"}
    assert [path.name for path in (tmp_path / ".tmp").iterdir()] == [other]


def test_folders_of_any_depth(publish, tmp_path) -> None:
    """Folders that somebody made in a retired version and in an unfinished ingest go with them, also where they are
    deeper than a recursion or a path can be."""
    version, begin = publish(tmp_path, "x"), tmp_path / f".tmp/x.{KEY}"
    retire_version(version)
    begin.mkdir(parents=True)
    for top, depth in ((version, 1100), (begin, 2100)):
        folders = [os.open(top, os.O_RDONLY)]
        for _ in range(depth):
            os.mkdir("d", dir_fd=folders[-1])
            folders.append(os.open("d", os.O_RDONLY, dir_fd=folders[-1]))
            os.close(folders.pop(0))
        os.close(folders.pop())
    assert {state for state, _ in run(tmp_path).values()} == {"removed"}
    assert [path.exists() for path in (version, begin, tmp_path / version_state.TRASH)] == [False] * 3


def test_link_is_left(publish, tmp_path) -> None:
    """A version that is a link to elsewhere is not followed."""
    real = publish(tmp_path / "else", "x")
    root = tmp_path / "root"
    (root / "x").mkdir(parents=True)
    (root / "x" / real.name).symlink_to(real)
    record = retirement.Retirement(
        name="x",
        version=real.name,
        retired_at="2020-01-01T00:00:00Z",
        retired_by="",
        published=retirement.published_at(real),
    )
    version_state.write_catalog_record(version_state.retired_file(root, "x", real.name), record)
    assert run(root)[real.name] == ("kept", "its path has a link (expected folders)")
    assert (real / "action/c/0").exists()


def _kill_at(step: int, work) -> bool:
    """Run in a forked child that dies before its `step`-th change of the file system; whether it did."""
    pid = os.fork()
    if pid == 0:
        import sys

        left = step
        changes = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.unlink", "os.truncate"}

        def count(event: str, args) -> None:
            nonlocal left
            if event in changes or (event == "open" and isinstance(args[2], int) and args[2] & os.O_CREAT):
                left -= 1
                if left == 0:
                    os._exit(99)

        try:
            sys.addaudithook(count)
            work()
            os._exit(0)
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, 99)
    return code == 99


def test_killed_at_every_step(publish, tmp_path) -> None:
    """Killed before any change it makes, `gc` has lost nothing that is named, and the next one ends its work."""
    revived = 0
    for step in range(1, 200):
        root = tmp_path / str(step)
        gone, child, retained, live = (
            parent := publish(root, "x"),
            publish(root, "x", 1, parent=parent.name, shares=parent),
            publish(root, "x", 2),
            publish(root, "x", 3),
        )
        grandchild = publish(root, "y", 4, parent=retained.name)
        for path in (gone, child, retained):
            retire_version(path)
        (root / f".tmp/x.{KEY}").mkdir(parents=True)
        os.utime(root / f".tmp/x.{KEY}", (0, 0))
        died = _kill_at(step, lambda root=root: list(collect_garbage(root, now=LATER)))
        data_by_path = {path: (path / "action/c/1").read_bytes() for path in (retained, live, grandchild)}  # never away
        aside = [path.name for path in version_state.list_names(root / version_state.TRASH) if child.name in path.name]
        if step % 2 and aside and not aside[0].endswith(".deleting"):
            plan(root / "runs", "r", child.name)  # what is only aside comes back when it is named now
        runs = [root / "runs"] if (root / "runs").exists() else []
        list(collect_garbage(root, now=LATER, runs=runs))
        assert all((path / "action/c/1").read_bytes() == data for path, data in data_by_path.items())
        assert not (root / version_state.TRASH).exists()
        assert not (root / f".tmp/x.{KEY}").exists()
        assert child.exists() == bool(runs)
        if runs and gone.exists():
            assert (gone / "action/c/0").samefile(child / "action/c/0")
            revived += 1
        if not died:
            break
    assert 15 < step < 199
    assert revived
