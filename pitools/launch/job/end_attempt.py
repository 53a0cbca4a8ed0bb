"""End an attempt: record its exit code, diagnose the cause, and decide whether this job retries."""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path

import msgspec

from pitools.core import timestamps
from pitools.launch import exit_codes, hooks
from pitools.launch.diagnosis import evidence
from pitools.launch.job import job_recovery, step_runner, wait_for
from pitools.launch.job.job_context import JobContext, seconds_to_time_limit
from pitools.run import attempt_records as records
from pitools.run import run_folder

_CONTROLLER_ANSWER_S = 0.4  # a running slurmctld answers sooner
_MAX_ATTEMPTS_PER_JOB = 1000  # more retries in one job are a fault of pitools


def end_attempt(
    job: JobContext, attempt: Path, code: int, *, state: str = "", in_slurm: bool = False, waited_s: float = 0.0
) -> int | None:
    """Record how an attempt ended and apply the decision; return the job's exit code, or None for another attempt.

    code: the step's exit code. state: the end in Slurm's terms if known, e.g. TIMEOUT; `code` is then the attempt's.
    in_slurm: whether Slurm can be queried and waited for. waited_s: how long this job has waited for storage already.
    If the diagnosis or its decision fails, the job ends with the ranks' own code. Raises ClusterError if exit.json
    cannot be written.
    """
    code = code if state else evidence.first_failed_exit_code(attempt, code)
    ended = run_folder.AttemptExit(job_id=job.job_id, exit_code=code, ended=timestamps.now_rfc3339(), state=state)
    run_folder.write_record(attempt / "exit.json", ended, durable=True)
    if code == 0:
        with contextlib.suppress(OSError):  # without this mark the next start of this job reads exit.json
            (attempt / records.SUCCEEDED).touch(0o644)
    if job.mode == "none":
        return code
    try:
        return _decide_next(job, attempt, code, in_slurm, waited_s)
    except Exception as error:  # noqa: BLE001 (the ranks' exit code matters more than our recovery)
        print(f"pit: attempt {attempt.name} ended with {code}, and its recovery failed: {error!r}", file=sys.stderr)
        return code


def _attempts_of_job(job: JobContext) -> int:
    """Return the number of attempts in this job; of a run with few, of all its jobs."""
    attempts = run_folder.attempt_dirs(job.run_dir)
    if len(attempts) < _MAX_ATTEMPTS_PER_JOB:
        return len(attempts)
    starts = (run_folder.read_or_none(attempt / "start.json", records.AttemptStart) for attempt in attempts)
    return sum(start is not None and start.job_number == job.job_number for start in starts)


def _decide_next(job: JobContext, attempt: Path, code: int, in_slurm: bool, waited_s: float) -> int | None:
    start = run_folder.read_record(attempt / "start.json", records.AttemptStart)
    seconds_left = seconds_to_time_limit(start)
    was_signalled = evidence.was_signalled(attempt)
    accounting_row = job_recovery.query_own_termination(job, start.started) if was_signalled and start else None
    preemption_row = None
    if code and in_slurm and not was_signalled:
        # Without slurmctld no step and no job can be created: a retry now would be wasted.
        queried_at = time.monotonic()
        is_up = wait_for.wait_for_slurm(seconds_left)
        if is_up and (time.monotonic() - queried_at > _CONTROLLER_ANSWER_S or step_runner.srun_was_killed(attempt)):
            timeout_s = wait_for.STEP_CREATION_TIMEOUT_S
            if seconds_left is not None:
                timeout_s = min(timeout_s, max(0.0, seconds_left))
            wait_for.wait_for_step_creation(attempt, job, timeout_s)
        # At preemption Slurm signals the ranks at the start of the grace time, and this script only at its end.
        record = job_recovery.query_job(job)
        preemption_row = accounting_row = job_recovery.preemption_of(record, start.started) if start else None
        was_signalled = preemption_row is not None
        if start and record and record.end:  # later than at its start, if the job was suspended or its limit raised
            start = msgspec.structs.replace(start, time_limit_at=record.end)
    seconds_left = 0.0 if was_signalled else seconds_to_time_limit(start)  # again: waiting for slurmctld takes time
    decision = job_recovery.diagnose_and_decide(
        job,
        attempt,
        accounting_row=accounting_row,
        seconds_left=seconds_left,
        before_slurm_ends=preemption_row is not None,
    )
    hooks.deliver(job.run_dir)
    if decision.action == "retry" and not was_signalled and _attempts_of_job(job) < _MAX_ATTEMPTS_PER_JOB:
        print(f"pit: attempt {attempt.name}: {decision.reason}: retry", file=sys.stderr)
        time.sleep(max(0.0, decision.wait_s - waited_s))
        return None
    continues = decision.action in ("resubmit", "defer") and code in exit_codes.STOPPED_CODES
    saved = continues and start is not None and evidence.saved_steps(job.run_dir) > start.saved_steps
    return exit_codes.STOPPED_FOR_RESUME if saved else code
