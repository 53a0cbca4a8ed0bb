from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pitools.core import locks, subprocesses
from pitools.core.errors import ClusterError, DataError, NoSpace, PitError, TryLater
from pitools.core.locks import LockOwner
from pitools.stage.cache import evict, inventory, layout, lease, records
from pitools.stage.cache.space import RootLimits, reserve
from pitools.stage.sources.find import load_version
from pitools.stage.stage import stage_version

FOLDERS = ["objects", ".tmp", ".locks", ".leases", ".records", ".quarantine"]


def as_user(uid: int, action: Callable[[], object]) -> str:
    """Run something as another user; the name of the error it met, or its result as text."""
    out, send = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            os.write(send, str(action()).encode())
        except (PitError, OSError) as error:
            os.write(send, type(error).__name__.encode())
        finally:
            os._exit(0)
    os.close(send)
    with os.fdopen(out) as file:
        text = file.read()
    os.waitpid(pid, 0)
    return text


def in_child(action: Callable[[], object]) -> int:
    """Start a process that does this, says so, and then sleeps; returns its pid once it has said so."""
    ready, send = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            action()
            os.write(send, b"x")
            time.sleep(60)
        finally:
            os._exit(1)
    os.close(send)
    assert os.read(ready, 1) == b"x"
    os.close(ready)
    return pid


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_too_little_space_is_refused_before_the_first_byte(small: Path, tmpfs):
    """The error names what is needed and what is free, and asks to try later."""
    disk = tmpfs("size=9m")
    with pytest.raises(NoSpace, match=r"11\.1 MiB needed, 9\.0 MiB free"):
        stage_version(load_version(small), disk / "pit", advance=lambda _: pytest.fail("a byte was written"))
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
        stage_version(load_version(folder), disk / "pit", bytes_per_s=1 << 30, advance=once(fill))
    assert os.listdir(disk / "pit/objects") == []
    assert residue(disk / "pit") == []
    (disk / "theirs").unlink()
    assert stage_version(load_version(folder), disk / "pit").state == "staged"


def test_a_read_only_disk_refuses_a_copy_but_serves_what_it_has(small: Path, make_dataset, tmpfs):
    """Exit 4 for what would have to be written; `present` for what is there."""
    disk = tmpfs("size=32m")
    stage_version(load_version(small), disk / "pit")
    assert subprocesses.run(["mount", "-o", "remount,ro", str(disk)], timeout_s=10).code == 0
    assert stage_version(load_version(small), disk / "pit").state == "present"
    assert stage_version(load_version(small), disk / "pit", verify=True).state == "present"
    dataset = load_version(make_dataset({"a": b"1"}, "other"))
    for place in ("pit", "new"):
        with pytest.raises(ClusterError, match="Read-only"):
            stage_version(dataset, disk / place)


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("kind", ["link", "owner", "writable", "group", "file"])
def test_a_root_that_others_could_exchange_is_refused(
    small: Path, root: Path, folder: str, kind: str, request: pytest.FixtureRequest
):
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
        elif kind == "group":
            request.getfixturevalue("as_root")
            os.chown(place, -1, 54321)
            place.chmod(0o775)
        else:
            request.getfixturevalue("as_root")
            os.chown(place, 54321, -1)
    with pytest.raises(ClusterError) as error:
        stage_version(load_version(small), root)
    assert error.value.where == str(place)
    assert list((root.parent / "theirs").glob("*")) == [] if kind == "link" else True


@pytest.mark.parametrize("kind", ["owner", "writable", "link"])
def test_a_root_of_another_user_is_refused(small: Path, tmp_path: Path, kind: str, request: pytest.FixtureRequest):
    """Whoever owns ROOT, or may write to it, could exchange all that is in it."""
    if kind != "writable":
        request.getfixturevalue("as_root")
    root = tmp_path / "theirs"
    root.mkdir()
    if kind == "owner":
        os.chown(root, 54321, -1)
    elif kind == "writable":
        root.chmod(0o777)
    else:
        root = tmp_path / "link"
        root.symlink_to(tmp_path / "theirs")
        os.chown(root, 54321, -1, follow_symlinks=False)
    with pytest.raises(ClusterError) as error:
        stage_version(load_version(small), root)
    assert error.value.where == str(root)
    assert os.listdir(tmp_path / "theirs") == []


