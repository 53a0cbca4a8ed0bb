"""What goes wrong around a loop: errors that pass, nodes that see other files, and workers that stay."""

from __future__ import annotations

import errno
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pitools.checkpoint import checkpointer, search
from pitools.checkpoint.checkpointer import Checkpointer
from pitools.checkpoint.coordination.barrier import Barrier, RemoteRankError
from pitools.checkpoint.store import layout, locks, lookup, quarantine, verify
from pitools.checkpoint.store.problem import CheckpointProblem
from pitools.core.errors import (
    ClusterError,
    ConfigError,
    DataError,
    NoSpace,
    PitError,
    TryLater,
    Unreachable,
    UsageError,
)
from tests.checkpoint.test_checkpointer import DAMAGES, Files, Store, on_ranks, restored, saved, state

AS_ROOT = pytest.mark.usefixtures("as_root")


def test_a_step_whose_save_failed_can_be_saved_again(folder: Path) -> None:
    """By all ranks; what the failed one left is removed first, so that a full disk has room for the second."""
    broken = [True]
    left: list[list[Path]] = []  # beside what is being saved

    def work(rank: int, options: dict[str, Any]) -> None:
        def full(name: str) -> None:
            if rank == 1 and name == "momentum" and broken[0]:
                raise OSError(errno.ENOSPC, "No space left on device")

        with Checkpointer(folder, Files(rank, full), **options) as guard:
            guard.save(2, state(2), {"position": 2})
            with pytest.raises((NoSpace, ClusterError), match="no space left"):
                guard.wait()
            guard._barrier.wait("test: all have seen it")
            broken[0] = False
            guard.save(2, state(2), {"position": 2})
            if not rank:
                left.append(layout.leftovers(folder))
            guard.wait()

    assert on_ranks(3, work) == [None] * 3
    assert lookup.complete_steps(folder) == [2]
    assert not verify.verify_checkpoint(folder / "step_2")
    assert not layout.leftovers(folder)
    assert [len(paths) for paths in left] <= [1]


def in_a_loop(look: Callable[[], None]) -> None:
    """Some seconds of steps."""
    for _ in range(1000):
        time.sleep(0.01)
        look()


def test_a_loop_learns_of_a_failed_save_before_the_next(folder: Path) -> None:
    """At every rank, by looking at each step; a save that still goes on is not waited for."""
    goes_on = threading.Event()

    def work(rank: int, options: dict[str, Any]) -> None:
        def held_up(name: str) -> None:
            assert name == "stage" or goes_on.wait(20)
            if rank == 1 and name == "momentum":
                raise OSError(errno.ENOSPC, "No space left on device")

        with Checkpointer(folder, Files(rank, held_up), **options) as guard:
            guard.poll()
            guard.save(2, state(2), {"position": 2})
            guard.poll()
            guard._barrier.wait("test: nothing is known yet")
            goes_on.set()
            with pytest.raises((NoSpace, ClusterError), match="no space left"):
                in_a_loop(guard.poll)

    assert on_ranks(2, work) == [None] * 2
    assert lookup.complete_steps(folder) == []


def test_a_closed_checkpointer_saves_nothing(folder: Path) -> None:
    """It no longer has the folder's lock: the next one would remove what it is saving."""
    with Checkpointer(folder, Files()) as closed:
        closed.save(1, state(1))
    with pytest.raises(UsageError):
        closed.save(2, state(2))
    with pytest.raises(UsageError):
        closed.restore(state(0))
    assert lookup.complete_steps(folder) == [1]


