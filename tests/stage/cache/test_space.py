from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pitools.core import subprocesses
from pitools.core.errors import ClusterError, NoSpace, TryLater
from pitools.core.locks import publish_owner
from pitools.stage.cache import records, space
from pitools.stage.cache.evict import KEPT_TEXT, KeptReason
from pitools.stage.cache.inventory import disk_usage, total_bytes
from pitools.stage.cache.layout import create_root, free_bytes, journal_path, partial_path, root_lock, version_lock
from pitools.stage.cache.lease import leased_set
from pitools.stage.cache.space import RootLimits, Shortfall, make_room, reserve
from pitools.stage.sources.find import load_version
from pitools.stage.stage import stage_version

MIB = 1 << 20


@pytest.fixture(params=["ext4", "xfs"])
def disk(as_root: None, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own, on a sparse file; skips where even root may not mount it."""
    image, place = tmp_path / "image", tmp_path / "disk"
    place.mkdir()
    image.touch()
    os.truncate(image, 400 * MIB)
    make = {"ext4": ["mkfs.ext4", "-q", "-m", "0"], "xfs": ["mkfs.xfs", "-q"]}[request.param]
    try:
        done = subprocesses.run([*make, str(image)], timeout_s=30)
    except Exception as error:  # noqa: BLE001
        pytest.skip(f"{make[0]} is not here: {error}")
    assert done.code == 0, done.stderr
    done = subprocesses.run(["mount", "-o", "loop", str(image), str(place)], timeout_s=30)
    if done.code:
        pytest.skip(f"cannot mount here: {done.stderr.strip()}")
    yield place
    subprocesses.run(["umount", str(place)], timeout_s=30)


def put(root: Path, version: str, n_bytes: int, *, used: float = 1000, source: str = "/shared") -> Path:
    """A set of one file, as if it had been staged and last used then."""
    create_root(root)
    with version_lock(root, version, timeout_s=1):
        folder = root / "objects" / version
        folder.mkdir()
        with (folder / "a").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, n_bytes)
        records.write_stage_record(root, version, source=source, n_bytes=n_bytes)
    os.utime(root / ".leases" / version, (used, used))
    return folder


def child(action: Callable[[], object]) -> int:
    """A process that does this, says so, and sleeps."""
    ready, send = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            retained = action()
            os.write(send, b"x")
            time.sleep(60)
            del retained
        finally:
            os._exit(1)
    os.close(send)
    output = os.read(ready, 1)
    os.close(ready)
    assert output == b"x"
    return pid


def enter(context: contextlib.AbstractContextManager[object]) -> object:
    context.__enter__()
    return context


def stager(root: Path, version: str, needed: int, limits: RootLimits) -> object:
    """What a process that stages holds."""
    return enter(version_lock(root, version, timeout_s=1)), enter(reserve(root, version, needed, limits, in_flight=0))


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def near(found: int, wanted: int) -> bool:
    return abs(found - wanted) < MIB


def test_what_is_reserved_is_taken_on_the_disk(disk: Path):
    """Every process and user of the disk sees it; it shrinks as bytes land, and is gone at the end."""
    root = disk / "pit"
    create_root(root)
    n_free_bytes = free_bytes(root)
    with reserve(root, "v", 200 * MIB, RootLimits(), in_flight=20 * MIB) as used:
        assert near(n_free_bytes - free_bytes(root), 180 * MIB)
        used(10 * MIB)
        used(40 * MIB)
        assert near(n_free_bytes - free_bytes(root), 130 * MIB)
        used(149 * MIB)
        used(0)
        assert near(n_free_bytes - free_bytes(root), 0)
        used(2 * MIB)
    assert near(n_free_bytes, free_bytes(root))
    with reserve(root, "v", 30 * MIB, RootLimits(), in_flight=20 * MIB) as used:
        used(15 * MIB)  # little is held in the end, but on a full disk that is what the last bytes lack
        assert near(n_free_bytes - free_bytes(root), 0)
    with pytest.raises(KeyError), reserve(root, "v", 200 * MIB, RootLimits(), in_flight=0):
        raise KeyError
    assert near(n_free_bytes, free_bytes(root))


def test_no_reservation_outlives_its_holder(disk: Path):
    """kill -9, also while forked workers live for a moment: the kernel gives the room back."""
    root = disk / "pit"
    create_root(root)
    n_free_bytes = free_bytes(root)
    pid = child(lambda: enter(reserve(root, "v", 200 * MIB, RootLimits(), in_flight=0)))
    assert near(n_free_bytes - free_bytes(root), 200 * MIB)
    with pytest.raises(NoSpace), reserve(root, "w", 250 * MIB, RootLimits(), in_flight=0):
        pass
    with pytest.raises(TryLater), reserve(root, "v", MIB, RootLimits()):
        pass
    kill(pid)
    until = time.monotonic() + 2
    while not near(n_free_bytes, free_bytes(root)) and time.monotonic() < until:  # XFS takes a moment
        time.sleep(0.001)
    assert near(n_free_bytes, free_bytes(root))
    with reserve(root, "w", 250 * MIB, RootLimits(), in_flight=0), reserve(root, "v", MIB, RootLimits()):
        pass


def test_a_worker_that_lives_on_holds_nothing(disk: Path):
    """A process that was forked meanwhile has the descriptors too, but not the room."""
    root = disk / "pit"
    create_root(root)
    n_free_bytes = free_bytes(root)
    with reserve(root, "v", 200 * MIB, RootLimits(), in_flight=0):
        pid = child(lambda: None)
    try:
        assert near(n_free_bytes, free_bytes(root))
        with reserve(root, "v", 200 * MIB, RootLimits(quota_bytes=201 * MIB), in_flight=0):
            pass
    finally:
        kill(pid)


def test_other_roots_of_the_disk_see_the_room_taken(disk: Path):
    """Two users stage to one disk: together they do not promise more than there is."""
    for name in "ab":
        create_root(disk / name)
    with (
        reserve(disk / "a", "v", 200 * MIB, RootLimits(), in_flight=0),
        pytest.raises(NoSpace),
        reserve(disk / "b", "w", 200 * MIB, RootLimits(), in_flight=0),
    ):
        pass


def test_room_is_made_on_a_real_disk(disk: Path):
    """Evicting frees blocks that the reservation then holds, also where the file system frees them a little later."""
    root = disk / "pit"
    for n in range(3):
        put(root, f"v{n}", 90 * MIB, used=1000 + n)
    free = free_bytes(root)
    needed = free + 100 * MIB
    with reserve(root, "new", needed, RootLimits(), in_flight=0):
        assert os.listdir(root / "objects") == ["v2"]
    assert near(free_bytes(root), free + 180 * MIB)


def test_a_tmpfs_is_reserved_by_the_ledger_alone(tmpfs):
    """Allocating memory would be writing it: other stagers of the root count what was written down instead."""
    root = tmpfs("size=100m") / "pit"
    create_root(root)
    n_free_bytes = free_bytes(root)
    pid = child(lambda: stager(root, "v", 60 * MIB, RootLimits()))
    assert near(n_free_bytes, free_bytes(root))
    assert near(space.available_bytes(root), n_free_bytes - 60 * MIB)
    partial_path(root, "v").mkdir()
    (partial_path(root, "v") / "a").write_bytes(bytes(20 * MIB))
    assert near(space.available_bytes(root), n_free_bytes - 60 * MIB)  # landed bytes are not counted twice
    with pytest.raises(NoSpace, match=r"version w: 50\.0 MiB needed, 40"), reserve(root, "w", 50 * MIB, RootLimits()):
        pass
    assert partial_path(root, "v").exists()
    kill(pid)
    with reserve(root, "w", 90 * MIB, RootLimits()):
        assert not partial_path(root, "v").exists(), "the dead stager's copy is the first to go"


def test_the_quota_counts_all_that_stands(root: Path):
    """Sets, unfinished copies, quarantined sets and what live stagers are still going to take."""
    put(root, "a", 10 * MIB, used=time.time())
    (root / ".quarantine/q").mkdir()
    (root / ".quarantine/q/x").write_bytes(bytes(MIB))
    limits = RootLimits(quota_bytes=32 * MIB)
    pid = child(lambda: stager(root, "b", 10 * MIB, limits))
    partial_path(root, "b").mkdir()
    (partial_path(root, "b") / "x").write_bytes(bytes(5 * MIB))  # on its way, and counted already
    with reserve(root, "c", 10 * MIB, limits):
        pass
    with pytest.raises(NoSpace, match=r"11\.0 MiB needed, 1\d\.\d MiB left of 32\.0 MiB"):
        enter(reserve(root, "c", 11 * MIB, limits))  # what is in quarantine takes the last of it
    kill(pid)
    with reserve(root, "c", 12 * MIB, limits):
        pass


def test_a_resumed_copy_is_promised_in_full(root: Path):
    """What stands of it and what is still to come: as parts of it land, others are promised no more."""
    create_root(root)
    limits, parts = RootLimits(quota_bytes=20 * MIB), partial_path(root, "b")
    parts.mkdir()
    (parts / "x").write_bytes(bytes(6 * MIB))
    pid = child(lambda: stager(root, "b", 6 * MIB, limits))
    assert space.read_reservations(root)["b"].bytes >= 12 * MIB
    for _ in range(2):
        with pytest.raises(NoSpace), reserve(root, "c", 9 * MIB, limits):
            pass
        with reserve(root, "c", 7 * MIB, limits):
            pass
        (parts / "y").write_bytes(bytes(6 * MIB))
    kill(pid)


def test_quota_evicts_the_oldest_and_no_more_than_needed(root: Path):
    """Least recently used first, and nothing beyond what makes the room."""
    for n, used in enumerate((300, 100, 200)):
        put(root, f"v{n}", 10 * MIB, used=used)
    with reserve(root, "new", 10 * MIB, RootLimits(quota_bytes=41 * MIB)):
        assert len(os.listdir(root / "objects")) == 3
    with reserve(root, "new", 15 * MIB, RootLimits(quota_bytes=41 * MIB)):
        assert sorted(os.listdir(root / "objects")) == ["v0", "v2"]
    with reserve(root, "new", 25 * MIB, RootLimits(quota_bytes=41 * MIB)):
        assert os.listdir(root / "objects") == ["v0"]


def test_nothing_is_evicted_in_vain(root: Path):
    """Where all that may go is too little, all of it stays, and the error says what keeps the rest."""
    for n in range(4):
        put(root, f"v{n}", 10 * MIB)
    records.set_pinned(root, "v1")
    records.remove_stage_record(root, "v2")
    with (
        leased_set(root / "objects/v3", touch=False),
        pytest.raises(NoSpace) as error,
        reserve(root, "new", 30 * MIB, RootLimits(quota_bytes=41 * MIB)),
    ):
        pass
    assert len(os.listdir(root / "objects")) == 4
    assert "30.0 MiB needed" in error.value.message
    assert "left of 41.0 MiB" in error.value.message
    for reason in (KeptReason.PINNED, KeptReason.LEASED, KeptReason.UNKNOWN_SOURCE):
        assert f"1 {KEPT_TEXT[reason]}" in error.value.hint
    # What never can have room is not to be tried again.
    with (
        pytest.raises(ClusterError, match="quota of 41"),
        reserve(root, "new", 50 * MIB, RootLimits(quota_bytes=41 * MIB)),
    ):
        pass
    assert len(os.listdir(root / "objects")) == 4


def test_ones_own_unfinished_copy_is_no_room(root: Path):
    """What a resumed copy has already is not counted as what could go for it, nor named as somebody else's."""
    put(root, "old", 10 * MIB)
    partial_path(root, "mine").mkdir()
    (partial_path(root, "mine") / "x").write_bytes(bytes(10 * MIB))
    with (
        version_lock(root, "mine", timeout_s=1),
        pytest.raises(NoSpace) as error,
        reserve(root, "mine", 20 * MIB, RootLimits(quota_bytes=25 * MIB)),
    ):
        pass
    assert "another process" not in error.value.hint
    assert os.listdir(root / "objects") == ["old"]


def test_a_set_that_appears_meanwhile_is_left_for_the_next_time(root: Path):
    """What is staged while room is made was not measured, and is not evicted."""
    create_root(root)
    put(root, "old", 4 * MIB)

    def shortfall(_: object) -> Shortfall:
        if not (root / "objects/new").exists():
            put(root, "new", 4 * MIB, used=1)
        return Shortfall(1 if (root / "objects/old").exists() else 0, 0)

    result = make_room(root, shortfall)
    assert ([item.version for item, _ in result.evicted], result.missing_bytes) == (["old"], 0)


def test_dead_copies_go_first_and_living_ones_never(root: Path):
    """What nobody goes on with makes room before any set does."""
    put(root, "old", 10 * MIB)
    for version in ("dead", "alive", "mine"):
        partial_path(root, version).mkdir()
        (partial_path(root, version) / "x").write_bytes(bytes(10 * MIB))
        journal_path(root, version).touch()
    pid = child(lambda: enter(version_lock(root, "alive", timeout_s=1)))
    with version_lock(root, "mine", timeout_s=1), reserve(root, "mine", 5 * MIB, RootLimits(quota_bytes=36 * MIB)):
        assert sorted(path.name for path in (root / ".tmp").glob("*.partial")) == ["alive.partial", "mine.partial"]
        assert not journal_path(root, "dead").exists()
        assert os.listdir(root / "objects") == ["old"]
    with version_lock(root, "mine", timeout_s=1), reserve(root, "mine", 15 * MIB, RootLimits(quota_bytes=36 * MIB)):
        assert os.listdir(root / "objects") == []
    kill(pid)


def test_grace_keeps_what_was_just_staged(root: Path):
    """A stager does not push out what another has staged a minute ago, unless it is told that it may."""
    put(root, "young", 10 * MIB, used=time.time())
    limits = RootLimits(quota_bytes=15 * MIB)
    with pytest.raises(NoSpace, match="left of"), reserve(root, "new", 10 * MIB, limits):
        pass
    put(root, "old", 3 * MIB)
    with pytest.raises(NoSpace, match="left of"), reserve(root, "new", 10 * MIB, limits):
        pass
    assert len(os.listdir(root / "objects")) == 2, "the old one alone would not do: it was evicted in vain"
    with reserve(root, "new", 10 * MIB, limits, grace_s=0):
        assert os.listdir(root / "objects") == []


def test_shared_files_count_once(root: Path):
    """Versions that share files by hard links take the room of one; evicting one of them frees only its own."""
    put(root, "a", 10 * MIB)
    folder = put(root, "b", MIB, used=2000)
    os.link(root / "objects/a/a", folder / "shared")
    assert near(total_bytes(disk_usage(path) for path in (root / "objects").iterdir()), 11 * MIB)
    with reserve(root, "new", 5 * MIB, RootLimits(quota_bytes=17 * MIB)):
        assert len(os.listdir(root / "objects")) == 2
    with reserve(root, "new", 12 * MIB, RootLimits(quota_bytes=17 * MIB)):  # one of them would not do
        assert os.listdir(root / "objects") == []


def test_min_free_is_kept_for_others(tmpfs):
    """The disk is not only ours: so much of it stays free after the set has come."""
    root = tmpfs("size=100m") / "pit"
    put(root, "old", 30 * MIB)
    limits = RootLimits(min_free_bytes=50 * MIB)
    with reserve(root, "new", 15 * MIB, limits):
        assert os.listdir(root / "objects") == ["old"]
    with reserve(root, "new", 45 * MIB, limits):
        assert os.listdir(root / "objects") == []
    with pytest.raises(NoSpace, match=r"55\.0 MiB needed, .* 50\.0 MiB must"), reserve(root, "new", 55 * MIB, limits):
        pass


def test_stagers_at_once_do_not_both_take_the_last_room(root: Path):
    """Eight processes want a third of the quota each: never more than three have it."""
    create_root(root)
    limits = RootLimits(quota_bytes=31 * MIB)
    context = multiprocessing.get_context("fork")
    room, shared, full = context.Semaphore(3), context.Event(), context.Event()
    pids = []
    for n in range(8):
        pid = os.fork()
        if not pid:
            with contextlib.suppress(BaseException):
                until, start_time = time.monotonic() + 30, 10
                while (start_time > 0 or not shared.is_set()) and time.monotonic() < until:
                    with contextlib.suppress(NoSpace), reserve(root, f"v{n}", 10 * MIB, limits):
                        start_time -= 1
                        if not room.acquire(block=False):
                            full.set()
                            break
                        if room.get_value() < 2:
                            shared.set()
                        time.sleep(0.01)
                        room.release()
            os._exit(0)
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)
    assert (shared.is_set(), full.is_set()) == (True, False)