@pytest.mark.parametrize("kind", ["writable", "group", "of another user in a sticky folder"])
@pytest.mark.usefixtures("as_root")
def test_a_root_that_others_could_replace_is_refused(small: Path, tmp_path: Path, kind: str):
    """Whoever may write to a folder above ROOT could put another root in its place between two jobs."""
    above = tmp_path / "nvme"
    above.mkdir()
    if kind == "writable":
        above.chmod(0o777)
    elif kind == "group":
        os.chown(above, -1, 54321)
        above.chmod(0o770)
    else:
        above.chmod(0o1777)
        above = above / "theirs"
        above.mkdir()
        os.chown(above, 54321, -1)
    with pytest.raises(ClusterError) as error:
        stage_version(load_version(small), above / "more" / "pit")
    assert error.value.where == str(above)
    assert os.listdir(above) == []


@pytest.mark.parametrize("kind", ["sticky", "of another user", "of a group of mine", "a link"])
@pytest.mark.usefixtures("as_root")
def test_a_root_in_folders_as_sites_have_them_is_taken(
    small: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
):
    """In /tmp; in a project's folder, or a user's that a container's root sees; behind a link."""
    above = tmp_path / "nvme"
    above.mkdir()
    if kind == "sticky":
        above.chmod(0o1777)
    elif kind == "of another user":
        os.chown(above, 54321, 54321)
    elif kind == "of a group of mine":
        monkeypatch.setattr(os, "getgroups", lambda: [54321])  # root's own group is trusted in any case
        os.chown(above, 54321, 54321)
        above.chmod(0o2770)
    else:
        (tmp_path / "mount").symlink_to(above)
        above = tmp_path / "mount"
    assert stage_version(load_version(small), above / "user" / "pit").state == "staged"


@pytest.mark.parametrize("umask", [0, 0o002, 0o077])
def test_folders_made_above_a_root_are_taken_again(small: Path, tmp_path: Path, umask: int):
    """Whatever the umask, nobody else may write to them: the next run would refuse the root."""
    old = os.umask(umask)
    try:
        states = [stage_version(load_version(small), tmp_path / "a" / "b" / "pit").state for _ in range(2)]
    finally:
        os.umask(old)
    assert states == ["staged", "present"]
    assert mode(tmp_path / "a") == mode(tmp_path / "a" / "b") == 0o755 & ~umask


def test_a_sticky_root_and_a_link_of_ones_own_are_taken(small: Path, tmp_path: Path):
    """In /tmp others cannot take our folders away, and /nvme may well be a link."""
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp").chmod(0o1777)
    (tmp_path / "link").symlink_to(tmp_path / "tmp")
    assert stage_version(load_version(small), tmp_path / "link").state == "staged"


def test_a_root_below_a_file_is_refused(small: Path, tmp_path: Path):
    """A wrong --to is an error of ours, not a traceback."""
    (tmp_path / "file").touch()
    with pytest.raises(ClusterError):
        stage_version(load_version(small), tmp_path / "file" / "pit")


def test_staged_data_is_private_unless_the_root_says_otherwise(small: Path, root: Path):
    """A copy on a shared node is not readable by more users than its source."""
    final = Path(stage_version(load_version(small), root).path)
    assert {mode(folder) for folder in (root, *(root / name for name in FOLDERS))} == {0o700}
    assert {mode(file) for name in (".locks", ".leases", ".records") for file in (root / name).iterdir()} == {0o600}
    assert (final / "zarr.json").stat().st_mode & 0o222 == 0


@pytest.mark.parametrize("before", [False, True])
def test_a_shared_root_is_readable_and_nothing_more(small: Path, root: Path, before: bool):
    """On purpose, all may read sets, leases and records; locks and unfinished sets stay private, whatever the umask."""
    if before:
        layout.create_root(root)
        (root / ".locks").chmod(0o755)
    old = os.umask(0o077)
    try:
        stage_version(load_version(small), root, shared=True)
    finally:
        os.umask(old)
    folders = [root, *(root / name for name in ("objects", ".leases", ".records"))]
    assert {mode(folder) for folder in folders} == {0o755}
    assert {mode(root / name) for name in (".tmp", ".quarantine", ".locks")} == {0o700}
    assert (mode(root / ".leases" / small.name), mode(root / ".locks" / small.name)) == (0o644, 0o600)
    assert mode(root / ".records" / f"{small.name}.json") == 0o644
    layout.create_root(root)  # and stays so
    assert mode(root / ".leases") == 0o755