def test_the_folder_stays_locked_while_an_abandoned_save_writes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that fails does not wait for a slow save; nobody else may save until that has ended."""
    monkeypatch.setattr(checkpointer, "_LEAVE_TIMEOUT_S", 0.1)
    may_write = threading.Event()

    def work(rank: int, options: dict[str, Any]) -> None:
        def slow(name: str) -> None:
            if name == "w":
                may_write.wait(20)

        with Checkpointer(folder, Files(rank, slow), **options) as guard:
            guard.save(1, state(1))
            raise RuntimeError("the loss diverged")

    try:
        assert [type(error) for error in on_ranks(2, work)] == [RuntimeError, RuntimeError]
        with pytest.raises(TryLater), locks.writer_lock(folder, timeout_s=0.0):
            pass
    finally:
        may_write.set()


def test_polling_does_not_wait_for_other_ranks(folder: Path) -> None:
    """One rank's save has failed while rank 0 still writes: the loop goes on, and both raise when rank 0 knows it."""
    has_polled = threading.Event()

    def work(rank: int, options: dict[str, Any]) -> None:
        def hinder(name: str) -> None:
            if name == "w" and rank == 0:
                assert has_polled.wait(20)
            elif name == "w":
                raise OSError(errno.ENOSPC, "No space left on device")

        with Checkpointer(folder, Files(rank, hinder), **options, timeout_s=20) as guard:
            guard.save(2, state(2))
            for _ in range(50 * rank):
                time.sleep(0.01)
                guard.poll()
            if rank == 1:
                has_polled.set()
            with pytest.raises(PitError):
                in_a_loop(guard.poll)

    store = Store()
    assert on_ranks(2, work, store) == [None] * 2
    assert store.timed_out == []


def test_an_error_after_the_last_save_reaches_the_ranks_that_have_finished(folder: Path) -> None:
    """A rank that fails in the last lines of its loop does not make the others wait for their time-out."""

    def work(rank: int, options: dict[str, Any]) -> None:
        with Checkpointer(folder, Files(rank), **options, timeout_s=20) as guard:
            guard.save(2, state(2))
            guard.wait()
            if rank == 1:
                raise ValueError("no evaluation data")

    store = Store()
    errors = on_ranks(3, work, store)
    assert [type(error) for error in errors] == [RemoteRankError, ValueError, RemoteRankError]
    assert store.timed_out == []
    assert lookup.complete_steps(folder) == [2]


@pytest.mark.parametrize("metadata", [{"loss": object()}, [1, 2], {(1, 2): 3}])
def test_values_that_cannot_be_stored_fail_every_rank_at_once(folder: Path, metadata: Any) -> None:
    """The metadata are wrong at one rank alone: that rank raises ConfigError, and the others learn of it."""

    def work(rank: int, options: dict[str, Any]) -> None:
        with Checkpointer(folder, Files(rank), **options, timeout_s=20) as guard:
            guard.save(2, state(2), custom_metadata=metadata if rank == 0 else None)
            guard.wait()

    store = Store()
    errors = on_ranks(2, work, store)
    assert [type(error) for error in errors] == [ConfigError, RemoteRankError]
    assert store.timed_out == []


def test_nodes_that_do_not_share_the_folder(folder: Path) -> None:
    """Each rank has a folder of its own: the error names the ranks whose files rank 0 does not have."""

    def work(rank: int, options: dict[str, Any]) -> None:
        with Checkpointer(folder / str(rank), Files(rank), **options, timeout_s=20) as guard:
            guard.save(2, state(2))
            guard.wait()

    errors = on_ranks(3, work)
    assert all(isinstance(error, ClusterError) for error in errors)
    assert "ranks 1, 2" in errors[0].message
    assert "ClusterError" in errors[1].message


