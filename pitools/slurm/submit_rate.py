"""Submissions of one user from one host follow each other at a pace, however many shells make them.

slurmctld takes its write locks for every sbatch, and two hundred at once keep everybody else waiting. Each takes the
next free moment out of a file that only this user can write, and waits for it; whatever is not as it should be there is
answered by not waiting.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path

from pitools.slurm.ssh_mux import is_private

MIN_INTERVAL_S = 0.1
_MAX_WAIT_S = 60.0  # a moment further away than this was left by a clock that has been set since
_LOCK_TIMEOUT_S = 1.0  # the file is held for the time of a read and a write; longer, and its holder has been stopped


def wait_turn() -> None:
    """Return when it is this submission's turn."""
    with contextlib.suppress(OSError, ValueError):
        time.sleep(_reserve_slot(Path(f"/tmp/pitools-{os.geteuid()}")))  # noqa: S108 (ours alone, or not used)


def _reserve_slot(folder: Path) -> float:
    """Seconds to this submission's turn."""
    if not is_private(folder):
        return 0.0
    # Not the wall clock's time: this one is the same for every process of a host, and nobody sets it.
    with open(os.open(folder / "sbatch", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b") as file:
        _lock(file.fileno())
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        due = float(file.read(32).strip() or 0)
        due = due if now <= due < now + _MAX_WAIT_S else now
        file.seek(0)
        file.write(f"{due + MIN_INTERVAL_S:<31.6f}\n".encode())
    return due - now


def _lock(descriptor: int) -> None:
    """Raises OSError where somebody holds it for longer than it takes."""
    until = time.monotonic() + _LOCK_TIMEOUT_S
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise
            time.sleep(0.002)