def test_one_version_waits_for_its_lock_and_gives_up_in_time(small: Path, root: Path):
    """Who waits learns who it waits for, and is told to try later when that takes too long."""
    observed: list[LockOwner] = []
    layout.create_root(root)
    with layout.version_lock(root, small.name, timeout_s=0) as tell:
        tell(5 << 20, 7 << 20)
        with pytest.raises(TryLater) as error:
            stage_version(load_version(small), root, timeout_s=0.2, on_wait=observed.append)
    assert [(name.pid, name.done_bytes, name.bytes) for name in observed] == [(os.getpid(), 5 << 20, 7 << 20)]
    assert f"pid {os.getpid()}" in error.value.hint
    assert "5.0 MiB of 7.0 MiB" in error.value.hint
    assert stage_version(load_version(small), root).state == "staged"


def test_a_lock_says_who_has_it(root: Path, monkeypatch: pytest.MonkeyPatch):
    """One JSON line while it is held, renewed at most once a second, and nothing afterwards."""
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    layout.create_root(root)
    assert layout.lock_owner(root, "v") is None
    with layout.version_lock(root, "v", timeout_s=0) as tell:
        tell(1, 10)
        for done in range(2, 1000):
            tell(done, 10)
        line = json.loads((root / ".locks/v").read_text())
        assert list(line) == ["schema", "pid", "host", "job", "user", "started", "done_bytes", "bytes"]
        assert (line["schema"], line["pid"], line["job"]) == ("pit.stage-lock/1", os.getpid(), "4711")
        assert (line["done_bytes"], line["bytes"]) == (1, 10)
        holder = layout.lock_owner(root, "v")
        assert holder is not None
        assert "job 4711, 1 B of 10 B" in locks.describe_owner(holder)
    assert layout.lock_owner(root, "v") is None
    assert (root / ".locks/v").read_bytes() == b""


@pytest.mark.parametrize("junk", [b"", b"{", b"\xff\xfe", b'{"schema":"other/1"}', b"null\n", b"x" * 9000])
def test_a_lock_file_may_hold_anything(root: Path, junk: bytes):
    """Its line only informs: a torn or foreign one is no reason to fail."""
    layout.create_root(root)
    with layout.version_lock(root, "v", timeout_s=0):
        (root / ".locks/v").write_bytes(junk)
        assert layout.lock_owner(root, "v") == LockOwner()


def test_a_kill_frees_the_lock_and_leaves_the_unfinished_copy(root: Path):
    """The kernel drops the lock; what was copied stays to be resumed, and what was moved aside is removed."""
    layout.create_root(root)
    partial, journal = layout.partial_path(root, "v"), layout.journal_path(root, "v")
    retained = []

    def work() -> None:
        retained.append(layout.version_lock(root, "v", timeout_s=0))
        retained[0].__enter__()
        partial.mkdir()
        journal.touch()
        layout.staged_path(root, "v").mkdir()
        layout.trash(layout.staged_path(root, "v"), root)

    pid = in_child(work)
    with pytest.raises(TryLater), layout.version_lock(root, "v", timeout_s=0):
        pass
    kill(pid)
    assert layout.lock_owner(root, "v") is None
    with layout.version_lock(root, "v", timeout_s=0):
        pass
    assert sorted(os.listdir(root / ".tmp")) == sorted([partial.name, journal.name])


def test_a_forked_child_does_not_keep_the_lock(root: Path):
    """A process that was forked while the lock was held, and lives on, does not hold it for ever."""
    layout.create_root(root)
    with layout.version_lock(root, "v", timeout_s=0):
        pid = in_child(lambda: None)
    try:
        with layout.try_version_lock(root, "v") as had:
            assert had
    finally:
        kill(pid)


def test_a_forked_child_that_leaves_the_block_does_not_free_the_lock(root: Path):
    """An exception may carry a worker out of what its parent is still in."""
    layout.create_root(root)
    held = layout.version_lock(root, "v", timeout_s=0)
    with held:
        pid = os.fork()
        if not pid:
            held.__exit__(None, None, None)
            os._exit(0)
        os.waitpid(pid, 0)
        actual = layout.lock_owner(root, "v")
        assert actual is not None
        assert actual.pid == os.getpid()


