"""Threads that are not waited for when the interpreter ends."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pitools.core.daemon_pool import Threads

HANGS = """
import sys, threading, time
from pathlib import Path
from pitools.checkpoint import tier_copy as drain; from pitools.checkpoint.store import hashing
from pitools.checkpoint.store.manifest import FileEntry, Manifest

held = threading.Semaphore(0)

def never(_):
    held.release()
    time.sleep(60)

hashing.plain_file = drain.plain_file = never
place = Path(sys.argv[1])
entry = FileEntry(path="a", bytes=1, digest="xxh3_128:00")
manifest = Manifest(step=1, t="2026-11-22T00:00:00Z", format="f", run="r", model="m", world_size=1, files=(entry,))
digest, copy = lambda: list(hashing.digests(place, {"a": 1}, threads=2)), lambda: drain.send(place, manifest, place)
for work in (digest, copy):
    threading.Thread(target=work, daemon=True).start()
for _ in range(2):
    assert held.acquire(timeout=10)
raise SystemExit("the loss diverged")
"""


def test_a_file_system_that_hangs_does_not_keep_the_process(tmp_path: Path) -> None:
    """Digests and copies in the background wait for it; the loop that failed ends with its own error."""
    done = subprocess.run(
        [sys.executable, "-c", HANGS, str(tmp_path)], capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stderr) == (1, "the loss diverged\n")


def test_values_errors_and_the_end() -> None:
    """Each call's value or error comes to who asks; the end waits for what goes on, and cancels what has not begun."""
    began, go, done = threading.Event(), threading.Event(), []

    def slow() -> None:
        began.set()
        go.wait(10)
        done.append("slow")

    with Threads(3, "test") as threads:
        assert [threads.submit(pow, 2, n) for n in range(5)][4].result(10) == 16
        with pytest.raises(ZeroDivisionError):
            threads.submit(lambda: 1 // 0).result(10)
    before = threading.active_count()
    with Threads(1, "test") as threads:
        assert threading.active_count() == before
        threads.submit(slow)
        left = threads.submit(done.append, "left")
        assert began.wait(10)
        threading.Timer(0.05, go.set).start()
    assert done == ["slow"]
    assert left.cancelled()
