"""Waiting for what comes back: a folder that is read-only while its server fails over, a controller restarting."""

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
from pitools.slurm.client import Client, Reach

WRITABLE_S = 120.0
ANSWER_S = 600.0
FOUND_S = 300.0
STEPS_S = 60.0
_FIRST_S, _FILE_S, _LONGEST_S = 0.5, 2.0, 15.0
_ASK_S = 10.0
_STEP = re.compile(r"StepId=(\d{1,12}\.\d{1,9})\b")
_PASSES = {
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


def until_writable(folder: Path, patience_s: float = WRITABLE_S) -> bool:
    """Wait until a file can be made in a folder; False where it cannot after `patience_s`, or will not by waiting."""
    until, pause_s = time.monotonic() + patience_s, _FIRST_S
    while (error := _refusal(folder)) and error.errno in _PASSES and time.monotonic() < until:
        if pause_s == _FIRST_S:
            print(f"pit: {folder}: {error.strerror}: waiting for it to come back", file=sys.stderr)
        time.sleep(min(pause_s, max(0.0, until - time.monotonic())))
        pause_s = min(2 * pause_s, _FILE_S)
    return error is None


def _refusal(folder: Path) -> OSError | None:
    probe = folder / f".writable.{os.getpid()}"
    try:
        probe.touch()
        probe.unlink()
    except OSError as error:
        return error
    return None


def until(is_so: Callable[[], bool], why: str) -> bool:
    """Wait until something is the case; False where it does not come to that. why: what there is to wait for."""
    until_s, pause_s = time.monotonic() + FOUND_S, _FIRST_S
    while not (found := is_so()) and time.monotonic() < until_s:
        if pause_s == _FIRST_S:
            print(f"pit: {why}: waiting for it to come back", file=sys.stderr)
        time.sleep(min(pause_s, max(0.0, until_s - time.monotonic())))
        pause_s = min(2 * pause_s, _FILE_S)
    return found


def until_slurm_answers(left_s: float | None, patience_s: float = ANSWER_S) -> bool:
    """Wait until slurmctld answers, without which no step can be made; False where it does not in time.

    left_s: to the job's time limit. An attempt that no step can be made of would only use up the retries of a cause
    that is nobody's.
    """
    slurm = Client(Reach(timeout_s=_ASK_S))
    until, pause_s = time.monotonic() + min(patience_s, patience_s if left_s is None else max(0.0, left_s)), _FIRST_S
    while True:
        try:
            if slurm.is_up():
                return True
            why = "it does not answer"
        except PitError as error:
            why = error.what
        if time.monotonic() + pause_s > until:
            print(f"pit: slurmctld: {why}", file=sys.stderr)
            return False
        if pause_s == _FIRST_S:
            print(f"pit: slurmctld: {why}: waiting for it to come back", file=sys.stderr)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_S)


def until_steps_begin(attempt: Path, job_id: str, node_list: str, patience_s: float = STEPS_S) -> bool:
    """End what an attempt has left of its steps, and wait until one can be made on all nodes; False where none can.

    For after a time without slurmctld, or an srun that had to be killed. Whoever failed to tell slurmctld of its end
    tries again minutes later, and ranks that were to be ended with it may live until then: Slurm rightly keeps their
    nodes busy. And a slurmctld that has just come back refuses steps until it has heard of their nodes.
    """
    said = bounded_read.tail(attempt / "logs" / "srun.err", 65536)
    steps = {step for step in _STEP.findall(said.text) if step.startswith(f"{job_id}.")} if said else set()
    until = time.monotonic() + patience_s
    while True:
        try:
            if steps:
                subprocesses.run(
                    ["scancel", *sorted(steps)], timeout_s=_ASK_S
                )  # those that have ended are no error here
            done = run_on_nodes(["true"], node_list, 2 * _ASK_S)
            why = (done.stderr.strip().splitlines() or [f"exit code {done.code}"])[-1]
            if done.code == 0:
                return True
        except PitError as error:
            why = str(error)
        if "unrecognized option" in why or time.monotonic() > until:
            print(f"pit: no step can be made yet: {why}", file=sys.stderr)
            return False
        time.sleep(1.0)