def test_a_link_for_a_lock_file_is_refused(root: Path, tmp_path: Path):
    """What it points to is neither made nor written."""
    layout.create_root(root)
    (tmp_path / "file").write_text("mine")
    for name, target in (("v", "file"), ("w", "nothing")):
        (root / ".locks" / name).symlink_to(tmp_path / target)
        with pytest.raises(ClusterError), layout.version_lock(root, name, timeout_s=0):
            pass
    assert (tmp_path / "file").read_text() == "mine"
    assert not (tmp_path / "nothing").exists()


def test_what_another_process_removes_is_left_to_it(root: Path):
    """Whoever holds the flock of a folder that was moved aside removes it; others pass by, and take it after a kill."""
    layout.create_root(root)
    layout.staged_path(root, "v").mkdir()
    aside = layout.trash(layout.staged_path(root, "v"), root)
    pid = in_child(lambda: locks.lock_within(os.open(aside, os.O_RDONLY), 2, timeout_s=0))
    layout.purge_trash(root)
    assert aside.exists()
    kill(pid)
    layout.purge_trash(root)
    assert not aside.exists()


def test_two_versions_are_staged_at_once(small: Path, make_dataset, root: Path, residue, once):
    """A stager that begins in the middle of another's copy does not take its unfinished folder for rubbish."""
    dataset = make_dataset({"a": os.urandom(1000)}, "other")
    inner = once(lambda: stage_version(load_version(dataset), root))
    assert stage_version(load_version(small), root, bytes_per_s=1 << 30, advance=inner).state == "staged"
    assert sorted(os.listdir(root / "objects")) == sorted([small.name, dataset.name])
    assert residue(root) == []


