from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from pitools.core import forked_pool, shared_progress
from pitools.core.errors import ClusterError, DataError, Unreachable
from pitools.core.shared_progress import SharedProgress, WorkerSlot


class Square:
    """A worker that needs a moment for each number."""

    def __init__(self, seat: WorkerSlot, wait_s: float = 0) -> None:
        self.seat, self.wait_s = seat, wait_s

    def __call__(self, task: int) -> tuple[int, int, int]:
        time.sleep(self.wait_s)
        self.seat.add_bytes(task)
        return task, task * task, os.getpid()

    def close(self) -> None:
        """Nothing to close."""


def test_every_task_is_done_once_by_other_processes():
    """More tasks than a pipe holds at a time, shared by processes and threads, each answered once."""
    actual: list[tuple[int, int, int]] = []
    moved: list[int] = []
    forked_pool.run_tasks(range(40_000), Square, actual.append, readers=4, advance=moved.append)
    assert sorted(task for task, _, _ in actual) == list(range(40_000))
    assert all(square == task * task for task, square, _ in actual)
    assert os.getpid() not in {pid for _, _, pid in actual}
    assert sum(moved) == sum(range(40_000))


def test_nothing_to_do_starts_nothing():
    """An empty dataset needs no process."""
    forked_pool.run_tasks([], Square, lambda _: None, readers=4, advance=lambda _: None)


class Failing(Square):
    """Fails at one task, in a way of its own."""

    def __call__(self, task: int) -> tuple[int, int, int]:
        if task == 3:
            raise DataError("broken", where="there", hint="mend it")
        return super().__call__(task)


def test_the_first_failure_stops_the_others_and_is_the_one_raised():
    """What a worker raised is raised here, with its hint, and the other workers leave their tasks."""
    done: list[tuple[int, int, int]] = []
    with pytest.raises(DataError) as error:
        forked_pool.run_tasks(
            range(10_000), lambda seat: Failing(seat, 0.005), done.append, readers=4, advance=lambda _: None
        )
    assert (error.value.message, error.value.where, error.value.hint) == ("broken", "there", "mend it")
    assert len(done) < 200


def test_an_exception_of_the_caller_ends_the_workers():
    """Ctrl-C in the middle: no process is left, and the exception goes on."""
    pids: set[int] = set()

    def stop(result: tuple[int, int, int]) -> None:
        pids.add(result[2])
        if len(pids) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        forked_pool.run_tasks(range(10_000), lambda seat: Square(seat, 0.001), stop, readers=2, advance=lambda _: None)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


class Dying(Square):
    """Is killed, as by the kernel when memory runs out."""

    def __call__(self, task: int) -> tuple[int, int, int]:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


def test_a_worker_that_is_killed_is_an_error_not_a_hang():
    """The kernel's out-of-memory killer takes a worker: the caller hears of it."""
    with pytest.raises(ClusterError, match="signal 9"):
        forked_pool.run_tasks(range(10), Dying, lambda _: None, readers=1, advance=lambda _: None)