def test_a_slow_removal_holds_up_no_save(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next saves are published at every rank while an old checkpoint is still being deleted."""
    saved(folder, 1, 2, world_size=2)
    goes_on, real = threading.Event(), layout.remove_tree

    def remove(path: Path) -> None:
        assert goes_on.wait(20)
        real(path)

    monkeypatch.setattr(layout, "remove_tree", remove)

    def work(rank: int, options: dict[str, Any]) -> None:
        with Checkpointer(folder, Files(rank), keep_last=1, **options, timeout_s=20) as guard:
            for step in (3, 4):
                guard.save(step, state(step))
                guard.wait()
            guard._barrier.wait("test: saved")
            goes_on.set()

    assert on_ranks(2, work) == [None] * 2
    assert lookup.latest_step(folder) == 4
    assert len(lookup.complete_steps(folder)) < 4


def test_a_write_that_hangs_is_an_error_before_the_hang_watch_ends_the_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watch allows SAVE_TIMEOUT_S: the next save raises by then, so that the log has the cause."""
    monkeypatch.setattr(checkpointer, "SAVE_TIMEOUT_S", checkpointer._HANG_MARGIN_S + 0.01)
    goes_on = threading.Event()
    with Checkpointer(folder, Files(hinder=lambda name: name == "w" and goes_on.wait(20))) as guard:  # type: ignore[arg-type,return-value]
        guard.save(1, state(1))
        with pytest.raises(Unreachable):
            guard.save(2, state(2))
        goes_on.set()
        monkeypatch.undo()


def test_a_rank_that_cannot_begin_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its peers do not wait for it until their time is up."""
    real, lock, calls = layout.create_payload_dir, threading.Lock(), [0]

    def made(place: Path) -> Path:
        with lock:
            calls[0] += 1
            if calls[0] == 2:
                raise NoSpace("no inodes left", where=str(place))
        return real(place)

    monkeypatch.setattr(layout, "create_payload_dir", made)

    def work(rank: int, options: dict[str, Any]) -> None:
        with Checkpointer(folder, Files(rank), **options, timeout_s=20) as guard:
            guard.save(7, state(7))
            guard.wait()

    store = Store()
    assert all("no inodes left" in str(error) for error in on_ranks(3, work, store))
    assert store.timed_out == []


def test_a_node_that_sees_other_files_moves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where only one node finds damage it is named, with what it found; the checkpoint is for the others to use."""
    saved(folder, 1, 2, world_size=2)
    real = verify.verify_checkpoint

    def stale(path: Path, *, share: tuple[int, int] = (0, 1), **more: Any) -> list[CheckpointProblem]:
        if share == (1, 2):
            return [
                CheckpointProblem(
                    checkpoint=path.name, path="payload/0.w", problem="missing", expected="a file", got="none"
                )
            ]
        return real(path, share=share, **more)

    monkeypatch.setattr(verify, "verify_checkpoint", stale)
    monkeypatch.setattr(search, "_PAUSES_S", (0.01,))
    monkeypatch.setenv("PIT_NODE", "n04")

    def work(rank: int, options: dict[str, Any]) -> None:
        with Checkpointer(folder, Files(rank), **options) as guard:
            guard.restore(state(0))

    for error in on_ranks(2, work):
        assert "rank 1 on n04 finds payload/0.w: missing" in str(error)
    assert layout.listed_steps(folder) == [2, 1]
    assert not (folder / "quarantine").exists()


@pytest.mark.parametrize("who", [0, 1, None])
def test_damage_is_what_two_nodes_see(folder: Path, monkeypatch: pytest.MonkeyPatch, who: int | None) -> None:
    """A node that sees it alone is named, rank 0's as any other, and nothing is moved; what both see is."""
    saved(folder, 1, 2, world_size=2)
    real, me = verify.verify_checkpoint, threading.local()

    def check(path: Path, **more: Any) -> list[CheckpointProblem]:
        if me.rank == who and path.name == "step_2":
            return [
                CheckpointProblem(checkpoint=path.name, path="payload/0.w", problem="digest", expected="a", got="b")
            ]
        return real(path, **more)

    if who is None:
        DAMAGES["flip"](folder / "step_2" / "payload" / "0.w")
    monkeypatch.setattr(verify, "verify_checkpoint", check)
    monkeypatch.setattr(search, "_PAUSES_S", (0.01,))

    def work(rank: int, options: dict[str, Any]) -> int:
        me.rank = rank
        restore_search = search.RestoreSearch(Barrier(**options, nodes=("n1", "n2")), folder, "one")
        with restore_search.newest_good() as actual:
            return actual[0].step if actual else -1

    actual = on_ranks(2, work)
    if who is None:
        assert actual == [1, 1]
        assert layout.listed_steps(folder) == [1]
        return
    for error in actual:
        assert f"rank {who} on n{who + 1} finds payload/0.w: digest" in str(error)
        assert f"and rank {1 - who} on n{2 - who} finds it as it was saved" in str(error)
    assert layout.listed_steps(folder) == [2, 1]


def test_a_second_look_is_at_the_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of this node's memory may be what is bad: they are given up first, and only those of what is in doubt."""
    saved(folder, 1)
    DAMAGES["flip"](folder / "step_1" / "payload" / "0.w")
    given_up: list[str] = []
    real = os.posix_fadvise

    def advise(descriptor: int, start: int, length: int, advice: int) -> None:
        if (start, length, advice) == (0, 0, os.POSIX_FADV_DONTNEED):
            given_up.append(os.readlink(f"/proc/self/fd/{descriptor}"))  # noqa: PTH115
        real(descriptor, start, length, advice)

    monkeypatch.setattr(os, "posix_fadvise", advise)
    with pytest.raises(DataError):
        restored(folder)
    assert given_up == [str(folder / "step_1" / "payload" / "0.w")]


def test_latest_names_a_checkpoint_while_the_newest_is_moved(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is moved before the folder goes, so that a kill between the two leaves no dangling link."""
    saved(folder, 1, 2)
    named: list[str] = []
    real = os.rename

    def rename(old: Path, new: Path) -> None:
        named.append((folder / "latest").readlink().name)
        real(old, new)

    monkeypatch.setattr(os, "rename", rename)
    quarantine.quarantine_checkpoint(folder / "step_2", ())
    assert named == ["step_1"]
    assert (folder / "latest").readlink().name == "step_1"


def test_a_worker_that_outlives_a_killed_rank_holds_nothing(folder: Path) -> None:
    """A data loader's forked process lives on for seconds after its parent's `kill -9`: the next attempt goes on."""
    reads, writes = os.pipe()
    if not (rank := os.fork()):
        with locks.writer_lock(folder):
            if not (worker := os.fork()):
                os.close(reads)
                time.sleep(30)
                os._exit(0)
            os.write(writes, f"{worker}\n".encode())
            time.sleep(30)
        os._exit(0)
    worker = int(os.read(reads, 20))
    os.close(reads)
    os.close(writes)
    try:
        os.kill(rank, signal.SIGKILL)
        os.waitpid(rank, 0)
        with locks.writer_lock(folder, timeout_s=1) as sure:
            assert sure
    finally:
        os.kill(worker, signal.SIGKILL)


HOSTILE: dict[str, Callable[[Path], object]] = {
    "newline": lambda payload: (payload / "a\nb").write_bytes(b"x"),
    "device": lambda payload: os.mknod(payload / "null", 0o600 | 0o020000, os.makedev(1, 3)),
    "fifo": lambda payload: os.mkfifo(payload / "pipe"),
    "link": lambda payload: (payload / "link").symlink_to("/etc/passwd"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_what_no_checkpoint_can_hold_is_refused(folder: Path, what: str, request: pytest.FixtureRequest) -> None:
    """While it is saved, at once and with its name; where it came later, the saved files are as they were."""
    if what == "device":
        request.getfixturevalue("as_root")

    class Odd(Files):
        def _write(self, state: Any, payload: Path, meet: Any) -> None:
            HOSTILE[what](payload)
            super()._write(state, payload, meet)

    with pytest.raises(Exception, match="a checkpoint cannot hold it"), Checkpointer(folder, Odd()) as guard:
        guard.save(1, state(1))
    assert lookup.complete_steps(folder) == []
    saved(folder, 2, 3)
    HOSTILE[what](folder / "step_3" / "payload")
    assert restored(folder).step == 3  # type: ignore[union-attr]


def calls_of(work: Callable[[], None]) -> int:
    """How many functions it calls, in all threads that it begins."""
    count = itertools.count()
    profile = lambda *_: next(count)  # noqa: E731
    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return next(count)


def test_thousands_of_files(folder: Path) -> None:
    """Are saved, damaged and found by as much work for each as where there are few."""

    class Many(Files):
        def _write(self, state: Any, payload: Path, meet: Any) -> None:
            for number in range(many):
                (payload / f"0.{number}").touch()
            super()._write(state, payload, meet)

    def there_and_back() -> None:
        with Checkpointer(folder, Many()) as guard:
            guard.save(many, state(1))
        DAMAGES["longer"](folder / f"step_{many}" / "payload" / "0.77")
        assert [problem.path for problem in verify.verify_checkpoint(folder / f"step_{many}")] == ["payload/0.77"]

    actual = {}
    for many in (100, 3_000):
        actual[many] = calls_of(there_and_back)
    assert actual[3_000] < 40 * actual[100]
