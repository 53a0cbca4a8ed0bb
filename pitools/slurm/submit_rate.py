"""Limit the rate of one user's submissions from one host, over all processes.

slurmctld takes write locks for every sbatch, so two hundred at once block all other requests. Each submission reserves
the next free slot in a file that only this user can write, and sleeps until then. On any problem with the file,
submissions do not wait.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path

from pitools.slurm.ssh_mux import is_private

MIN_INTERVAL_S = 0.1
_LOCK_TIMEOUT_S = 1.0  # the lock lasts a read and a write; a longer one is of a stopped process


def wait_turn() -> None:
    """Sleep until this submission's slot."""
    with contextlib.suppress(OSError, ValueError):
        time.sleep(_reserve_slot(Path(f"/tmp/pitools-{os.geteuid()}")))  # noqa: S108 (ours alone, or not used)


def _reserve_slot(folder: Path) -> float:
    """Reserve the next free slot. Returns the seconds until then."""
    if not is_private(folder):
        return 0.0
    # CLOCK_BOOTTIME is the same for all processes of a host, begins with its boot, and cannot be set.
    with open(os.open(folder / "sbatch", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b") as file:
        _lock(file.fileno())
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        boot, _, slot = file.read(80).decode().partition(" ")
        due = max(now, float(slot)) if boot == _boot_id() else now
        file.seek(0)
        file.write(f"{_boot_id()} {due + MIN_INTERVAL_S:<31.6f}\n".encode())
    return due - now


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _lock(descriptor: int) -> None:
    """Lock the file. Raises BlockingIOError on time-out."""
    deadline_s = time.monotonic() + _LOCK_TIMEOUT_S
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.002)
