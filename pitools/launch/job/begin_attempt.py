"""Begin an attempt: check the grant, diagnose the previous attempt, create the attempt's folder."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from pitools.core import timestamps
from pitools.core.errors import PitError
from pitools.launch import exit_codes
from pitools.launch.diagnosis import evidence
from pitools.launch.job import fencing, job_recovery, wait_for
from pitools.launch.job.job_context import JobContext
from pitools.launch.submission import grant, submissions
from pitools.run import attempt_records as records
from pitools.run import cancel_request, run_folder
from pitools.store.version_state import revalidate_nfs

_SLURM_TIMEOUT_S = 10.0
# For the process that requested a cancel to get Slurm's answer, and to withdraw a refused request.
_CANCEL_TIMEOUT_S = 30.0


class AttemptRefused(Exception):
    """The job must not begin an attempt, and exits with `code`."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


def report_refusal(error: Exception) -> int:
    """Print why `begin_attempt` began no attempt, and return the job's exit code."""
    refused = isinstance(error, AttemptRefused)
    print(f"pit: {error}" if refused else f"pit: no attempt: {error}", file=sys.stderr)
    return error.code if isinstance(error, AttemptRefused) else exit_codes.ATTEMPT_NOT_STARTED


def begin_attempt(job: JobContext, *, time_limit_at: str = "") -> Path:
    """Create the next attempt of the run and return its folder.

    time_limit_at: when the job's time limit ends, RFC 3339; "" looks it up. Raises AttemptRefused if this job has no
    grant, the run is over, or its checkpoints are missing; also DataError, ClusterError and OSError.
    """
    _require_grant(job)
    previous_attempts = run_folder.attempt_dirs(job.run_dir)
    if job.mode != "none":
        _refuse_if_concluded(job.run_dir)
        _refuse_if_cancelled(job)
        if previous_attempts:
            _diagnose_previous(job, previous_attempts[-1])
    saved_steps = evidence.saved_steps(job.run_dir)
    if job.mode != "none" and not saved_steps and (recorded_steps := _max_recorded_steps(previous_attempts)):
        saved_steps = _wait_for_checkpoints(job, recorded_steps)
    attempt = create_attempt_dir(job)
    start = records.AttemptStart(
        attempt=attempt.name,
        job_number=job.job_number,
        job_id=job.job_id,
        cluster=job.cluster,
        restart_count=job.restart_count,
        node_list=job.node_list,
        nodes=job.nodes,
        started=timestamps.now_rfc3339(),
        time_limit_at=time_limit_at or _time_limit_at(job, previous_attempts, os.environ),
        saved_steps=saved_steps,
    )
    run_folder.write_record(attempt / "start.json", start)
    if job.mode == "run":
        # A successor first revokes the grant and then reads the starts: at least one of the two jobs sees the other.
        job_dir = submissions.job_dir(job.run_dir, job.job_number)
        for folder in (job_dir.parent, job_dir):
            revalidate_nfs(folder)
        if reason := fencing.superseded_by(job):
            shutil.rmtree(attempt)
            raise AttemptRefused(exit_codes.NOT_GRANTED, reason)
    if job.mode != "none":
        run_folder.append_event(job.run_dir, "attempt", attempt=attempt.name, job_id=job.job_id, nodes=job.node_list)
    return attempt


def create_attempt_dir(job: JobContext) -> Path:
    """Create the folder of a new attempt, under the first free number, and return it. Raises OSError."""
    root = job.run_dir / "attempts"
    root.mkdir(mode=0o755, parents=True, exist_ok=True)
    if job.task:
        attempt = root / f"{job.task}.{job.restart_count}"
        attempt.mkdir(mode=0o755, exist_ok=True)
    else:
        number = max(
            (int(path.name) + 1 for path in run_folder.attempt_dirs(job.run_dir) if path.name.isdecimal()), default=0
        )
        while True:
            attempt = root / str(number)
            try:
                attempt.mkdir(0o755)
                break
            except FileExistsError:
                number += 1
    for name in ("logs", "nodes"):
        (attempt / name).mkdir(mode=0o755, exist_ok=True)
    return attempt


def _max_recorded_steps(attempts: list[Path]) -> int:
    """Return the most steps that any earlier attempt recorded as saved."""
    recorded_steps = [0]
    for path in attempts:
        with contextlib.suppress(PitError, OSError):
            began = run_folder.read_record(path / "start.json", records.AttemptStart)
            ended = run_folder.read_record(path / "cause.json", records.Cause)
            recorded_steps += [record.saved_steps for record in (began, ended) if record]
    return max(recorded_steps)


def _wait_for_checkpoints(job: JobContext, recorded_steps: int) -> int:
    """Wait for the checkpoint store and return the saved steps.

    If the checkpoints stay missing, stop the run and raise AttemptRefused: a run never silently restarts from step 0
    because its store is not mounted, or its checkpoints were removed. A user allows that by a file `progress` in the
    run's folder.
    """

    def is_restored() -> bool:
        _refuse_if_concluded(job.run_dir)  # the run may be cancelled or moved during this wait
        return (
            evidence.saved_steps(job.run_dir) > 0
            or (job.run_dir / "progress").exists()
            or not _has_no_checkpoint_files(checkpoints)
        )

    checkpoints = job.run_dir / "checkpoints"
    missing = f"{checkpoints}: no checkpoint (expected {recorded_steps} saved steps)"
    if wait_for.wait_until(is_restored, missing):
        return evidence.saved_steps(job.run_dir)
    reason = (
        f"{missing}: mount the folder, or restore the checkpoints, and resume the run with --force; "
        f"to start from step 0 instead: echo 0 > {job.run_dir / 'progress'}"
    )
    try:
        job_recovery.conclude_run(job, "storage", reason)
    except PitError as error:
        print(f"pit: the run's verdict was not written: {error}", file=sys.stderr)
    raise AttemptRefused(1, reason)


