"""Ctrl-C while the locks of `concurrent.futures` are taken: heard once, a moment later, and none stays taken; and the
other signals that end a process.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pitools.core.signals import defer_sigint, interrupt_on_termination

pytestmark = pytest.mark.usefixtures("interruptible")

# Jobs in forks of itself, in each of which Ctrl-C comes when the main thread has just taken its n-th lock of a
# condition, and says how each ended: 130 where Ctrl-C was heard, 0 where there were fewer locks.
INTERRUPTED = """
import os, signal, sys, threading
from pitools.core import worker_pool

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
        assert sorted(worker_pool.run_tasks(range(6), Square, workers=2)) == [0, 1, 4, 9, 16, 25]
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


def with_ctrl_c(reached: list[str], error: Exception | None = None) -> None:
    """A block in which Ctrl-C comes, and then perhaps an error."""
    with defer_sigint():
        signal.raise_signal(signal.SIGINT)
        reached.append("end")
        if error:
            raise error


def test_heard_at_the_end() -> None:
    """Ctrl-C lets the block come to its end, and is raised there; afterwards it is heard at once."""
    reached: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        with_ctrl_c(reached)
    assert reached == ["end"]
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_heard_beside_an_error() -> None:
    """An error in the block does not hide Ctrl-C, which may be its cause: it is the interrupt's context."""
    error = ValueError("a worker died")
    with pytest.raises(KeyboardInterrupt) as caught:
        with_ctrl_c([], error)
    assert caught.value.__context__ is error


def test_nothing_came() -> None:
    """Without Ctrl-C the block is as any other, and so is its error."""
    with defer_sigint():
        pass
    with pytest.raises(ValueError, match="wrong"), defer_sigint():
        raise ValueError("wrong")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_is_ignored_stays_so() -> None:
    """A process that ignores Ctrl-C, as under nohup, goes on ignoring it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    reached: list[str] = []
    with_ctrl_c(reached)
    assert reached == ["end"]
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_in_another_thread() -> None:
    """A thread that is not the main one, which may not set a handler, has nothing to hold back."""
    reached: list[str] = []

    def work() -> None:
        with defer_sigint():
            reached.append("end")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert reached == ["end"]


def test_no_lock_stays_taken() -> None:
    """Wherever Ctrl-C comes, workers end and so does the process."""
    result = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=120)
    lines = result.stdout.split("\n")[:-1]
    assert lines[-1].endswith(" 0"), (lines, result.stderr)
    assert all(line.endswith(" 130") for line in lines[:-1])
    assert len(lines) > 5


def test_signals_are_met_as_ctrl_c_is() -> None:
    """SIGTERM and SIGHUP raise inside, and are as they were outside; what somebody ignores stays ignored."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        before = signal.signal(number, signal.SIG_DFL)
        try:
            with pytest.raises(KeyboardInterrupt), interrupt_on_termination():
                signal.raise_signal(number)
            assert signal.getsignal(number) == signal.SIG_DFL
            signal.signal(number, signal.SIG_IGN)
            with interrupt_on_termination():
                signal.raise_signal(number)
        finally:
            signal.signal(number, before)


# In the place of any command of the main job: it needs a moment to end.
SLOW = """
import pathlib, sys, time
try:
    pathlib.Path("ready").touch()
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(0.6)
    pathlib.Path("ended").touch()
    sys.exit(130)
"""


def test_the_main_job_waits_for_what_it_interrupts(tmp_path: Path) -> None:
    """Ctrl-C ends it with 130 and no traceback, once the command that it was in has ended by itself."""
    examples = tmp_path / "scripts" / "examples"
    examples.mkdir(parents=True)
    shutil.copy(Path(__file__).parents[2] / "scripts" / "examples" / "main_job.py", examples)
    (examples / "make_recording.py").write_text(SLOW)
    argv = [sys.executable, str(examples / "main_job.py")]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        while not (tmp_path / "ready").exists():
            assert process.poll() is None
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        output = process.communicate(timeout=30)[1]
    assert (process.returncode, (tmp_path / "ended").exists()) == (130, True)
    assert "Traceback" not in output