@pytest.mark.usefixtures("as_root")
def test_two_users_of_one_node_do_not_meet(small: Path, commons: Path):
    """Each stages to a root of their own at the same time; neither waits for, reads, leases or evicts the other's."""
    source = commons / "data"
    shutil.copytree(small.parent.parent, source)
    for path in (source, *source.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    folder = source / small.parent.name / small.name
    ours, theirs = commons / "ours", commons / "theirs"
    for root, uid in ((ours, 1000), (theirs, 65534)):
        root.mkdir(mode=0o700)
        os.chown(root, uid, uid)
    with roots_locked_by(1000, ours, small.name):
        assert as_user(65534, lambda: stage_version(load_version(folder), theirs, timeout_s=0).state) == "staged"
    assert as_user(1000, lambda: stage_version(load_version(folder), ours, timeout_s=0).state) == "staged"
    final = ours / "objects" / small.name
    for action in (
        lambda: os.listdir(ours),
        lambda: (final / "zarr.json").read_bytes(),
        lambda: stage_version(load_version(folder), ours).state,
        lambda: lease.acquire(final),
        lambda: list(inventory.list_sets(ours)),
        lambda: inventory.require_root(ours),
        lambda: layout.create_root(ours),
    ):
        assert as_user(65534, action) in ("PermissionError", "ClusterError")


@contextlib.contextmanager
def roots_locked_by(uid: int, root: Path, version: str) -> Iterator[None]:
    """Another user's process holds the lock of a version at a root of theirs."""
    retained = []

    def work() -> None:
        os.setgid(uid)
        os.setuid(uid)
        layout.create_root(root)
        retained.append(layout.version_lock(root, version, timeout_s=0))
        retained[0].__enter__()

    pid = in_child(work)
    yield
    kill(pid)


@pytest.mark.usefixtures("as_root")
def test_a_shared_root_is_leased_by_who_can_only_read(small: Path, commons: Path):
    """A service account stages, all users lease what stands, and the evictor keeps it while they do."""
    root = commons / "pit"
    assert as_user(0, lambda: stage_version(load_version(small), root, shared=True).state) == "staged"
    for path in (root, *root.rglob("*")):  # as if 1000 had staged it, who could not read the source
        os.chown(path, 1000, 1000)
    final = root / "objects" / small.name
    before = (root / ".leases" / small.name).stat().st_mtime

    def read() -> str:
        with lease.leased_set(final):
            return (final / "zarr.json").read_text()

    assert as_user(65534, read) == "{}"
    assert as_user(65534, lambda: stage_version(load_version(final), root).state) == "present"
    assert as_user(65534, lambda: [record.state for record in inventory.list_sets(root)]) == "['present']"
    assert (root / ".leases" / small.name).stat().st_mtime == before, "who may only read cannot touch it"

    def hold() -> None:
        os.setuid(65534)
        lease.acquire(final)

    pid = in_child(hold)
    item = evict.EvictionCandidate(small.name, final)
    assert as_user(1000, lambda: evict.evict_item(root, item, grace_s=0)) == evict.KeptReason.LEASED
    assert (root / ".leases" / small.name).stat().st_mtime > before, "the evictor says it for them"
    assert as_user(65534, lambda: evict.evict_item(root, item, grace_s=0)) == "ClusterError"
    kill(pid)
    assert as_user(1000, lambda: evict.evict_item(root, item, grace_s=0)) == "None"
    assert not final.exists()
    with pytest.raises(DataError):
        lease.acquire(final)


def test_an_error_of_a_locked_version_still_sweeps(root: Path):
    """Also when the block fails, nothing that was moved aside stays."""
    layout.create_root(root)
    layout.staged_path(root, "v").mkdir()

    def fail() -> None:
        with layout.version_lock(root, "v", timeout_s=0):
            layout.trash(layout.staged_path(root, "v"), root)
            raise NoSpace("full")

    with pytest.raises(NoSpace):
        fail()
    assert os.listdir(root / ".tmp") == []


@pytest.mark.usefixtures("as_root")
def test_who_may_only_read_a_shared_root_cannot_hold_up_its_owner(small: Path, make_dataset, commons: Path):
    """A flock needs no more than an open file: none of those that the owner waits for can be opened by others."""
    root = commons / "pit"
    stage_version(load_version(small), root, shared=True)
    records.set_pinned(root, small.name)
    dataset = load_version(make_dataset({"a": b"1"}, "other"))

    def lock_all() -> int:
        os.setgroups([])
        os.setuid(65534)
        retained.extend(os.open(path, os.O_RDONLY) for path in [root, *root.rglob("*")] if os.access(path, os.R_OK))
        for descriptor in retained:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        return len(retained)

    retained: list[int] = []
    pid = in_child(lock_all)
    try:
        assert stage_version(dataset, root, timeout_s=0, limits=RootLimits(quota_bytes=1 << 40)).state == "staged"
        item = evict.EvictionCandidate(small.name, root / "objects" / small.name)
        assert evict.evict_item(root, item, grace_s=0) == evict.KeptReason.LEASED
        with reserve(root, "v", 1, RootLimits(quota_bytes=1 << 40)):
            pass
    finally:
        kill(pid)


def test_staging_is_a_use(small: Path, root: Path):
    """A version that was there before has an old lease file: it must not be the first to go when it is new again."""
    layout.create_root(root)
    layout.touch_lease(root, small.name)
    os.utime(root / ".leases" / small.name, (1000, 1000))
    start_time = time.time()
    stage_version(load_version(small), root)
    assert lease.last_used(root, small.name) > start_time - 1


def test_who_locks_a_version_makes_its_lease_file(root: Path):
    """Before the set stands: a user who may only read has it to lock from the first moment."""
    layout.create_root(root)
    for version, lock in (
        ("v", layout.version_lock(root, "v", timeout_s=0)),
        ("w", layout.try_version_lock(root, "w")),
    ):
        with lock:
            assert (root / ".leases" / version).exists()


def test_a_link_among_what_is_to_be_removed_leads_nowhere(root: Path, small: Path):
    """It goes, and what it points to stays."""
    layout.create_root(root)
    (root / ".tmp/v.old.n01.1.ab").symlink_to(small)
    layout.purge_trash(root)
    assert os.listdir(root / ".tmp") == []
    assert (small / "zarr.json").exists()


def test_what_others_make_in_between_is_refused(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In a folder like /tmp anybody may be faster with a name: what stands there in the end is what is judged."""
    root = tmp_path / "tmp"
    root.mkdir()
    root.chmod(0o1777)
    (tmp_path / "theirs").mkdir()
    make = layout._make_folder

    def slow(folder: Path, **how: bool) -> None:
        if folder.name == "objects":
            folder.symlink_to(tmp_path / "theirs")
        make(folder, **how)

    monkeypatch.setattr(layout, "_make_folder", slow)
    with pytest.raises(ClusterError, match="symbolic link"):
        stage_version(load_version(small), root)
    assert os.listdir(tmp_path / "theirs") == []
