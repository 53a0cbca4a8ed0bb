"""End an attempt: record its exit code, diagnose the cause, and decide whether this job retries."""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path

from pitools.core import timestamps
from pitools.launch import exit_codes
from pitools.launch.diagnosis import evidence
from pitools.launch.job import job_recovery, step_runner, wait_for
from pitools.launch.job.job_context import JobContext, seconds_to_time_limit
from pitools.run import attempt_records as records
from pitools.run import run_folder

_CONTROLLER_ANSWER_S = 0.4  # a controller that is there answers sooner
_MAX_ATTEMPTS_PER_JOB = 1000  # a loop that makes so many attempts in one job is a fault of ours


def end_attempt(
    job: JobContext, attempt: Path, code: int, *, state: str = "", in_slurm: bool = False, waited_s: float = 0.0
) -> int | None:
    """Write down how an attempt ended and do what follows; returns the job's exit code, None for another attempt.

    code: of the step. state: in Slurm's words, where the caller knows it, and then the code is the attempt's already.
    in_slurm: Slurm is there, to be asked, and waited for. waited_s: for storage that had to come back, already.
    Only exit.json is of importance to the job itself: where the judge or what it asks for fails, the job ends with the
    ranks' own code. Raises ClusterError where exit.json cannot be written.
    """
    code = code if state else evidence.first_failed_exit_code(attempt, code)
    ended = run_folder.AttemptExit(job_id=job.job_id, exit_code=code, ended=timestamps.now_rfc3339(), state=state)
    run_folder.write_record(attempt / "exit.json", ended, durable=True)
    if code == 0:
        with contextlib.suppress(OSError):  # without it the next start of this job reads exit.json
            (attempt / records.SUCCEEDED).touch(0o644)
    if job.mode == "none":
        return code
    try:
        return _decide_next(job, attempt, code, in_slurm, waited_s)
    except Exception as error:  # noqa: BLE001 (the ranks' exit code matters more than our recovery)
        print(f"pit: attempt {attempt.name} ended with {code}, and what follows failed: {error!r}", file=sys.stderr)
        return code


def _decide_next(job: JobContext, attempt: Path, code: int, in_slurm: bool, waited_s: float) -> int | None:
    start = run_folder.read_record(attempt / "start.json", records.AttemptStart)
    seconds_left = seconds_to_time_limit(start)
    was_signalled = evidence.was_signalled(attempt)
    accounting_row = job_recovery.termination_of_this_job(job, start.started) if was_signalled and start else None
    preemption_row = None
    if code and in_slurm and not was_signalled:
        # Neither a step nor a job can be made without slurmctld, and a try at one would only use up a retry.
        queried_at = time.monotonic()
        up = wait_for.wait_for_slurm(seconds_left)
        if up and (time.monotonic() - queried_at > _CONTROLLER_ANSWER_S or step_runner.srun_was_killed(attempt)):
            timeout_s = (
                wait_for.STEP_CREATION_TIMEOUT_S
                if seconds_left is None
                else min(wait_for.STEP_CREATION_TIMEOUT_S, max(0.0, seconds_left))
            )
            wait_for.wait_for_step_creation(attempt, job.job_id, job.node_list, timeout_s)
        # Where there is a grace time the ranks are told at its beginning, and this script at its end.
        preemption_row = accounting_row = (
            job_recovery.preemption_notice(job, start.started) if code in exit_codes.STOPPED_CODES and start else None
        )
        was_signalled = preemption_row is not None
    seconds_left = 0.0 if was_signalled else seconds_to_time_limit(start)  # anew: a controller may have been waited for
    decision = job_recovery.diagnose_and_decide(
        job,
        attempt,
        accounting_row=accounting_row,
        seconds_left=seconds_left,
        before_slurm_ends=preemption_row is not None,
    )
    if (
        decision.action == "retry"
        and not was_signalled
        and len(run_folder.attempt_dirs(job.run_dir)) < _MAX_ATTEMPTS_PER_JOB
    ):
        print(f"pit: attempt {attempt.name}: {decision.reason}: retry", file=sys.stderr)
        time.sleep(max(0.0, decision.wait_s - waited_s))
        return None
    continues = decision.action in ("resubmit", "wait") and code in exit_codes.STOPPED_CODES
    saved = continues and start is not None and evidence.saved_steps(job.run_dir) > start.saved_steps
    return exit_codes.STOPPED_FOR_RESUME if saved else code