def test_a_stage_evicts_to_keep_its_quota(root: Path, make_dataset):
    """Through `run` itself: the second set takes the first one's place, once that may go."""
    first, second = (load_version(make_dataset({"a": os.urandom(10 * MIB)}, name)) for name in ("one", "two"))
    limits = RootLimits(quota_bytes=20 * MIB)
    stage_version(first, root, limits=limits)
    with pytest.raises(NoSpace):
        stage_version(second, root, limits=limits)
    os.utime(root / ".leases" / first.version, (1000, 1000))
    assert stage_version(second, root, limits=limits).state == "staged"
    assert os.listdir(root / "objects") == [second.version]


def test_a_look_at_what_is_reserved_is_not_taken_for_a_stager(root: Path):
    """Whoever counts rooms locks each for a moment, and on a busy node may be put to sleep in it."""
    create_root(root)
    path = root / ".locks/v.reservation"
    path.touch()

    def look() -> int:
        descriptor = os.open(path, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        return descriptor

    pid = child(look)
    threading.Timer(0.2, os.kill, (pid, signal.SIGKILL)).start()
    with reserve(root, "v", MIB, RootLimits()):
        pass
    os.waitpid(pid, 0)


def test_a_stager_that_makes_room_for_ever_is_named(root: Path):
    """Others of the root wait for it, and then say who it is."""
    create_root(root)

    def make_room_for_ever() -> object:
        lock = root_lock(root, ".space", activity="makes room", timeout_s=0)
        return lock, enter(publish_owner(lock.__enter__()))

    pid = child(make_room_for_ever)
    try:
        with pytest.raises(TryLater) as error, reserve(root, "v", MIB, RootLimits(), timeout_s=0.1):
            pass
        assert f"pid {pid} of" in error.value.hint
        assert error.value.where == str(root / ".locks/.space")
    finally:
        kill(pid)
