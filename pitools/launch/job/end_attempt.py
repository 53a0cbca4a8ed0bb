"""The end of an attempt: how it ended, why, and whether this job goes on."""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path

from pitools.core import timestamps
from pitools.launch import exit_codes
from pitools.launch.diagnosis import evidence
from pitools.launch.job import job_recovery, step_runner, wait_for
from pitools.launch.job.job_context import Job, left_s
from pitools.run import attempt_records as records
from pitools.run import run_folder

_AWAY_S = 0.4  # a controller that is there answers sooner
_TURNS = 1000  # a loop that makes so many attempts in one job is a fault of ours


def end(
    job: Job, attempt: Path, code: int, *, state: str = "", in_slurm: bool = False, waited_s: float = 0.0
) -> int | None:
    """Write down how an attempt ended and do what follows; returns the job's exit code, None for another attempt.

    code: of the step. state: in Slurm's words, where the caller knows it, and then the code is the attempt's already.
    in_slurm: Slurm is there, to be asked, and waited for. waited_s: for storage that had to come back, already.
    Only exit.json is of importance to the job itself: where the judge or what it asks for fails, the job ends with the
    ranks' own code. Raises ClusterError where exit.json cannot be written.
    """
    code = code if state else evidence.first(attempt, code)
    ended = run_folder.Attempt(job_id=job.job_id, exit_code=code, ended=timestamps.now(), state=state)
    run_folder.write(attempt / "exit.json", ended, durable=True)
    if code == 0:
        with contextlib.suppress(OSError):  # without it the next start of this job reads exit.json
            (attempt / records.SUCCEEDED).touch(0o644)
    if job.mode == "none":
        return code
    try:
        return _follow(job, attempt, code, in_slurm, waited_s)
    except Exception as error:  # noqa: BLE001 (the ranks' exit code matters more than our recovery)
        print(f"pit: attempt {attempt.name} ended with {code}, and what follows failed: {error!r}", file=sys.stderr)
        return code


def _follow(job: Job, attempt: Path, code: int, in_slurm: bool, waited_s: float) -> int | None:
    start = run_folder.read(attempt / "start.json", records.Start)
    left = left_s(start)
    ending = evidence.was_told(attempt)
    told = job_recovery.ending(job, start.started) if ending and start else None
    early = None
    if code and in_slurm and not ending:
        # Neither a step nor a job can be made without slurmctld, and a try at one would only use up a retry.
        asked = time.monotonic()
        up = wait_for.until_slurm_answers(left)
        if up and (time.monotonic() - asked > _AWAY_S or step_runner.gave_up(attempt)):
            patience_s = wait_for.STEPS_S if left is None else min(wait_for.STEPS_S, max(0.0, left))
            wait_for.until_steps_begin(attempt, job.job_id, job.node_list, patience_s)
        # Where there is a grace time the ranks are told at its beginning, and this script at its end.
        early = told = job_recovery.making_room(job, start.started) if code in exit_codes.STOPPED and start else None
        ending = early is not None
    left = 0.0 if ending else left_s(start)  # anew: a controller may have been waited for
    decided = job_recovery.judged(job, attempt, told=told, left_s=left, early=early is not None)
    if decided.action == "again" and not ending and len(run_folder.attempts(job.run_dir)) < _TURNS:
        print(f"pit: attempt {attempt.name}: {decided.reason}: again", file=sys.stderr)
        time.sleep(max(0.0, decided.wait_s - waited_s))
        return None
    goes_on = decided.action in ("resubmit", "wait") and code in exit_codes.STOPPED
    saved = goes_on and start is not None and evidence.progress(job.run_dir) > start.progress
    return exit_codes.TO_BE_CONTINUED if saved else code
