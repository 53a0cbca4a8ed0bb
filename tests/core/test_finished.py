"""Ctrl-C while futures finish: heard once, by whoever takes them, and no lock stays taken."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from pitools.core.finished import Finished, finished

# Jobs in forks of itself, in each of which Ctrl-C comes when the main thread has just taken its n-th lock of a
# condition, and says how each ended: 130 where Ctrl-C was heard, 0 where there were fewer locks.
INTERRUPTED = """
import os, signal, sys, threading
from pitools.dataset.write import crew

class Square:
    def __call__(self, job): return job * job
    def close(self): pass

def work(number):
    left, taken = [number], threading.Condition.__enter__
    def enter(condition):
        done = taken(condition)
        if threading.get_ident() == threading.main_thread().ident and os.getpid() == here:
            left[0] -= 1
            if left[0] == -1:
                signal.raise_signal(signal.SIGINT)
        return done
    here = os.getpid()
    threading.Condition.__enter__ = enter
    signal.alarm(20)
    try:
        assert sorted(crew.run(Square, range(6), workers=2)) == [0, 1, 4, 9, 16, 25]
    except KeyboardInterrupt:
        sys.exit(130)

for number in range(1000):
    child = os.fork()
    if not child:
        work(number)
        sys.exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(number, code, flush=True)
    if code != 130:
        break
"""


def done(value: int) -> Future[int]:
    future: Future[int] = Future()
    future.set_result(value)
    return future


@contextmanager
def interrupted() -> Iterator[Finished]:
    """A block in which a future is done, and Ctrl-C has come."""
    with finished() as arriving:
        arriving.expect(done(1))
        signal.raise_signal(signal.SIGINT)
        yield arriving


def test_as_they_finish() -> None:
    """Futures come in the order in which they finish, and nothing comes before one does."""
    go = threading.Event()
    with ThreadPoolExecutor(2) as pool, finished() as arriving:
        late = pool.submit(go.wait, 60)
        arriving.expect(late)
        with pytest.raises(queue.Empty):
            arriving.take(timeout=0.01)
        early = pool.submit(int, "7")
        arriving.expect(early)
        assert arriving.take() is early
        go.set()
        assert arriving.take() is late


def test_an_interrupt_is_heard_by_take() -> None:
    """Ctrl-C inside the block disturbs nothing before `take`, which raises it before what is done."""
    with pytest.raises(KeyboardInterrupt), interrupted() as arriving:
        arriving.take()
    assert arriving.interrupted
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_after_the_last() -> None:
    """Ctrl-C is not lost where nothing more is taken."""
    with pytest.raises(KeyboardInterrupt), interrupted() as arriving:
        pass
    assert arriving.interrupted


def test_an_interrupt_while_it_waits() -> None:
    """Ctrl-C ends a wait for a future that never comes."""
    timer = threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt), finished() as arriving:
        arriving.take(timeout=30)
    timer.join()


def test_what_others_handle_stays() -> None:
    """A process that ignores Ctrl-C, as under nohup, goes on ignoring it; and an exception goes out as it is."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(ZeroDivisionError), interrupted() as arriving:
            print(1 // (arriving.take().result() - 1))
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_no_lock_stays_taken() -> None:
    """Wherever Ctrl-C comes, workers end and so does the process."""
    ended = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=120)
    lines = ended.stdout.split("\n")[:-1]
    assert lines[-1].endswith(" 0"), (lines, ended.stderr)
    assert all(line.endswith(" 130") for line in lines[:-1])
    assert len(lines) > 5