@pytest.mark.parametrize("worker", [Dying, Failing])
def test_the_error_is_raised_with_tasks_still_unsent(worker: type[Square], monkeypatch: pytest.MonkeyPatch):
    """More tasks than the pipe holds, and all readers gone: the worker's error is raised, not the broken pipe."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    for _ in range(5):
        with pytest.raises((DataError, ClusterError), match=r"broken|signal 9") as caught:
            forked_pool.run_tasks(range(60_000), worker, lambda _: None, readers=1, advance=lambda _: None)
        assert not isinstance(caught.value, OSError)


def test_workers_die_with_their_parent(tmp_path: Path):
    """kill -9 of the parent: its workers are gone, though they are in the middle of a task of ten minutes."""
    program = (
        "import os, sys, time\nfrom pitools.core import forked_pool\n"
        "class W:\n"
        "    def __init__(self, seat): pass\n"
        "    def __call__(self, task): open(f'{sys.argv[1]}/{os.getpid()}', 'w').close(); time.sleep(600)\n"
        "    def close(self): pass\n"
        "forked_pool.run_tasks(range(4), W, print, readers=2, advance=lambda n: None)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)])
    deadline = time.monotonic() + 60
    while len(os.listdir(tmp_path)) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    pids = os.listdir(tmp_path)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 60
    while (left := [pid for pid in pids if _runs(pid)]) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert pids
    assert left == []


def _runs(pid: str) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_a_source_that_gives_nothing_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch):
    """No byte from any reader for the limit: that is no answer, to be tried again later."""
    monkeypatch.setattr(forked_pool, "STALL_TIMEOUT_S", 0.3)
    monkeypatch.setattr(forked_pool, "_STOP_TIMEOUT_S", 0.3)
    done: list[object] = []
    with pytest.raises(Unreachable):
        forked_pool.run_tasks([0, 0], lambda seat: Square(seat, 60), done.append, readers=2, advance=lambda _: None)
    assert done == []


def test_the_default_is_within_bounds():
    """Neither one reader on a small machine nor hundreds on a large one."""
    assert 2 <= forked_pool.default_readers() <= 16


class Piped(Square):
    """Its source's own pipe breaks, which is not the one to the parent."""

    def __call__(self, task: int) -> tuple[int, int, int]:
        if task == 3:
            raise BrokenPipeError(32, "Broken pipe")
        return super().__call__(task)


class Unspeakable(Square):
    """Fails, in threads other than the first, with what cannot be sent to another process."""

    def __call__(self, task: int) -> tuple[int, int, int]:
        time.sleep(0.01)
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(threading.Lock())
        return super().__call__(task)


@pytest.mark.parametrize(("worker", "error"), [(Piped, BrokenPipeError), (Unspeakable, ClusterError)])
def test_no_task_is_lost_without_a_word(worker: type[Square], error: type[Exception]):
    """Whatever ends a worker early is raised; less than all results is no success."""
    with pytest.raises(error):
        forked_pool.run_tasks(range(10), worker, lambda _: None, readers=8, advance=lambda _: None)


class Patient(Square):
    """Waits of its own will, longer than a source may be silent."""

    def __call__(self, task: int) -> tuple[int, int, int]:
        self.seat.add_bytes(10)
        self.seat.wait_for_bandwidth(10)
        return super().__call__(task)


def test_who_waits_for_a_bandwidth_is_not_stalled(monkeypatch: pytest.MonkeyPatch):
    """A low limit is no sign that the source has gone."""
    monkeypatch.setattr(forked_pool, "STALL_TIMEOUT_S", 0.5)
    actual: list[tuple[int, int, int]] = []
    forked_pool.run_tasks(range(2), Patient, actual.append, readers=2, advance=lambda _: None)
    assert len(actual) == 2


@pytest.mark.parametrize("at_work", [1, 2, 4])
def test_a_bandwidth_is_for_those_at_work(monkeypatch: pytest.MonkeyPatch, at_work: int):
    """However many of four move bytes, they have all of it; after idle time one block and a second more."""
    clock = SimpleNamespace(ns=10**12, monotonic_ns=lambda: clock.ns)
    clock.sleep = lambda s: setattr(clock, "ns", clock.ns + int(s * 1e9))
    monkeypatch.setattr(shared_progress, "time", clock)
    board = SharedProgress(4)
    seats = [WorkerSlot(board, number) for number in range(at_work)]

    def move(count: int) -> float:
        began = clock.ns
        for number in range(count):
            seats[number % at_work].add_bytes(100)
            seats[number % at_work].wait_for_bandwidth(100)
        return (clock.ns - began) / 1e9

    assert move(40) == pytest.approx(40, abs=0.1)
    clock.sleep(60)
    assert move(40) == pytest.approx(38, abs=0.1)