def _has_no_checkpoint_files(checkpoints: Path) -> bool:
    """Whether the folder has no checkpoint, not even a damaged one."""
    from pitools.checkpoint.store import layout

    try:
        names = [path.name for path in checkpoints.iterdir()]
    except OSError:
        return True
    return not any(name == layout.QUARANTINE or layout.step_of(Path(name)) is not None for name in names)


def _require_grant(job: JobContext) -> None:
    job_dir = job.run_dir / "jobs" / str(job.job_number)
    if not job_dir.parent.is_dir():
        return  # a script that a user submitted directly needs no grant
    if not job_dir.is_dir():
        raise AttemptRefused(exit_codes.NOT_GRANTED, "the submission of this job was rolled back")
    _yield_to_newer_job(job)
    token = grant.grant_token(job.job_id)
    if (granted := grant.claim(job_dir, token)) != token:
        reason = f"job {job.job_id} must not run: the submission's grant is {granted} (expected {token})"
        raise AttemptRefused(exit_codes.NOT_GRANTED, reason)


def _yield_to_newer_job(job: JobContext) -> None:
    """Refuse a requeued job if its run has a newer submission; complete that submission if it was interrupted."""
    numbers = submissions.job_numbers(job.run_dir)
    if numbers and numbers[-1] > job.job_number and submissions.is_unresolved(job.run_dir, numbers[-1]):
        try:
            job_recovery.complete_submission(job, numbers[-1])
        except PitError as error:
            print(f"pit: submission {numbers[-1]} of the run was not completed: {error}", file=sys.stderr)
        numbers = submissions.job_numbers(job.run_dir)
    if numbers and numbers[-1] > job.job_number:
        raise AttemptRefused(exit_codes.NOT_GRANTED, f"job {numbers[-1]} of the run has taken over")


def _refuse_if_concluded(run_dir: Path) -> None:
    verdict = run_folder.read_record(run_dir / "verdict.json", records.Verdict)
    if verdict and verdict.state == "succeeded":
        raise AttemptRefused(0, f"the run has finished: {verdict.reason}")
    if verdict:
        raise AttemptRefused(verdict.exit_code or 1, f"the run was stopped: {verdict.reason}")


def _refuse_if_cancelled(job: JobContext) -> None:
    """Conclude the run and raise AttemptRefused if its cancellation was requested while this job was pending."""
    if not cancel_request.pending_cancel(job.run_dir):
        return
    with contextlib.suppress(FileNotFoundError):  # withdrawn meanwhile
        if not cancel_request.is_by_owner(job.run_dir):
            problem = f"{job.run_dir}: its cancel by another user may be refused"
            wait_for.wait_until(lambda: not cancel_request.pending_cancel(job.run_dir), problem, _CANCEL_TIMEOUT_S)
    if not cancel_request.pending_cancel(job.run_dir):
        return
    try:
        job_recovery.conclude_run(job, "cancelled")
    except PitError as error:
        print(f"pit: the run's verdict was not written: {error}", file=sys.stderr)
    raise AttemptRefused(1, "the run was stopped: its cancellation was requested")


def _diagnose_previous(job: JobContext, attempt: Path) -> None:
    """Diagnose the previous attempt if its job ended before it could, and raise AttemptRefused if the run must stop."""
    if (attempt / "cause.json").is_file():
        return
    try:
        decision = job_recovery.diagnose_and_decide(
            job, attempt, accounting_row=job_recovery.query_last_end(job), at_begin=True
        )
    except Exception as error:  # noqa: BLE001 (a failed diagnosis must not keep a run from resuming)
        print(f"pit: attempt {attempt.name} was not diagnosed: {error!r}", file=sys.stderr)
        return
    # Other actions need nothing here: this job retries already, and a wait is over.
    exit_code_for = {"done": 0, "stop": 1, "resubmit": exit_codes.STOPPED_FOR_RESUME}
    if decision.action in exit_code_for:
        raise AttemptRefused(exit_code_for[decision.action], decision.reason)


def _time_limit_at(job: JobContext, previous_attempts: list[Path], environ: Mapping[str, str]) -> str:
    """Return when the job's time limit ends, RFC 3339; "" if it has none or Slurm does not report it."""
    if (text := environ.get("SLURM_JOB_END_TIME", "")).isdecimal():
        return timestamps.unix_to_rfc3339(int(text))
    # Slurm before 23.02 sets no variable: query its controller, once per start of the job.
    for path in reversed(previous_attempts):
        start = run_folder.read_record(path / "start.json", records.AttemptStart)
        if start and (start.job_id, start.restart_count) == (job.job_id, job.restart_count):
            return start.time_limit_at
    try:
        from pitools.slurm.client import Client, Transport

        jobs = Client(Transport(timeout_s=_SLURM_TIMEOUT_S)).job(job.job_id)
        return jobs[0].end if jobs else ""
    except PitError:
        return ""
