from __future__ import annotations

import collections
import itertools
import multiprocessing
import os
import queue
import signal
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from pitools.core import worker_pool
from pitools.core.errors import ClusterError, DataError


class Square:
    """Squares numbers; at one it fails or dies."""

    def __init__(self, bad: int = -1, how: str = "") -> None:
        self._bad, self._how = bad, how

    def close(self) -> None:
        pass

    def __call__(self, number: int) -> tuple[int, int]:
        if number == self._bad and self._how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if number == self._bad + 1 and self._how == "hang":
            time.sleep(600)
        if self._how == "slow":
            time.sleep(0.3)
        if number == self._bad and self._how == "empty":
            raise queue.Empty
        if number == self._bad:
            raise DataError("no square", where=str(number), hint="another number")
        return number * number, os.getpid()


def expect_no_children() -> None:
    """Fail if a child remains: two threads wait for each, and one may be told late."""
    until = time.monotonic() + 10
    while multiprocessing.active_children() and time.monotonic() < until:
        time.sleep(0.01)
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("workers", [1, 3])
def test_every_job_once(workers) -> None:
    """All jobs are done, in this process or in others."""
    actual = list(worker_pool.run_tasks(range(50), Square, workers=workers))
    assert sorted(value for value, _ in actual) == [number * number for number in range(50)]
    assert ({pid for _, pid in actual} == {os.getpid()}) == (workers == 1)


@pytest.mark.parametrize("workers", [1, 2])
def test_first_failure_stops_the_rest(workers) -> None:
    """What a worker raises arrives whole, and ends even tasks without end."""
    with pytest.raises(DataError) as caught:
        collections.deque(worker_pool.run_tasks(itertools.count(), partial(Square, 5, "raise"), workers=workers), 0)
    assert (caught.value.message, caught.value.where, caught.value.hint) == ("no square", "5", "another number")


def test_a_killed_worker() -> None:
    """A worker that dies is an error that says so, and what to do."""
    with pytest.raises(ClusterError, match="a worker process was killed") as caught:
        list(worker_pool.run_tasks(range(50), partial(Square, 5, "die"), workers=2))
    assert "--workers" in caught.value.hint


def finish_late(path: Path, number: int) -> None:
    """Fail at once for 0, else write a file after a second."""
    if not number:
        raise DataError("no file")
    time.sleep(1)
    path.touch()


def test_tasks_that_write_nothing_are_killed_at_once(tmp_path) -> None:
    """Ctrl-C of a long simulation does not wait for the end of a replay."""
    make_worker = partial(partial, finish_late, tmp_path / "late")
    with pytest.raises(DataError):
        list(worker_pool.run_tasks((1, 0), make_worker, workers=2, stop_timeout_s=0.0))
    expect_no_children()
    assert not (tmp_path / "late").exists()


def test_beside_other_threads() -> None:
    """Where this process has other threads, which may hold any lock, workers are not forked from it."""
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        began = time.monotonic()
        assert len(list(worker_pool.run_tasks(range(4), Square, workers=2))) == 4
        assert time.monotonic() - began < 60
    finally:
        stop.set()
        thread.join()


def test_what_starting_raises_is_told() -> None:
    """A worker that cannot begin says why."""
    with pytest.raises(TypeError, match="unexpected"):
        list(worker_pool.run_tasks(range(4), partial(Square, unexpected=1), workers=2))  # type: ignore[call-arg]


def test_a_worker_that_hangs(monkeypatch) -> None:
    """When all is over, a worker that does not come back is waited for only so long, and then ended."""
    monkeypatch.setattr(worker_pool, "_STOP_TIMEOUT_S", 0.5)
    began = time.monotonic()
    with pytest.raises(DataError, match="no square"):
        list(worker_pool.run_tasks(range(50), partial(Square, 5, "hang"), workers=3))
    assert time.monotonic() - began < 30
    expect_no_children()


def test_no_thread_is_left() -> None:
    """When all is done no thread of the pool is left, beside which the next run could not fork its workers."""
    before = set(threading.enumerate())
    for _ in range(10):
        assert len(list(worker_pool.run_tasks(range(4), Square, workers=2))) == 4
        assert set(threading.enumerate()) <= before


def test_any_exception_of_a_job_is_told() -> None:
    """Also one that a queue of our own could raise."""
    with pytest.raises(queue.Empty):
        list(worker_pool.run_tasks(range(5), partial(Square, 3, "empty"), workers=2))


def test_nothing_moves(monkeypatch, capsys) -> None:
    """Where no worker finishes anything for long, somebody is told, and the work goes on."""
    monkeypatch.setattr(worker_pool, "_STALL_TIMEOUT_S", 0.05)
    assert len(list(worker_pool.run_tasks(range(2), partial(Square, -1, "slow"), workers=2))) == 2
    assert "no task has finished" in capsys.readouterr().err
