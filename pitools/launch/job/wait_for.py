"""Wait for storage or slurmctld to recover, e.g. from a fail-over or a restart."""

from __future__ import annotations

import errno
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

from pitools.core import subprocesses
from pitools.core.errors import PitError
from pitools.launch.diagnosis import bounded_read
from pitools.launch.job.job_context import JobContext
from pitools.launch.probes.node_step import run_on_nodes
from pitools.slurm.client import Client, Transport

WRITABLE_TIMEOUT_S = 120.0
SLURM_TIMEOUT_S = 600.0
STORAGE_TIMEOUT_S = 300.0
STEP_CREATION_TIMEOUT_S = 60.0
_FIRST_PAUSE_S, _FILE_POLL_S, _MAX_PAUSE_S = 0.5, 2.0, 15.0
_CALL_TIMEOUT_S = 10.0
_STEP = re.compile(r"StepId=(\d{1,12})\.(\d{1,9})\b")
_TRANSIENT_ERRNOS = {
    errno.EROFS,
    errno.EIO,
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.ENOTCONN,
    errno.ESHUTDOWN,
    errno.EHOSTDOWN,
    errno.EREMOTEIO,
    errno.EAGAIN,
    errno.EINTR,
}


def wait_writable(folder: Path, timeout_s: float = WRITABLE_TIMEOUT_S) -> bool:
    """Wait until a file can be created in a folder; False on time-out, or at once for a permanent error."""
    deadline, pause_s = time.monotonic() + timeout_s, _FIRST_PAUSE_S
    while (error := _try_write(folder)) and error.errno in _TRANSIENT_ERRNOS and time.monotonic() < deadline:
        if pause_s == _FIRST_PAUSE_S:
            print(f"pit: {folder}: {error.strerror}; waiting up to {timeout_s:g} s", file=sys.stderr)
        time.sleep(min(pause_s, max(0.0, deadline - time.monotonic())))
        pause_s = min(2 * pause_s, _FILE_POLL_S)
    return error is None


def _try_write(folder: Path) -> OSError | None:
    probe = folder / f".writable.{os.getpid()}"
    try:
        probe.touch()
        probe.unlink()
    except OSError as error:
        return error
    return None


def wait_until(predicate: Callable[[], bool], problem: str, timeout_s: float | None = None) -> bool:
    """Wait until `predicate` holds; False on time-out. problem: the reason for the wait, printed once.

    timeout_s: None for that of storage.
    """
    timeout_s = STORAGE_TIMEOUT_S if timeout_s is None else timeout_s
    deadline, pause_s = time.monotonic() + timeout_s, _FIRST_PAUSE_S
    while not (holds := predicate()) and time.monotonic() < deadline:
        if pause_s == _FIRST_PAUSE_S:
            print(f"pit: {problem}; waiting up to {timeout_s:g} s", file=sys.stderr)
        time.sleep(min(pause_s, max(0.0, deadline - time.monotonic())))
        pause_s = min(2 * pause_s, _FILE_POLL_S)
    return holds


def wait_for_slurm(left_s: float | None, timeout_s: float = SLURM_TIMEOUT_S) -> bool:
    """Wait until slurmctld answers; False on time-out. left_s: until the job's time limit, None without one.

    Without slurmctld no step can be created: an attempt would only use up a retry.
    """
    slurm = Client(Transport(timeout_s=_CALL_TIMEOUT_S))
    timeout_s = timeout_s if left_s is None else min(timeout_s, max(0.0, left_s))
    deadline, pause_s = time.monotonic() + timeout_s, _FIRST_PAUSE_S
    while True:
        try:
            if slurm.is_up():
                return True
            problem = "no answer"
        except PitError as error:
            problem = error.message
        if time.monotonic() + pause_s > deadline:
            print(f"pit: slurmctld: {problem}", file=sys.stderr)
            return False
        if pause_s == _FIRST_PAUSE_S:
            print(f"pit: slurmctld: {problem}; waiting up to {timeout_s:g} s", file=sys.stderr)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _MAX_PAUSE_S)


def wait_for_step_creation(attempt: Path, job: JobContext, timeout_s: float = STEP_CREATION_TIMEOUT_S) -> bool:
    """Cancel an attempt's remaining steps and wait until a step can be created on all nodes; False on time-out.

    Needed after a time without slurmctld or a killed srun. A step that could not report its end retries minutes later.
    Until then its ranks may live, and Slurm keeps their nodes busy. A restarted slurmctld also refuses steps until the
    nodes have registered.
    """
    srun_log = bounded_read.read_tail(attempt / "logs" / "srun.err", 65536)
    own = [step for number, step in _STEP.findall(srun_log.text if srun_log else "") if number == job.slurm_number]
    steps = {f"{job.job_id}.{step}" for step in own}
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            if steps:  # scancel accepts steps that have ended
                subprocesses.run(["scancel", *sorted(steps)], timeout_s=_CALL_TIMEOUT_S)
            done = run_on_nodes(["true"], job.node_list, 2 * _CALL_TIMEOUT_S)
            problem = (done.stderr.strip().splitlines() or [f"exit code {done.code}"])[-1]
            if done.code == 0:
                return True
        except PitError as error:
            problem = str(error)
        if "unrecognized option" in problem or time.monotonic() > deadline:
            print(f"pit: no step can be created: {problem}", file=sys.stderr)
            return False
        time.sleep(1.0)
