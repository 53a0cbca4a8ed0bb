"""Threads that are not waited for when the interpreter ends."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pitools.core.daemon_pool import DaemonPool

HANGS = """
import sys, threading, time
from pathlib import Path
from pitools.checkpoint.store import hashing

held = threading.Semaphore(0)

def never(_):
    held.release()
    time.sleep(60)

hashing.open_regular = never
place = Path(sys.argv[1])
threading.Thread(target=lambda: list(hashing.hash_files(place, {"a": 1}, threads=2)), daemon=True).start()
assert held.acquire(timeout=10)
raise SystemExit("the loss diverged")
"""


def test_a_file_system_that_hangs_does_not_keep_the_process(tmp_path: Path) -> None:
    """Digests in the background wait for it; the loop that failed ends with its own error."""
    done = subprocess.run(
        [sys.executable, "-c", HANGS, str(tmp_path)], capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stderr) == (1, "the loss diverged\n")


def test_values_errors_and_the_end() -> None:
    """Each call's value or error comes to who asks; the end waits for what goes on, and cancels what has not begun."""
    began, event, done = threading.Event(), threading.Event(), []

    def slow() -> None:
        began.set()
        event.wait(10)
        done.append("slow")

    with DaemonPool(3, "test") as threads:
        assert [threads.submit(pow, 2, n) for n in range(5)][4].result(10) == 16
        with pytest.raises(ZeroDivisionError):
            threads.submit(lambda: 1 // 0).result(10)
    n_threads = threading.active_count()
    with DaemonPool(1, "test") as threads:
        assert threading.active_count() == n_threads
        threads.submit(slow)
        left = threads.submit(done.append, "left")
        assert began.wait(10)
        threading.Timer(0.05, event.set).start()
    assert done == ["slow"]
    assert left.cancelled()
