"""Wait for storage or slurmctld to recover: a server that fails over, a controller that restarts."""

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
from pitools.launch.probes.node_step import run_on_nodes
from pitools.slurm.client import Client, Transport

WRITABLE_TIMEOUT_S = 120.0
SLURM_TIMEOUT_S = 600.0
STORAGE_TIMEOUT_S = 300.0
STEP_CREATION_TIMEOUT_S = 60.0
_FIRST_PAUSE_S, _FILE_POLL_S, _MAX_PAUSE_S = 0.5, 2.0, 15.0
_CALL_TIMEOUT_S = 10.0
_STEP = re.compile(r"StepId=(\d{1,12}\.\d{1,9})\b")
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
    """Wait until a file can be made in a folder; False where it cannot after `timeout_s`, or will not by waiting."""
    until, pause_s = time.monotonic() + timeout_s, _FIRST_PAUSE_S
    while (error := _try_write(folder)) and error.errno in _TRANSIENT_ERRNOS and time.monotonic() < until:
        if pause_s == _FIRST_PAUSE_S:
            print(f"pit: {folder}: {error.strerror}: waiting for it to come back", file=sys.stderr)
        time.sleep(min(pause_s, max(0.0, until - time.monotonic())))
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


def wait_until(predicate: Callable[[], bool], waiting_for: str) -> bool:
    """Wait until `predicate` holds; False on time-out. waiting_for: the condition, for the message."""
    until_s, pause_s = time.monotonic() + STORAGE_TIMEOUT_S, _FIRST_PAUSE_S
    while not (found := predicate()) and time.monotonic() < until_s:
        if pause_s == _FIRST_PAUSE_S:
            print(f"pit: {waiting_for}: waiting for it to come back", file=sys.stderr)
        time.sleep(min(pause_s, max(0.0, until_s - time.monotonic())))
        pause_s = min(2 * pause_s, _FILE_POLL_S)
    return found


def wait_for_slurm(left_s: float | None, timeout_s: float = SLURM_TIMEOUT_S) -> bool:
    """Wait until slurmctld answers, without which no step can be made; False where it does not in time.

    left_s: to the job's time limit. An attempt that no step can be made of would only use up the retries of a cause
    that is nobody's.
    """
    slurm = Client(Transport(timeout_s=_CALL_TIMEOUT_S))
    until, pause_s = (
        time.monotonic() + min(timeout_s, timeout_s if left_s is None else max(0.0, left_s)),
        _FIRST_PAUSE_S,
    )
    while True:
        try:
            if slurm.is_up():
                return True
            why = "it does not answer"
        except PitError as error:
            why = error.message
        if time.monotonic() + pause_s > until:
            print(f"pit: slurmctld: {why}", file=sys.stderr)
            return False
        if pause_s == _FIRST_PAUSE_S:
            print(f"pit: slurmctld: {why}: waiting for it to come back", file=sys.stderr)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _MAX_PAUSE_S)


def wait_for_step_creation(
    attempt: Path, job_id: str, node_list: str, timeout_s: float = STEP_CREATION_TIMEOUT_S
) -> bool:
    """End what an attempt has left of its steps, and wait until one can be made on all nodes; False where none can.

    For after a time without slurmctld, or an srun that had to be killed. Whoever failed to tell slurmctld of its end
    tries again minutes later, and ranks that were to be ended with it may live until then: Slurm rightly keeps their
    nodes busy. And a slurmctld that has just come back refuses steps until it has heard of their nodes.
    """
    said = bounded_read.read_tail(attempt / "logs" / "srun.err", 65536)
    steps = {step for step in _STEP.findall(said.text) if step.startswith(f"{job_id}.")} if said else set()
    until = time.monotonic() + timeout_s
    while True:
        try:
            if steps:
                subprocesses.run(
                    ["scancel", *sorted(steps)], timeout_s=_CALL_TIMEOUT_S
                )  # those that have ended are no error here
            done = run_on_nodes(["true"], node_list, 2 * _CALL_TIMEOUT_S)
            why = (done.stderr.strip().splitlines() or [f"exit code {done.code}"])[-1]
            if done.code == 0:
                return True
        except PitError as error:
            why = str(error)
        if "unrecognized option" in why or time.monotonic() > until:
            print(f"pit: no step can be made yet: {why}", file=sys.stderr)
            return False
        time.sleep(1.0)
