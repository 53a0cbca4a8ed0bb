"""Apply a recovery decision. Idempotent: the first caller wins.

verdict.json                    created by link(2): only the first one is kept
attempts/<n>/decision.json      the decision after that attempt
jobs/<k>/cause.json             why a job ended before its first attempt: see unstarted_jobs.py
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
from pathlib import Path

import msgspec
from msgspec.structs import replace

from pitools.core import timestamps
from pitools.core.errors import DataError, PitError, TryLater
from pitools.core.fs import from_os_error, write_atomic
from pitools.core.locks import lock
from pitools.launch import hooks
from pitools.launch.diagnosis import diagnose, slow_ranks, unstarted_jobs
from pitools.launch.plan import Plan
from pitools.launch.recovery import policy, slurm_query
from pitools.launch.submission import exclusions, grant, local_process, next_job, submissions
from pitools.node.site_suspicion import report_cause
from pitools.run import cancel_request, run_folder
from pitools.run.attempt_records import AttemptStart, Cause, Decision, Verdict, VerdictCode, VerdictKind
from pitools.site.connect import client
from pitools.site.schema import Connection, Site
from pitools.store.version_state import revalidate_nfs

RUN_LOCK = ".lock"
# The reasons of verdicts by a command; a failure's reason is that of its cause.
REASONS: dict[VerdictCode, str] = {
    "cancelled": "cancelled by `pit launch cancel`",
    "moving": "being moved to {site} as {run}",
    "moved": "moved to {site} as {run}, with {steps} steps",
}
_LOCK_TIMEOUT_S = 20.0


def apply_from_job(run_dir: Path, plan: Plan, site: Site, cause: Cause, decision: Decision) -> Decision:
    """Apply the decision of a job of the run about an attempt: a verdict, exclusions, or the next job. Safe to repeat.

    Returns the decision that applies: that of an earlier verdict, if there is one. "retry" and "defer" are left to the
    caller. Raises TryLater if another process holds the run's lock, and what submitting raises: then `pit launch tick`
    applies the decision later.
    """
    if decision.action == "defer" and policy.needs_slurm_state(cause):
        cause, decision = _with_slurm_statement(run_dir, plan, site, cause, decision)
    with lock(run_dir / RUN_LOCK, f"run {run_dir.name}", timeout_s=_LOCK_TIMEOUT_S):
        return apply_decision(run_dir, plan, site, cause, decision, in_job=True, job=_job_of_attempt(run_dir, cause))


def _with_slurm_statement(
    run_dir: Path, plan: Plan, site: Site, cause: Cause, decision: Decision
) -> tuple[Cause, Decision]:
    """Diagnose and decide again with Slurm's reason for ending this job, if Slurm reports it in time."""
    attempt = run_dir / "attempts" / cause.attempt
    start = run_folder.read_or_none(attempt / "start.json", AttemptStart)
    accounting = slurm_query.query_termination(without_ssh(site), start.job_id, start.started) if start else None
    if accounting is None:
        return cause, decision
    cause = diagnose.diagnose_attempt(run_dir, attempt, accounting=accounting, in_job=True)
    history = cause_history(run_dir, before_attempt=cause.attempt)
    # Slurm is ending the job: none of its time limit remains usable.
    is_ticket = run_folder.is_ticket(run_dir)
    return cause, policy.decide(plan, site, cause, history, in_job=True, is_ticket=is_ticket, seconds_left=0.0)


def _job_of_attempt(run_dir: Path, cause: Cause) -> run_folder.JobRef | None:
    """Return the job that an attempt belongs to."""
    start = run_folder.read_or_none(run_dir / "attempts" / cause.attempt / "start.json", AttemptStart)
    return submissions.read_job(run_dir, start.job_number) if start else None


def apply_decision(
    run_dir: Path,
    plan: Plan,
    site: Site,
    cause: Cause,
    decision: Decision,
    *,
    in_job: bool,
    job: run_folder.JobRef | None,
    retry_for_s: float = next_job.RETRY_FOR_S,
) -> Decision:
    """Apply a decision; the caller holds the run's lock.

    in_job: called on a node, where Slurm is called without ssh. job: the job that ended, which the next job follows.
    retry_for_s: how long to retry a busy Slurm.
    Raises TryLater if the job has started another attempt in the meantime.
    """
    if verdict := read_verdict(run_dir):
        action: policy.Action = "done" if verdict.state == "succeeded" else "stop"
        return replace(decision, action=action, kind=verdict.kind, reason=verdict.reason)
    if decision.action != "done" and cancel_request.pending_cancel(run_dir):
        decision = replace(decision, action="stop", kind="cancelled", reason=REASONS["cancelled"], exclude=())
    newest = max(submissions.job_numbers(run_dir), default=0)
    if in_job and job and newest > job.job_number and decision.action != "done":
        return replace(decision, action="defer", reason=f"job {newest} of the run continues it")
    _record_decision(run_dir, site, cause, decision)
    if decision.action in ("done", "stop"):
        write_verdict(run_dir, decision.kind, decision.reason, cause.exit_code)
    elif decision.action == "resubmit":
        if in_job:  # a job has little time before it ends; `tick` completes an unfinished submission
            site, retry_for_s = without_ssh(site), min(retry_for_s, site.recovery.grace_s / 2)
        _submit_following_job(run_dir, plan, site, in_job, cause, decision, job, retry_for_s)
    return decision


def _record_decision(run_dir: Path, site: Site, cause: Cause, decision: Decision) -> None:
    if cause.attempt:
        run_folder.write_record(run_dir / "attempts" / cause.attempt / "decision.json", decision)
    blamed = cause.nodes if cause.kind in policy.RULES else ()
    report_cause(site, {*blamed, *decision.exclude}, cause, run_dir.name)
    if cause.attempt:
        slow_ranks.report_events(site, run_dir, run_dir / "attempts" / cause.attempt)
    try:
        exclusions.exclude_nodes(run_dir.parent, site, decision.exclude, cause, run_dir.name)
    except PitError as error:  # the run continues all the same
        print(
            f"pit: {run_dir.name}: the next job may get {', '.join(decision.exclude)} again: {error}", file=sys.stderr
        )
    run_folder.append_event(
        run_dir,
        "decided",
        attempt=cause.attempt,
        kind=decision.kind,
        action=decision.action,
        reason=decision.reason,
        exclude=list(decision.exclude),
    )


def _submit_following_job(
    run_dir: Path,
    plan: Plan,
    site: Site,
    in_job: bool,
    cause: Cause,
    decision: Decision,
    previous_job: run_folder.JobRef | None,
    retry_for_s: float,
) -> None:
    if site.scheduler == "none":
        local_process.start_job(run_dir, site, wait_s=decision.wait_s)
        return
    # Only while the job runs: Slurm may forget an ended job, and a final state is cached for ever.
    if (
        in_job
        and site.recovery.chain == "requeue"
        and previous_job
        and not decision.exclude
        and _requeue(site, previous_job.job_id)
    ):
        run_folder.append_event(run_dir, "requeued", job_id=previous_job.job_id)
        return
    if previous_job and not in_job:
        _revoke_if_not_restarted(run_dir, previous_job, cause)
    # The number makes concurrent callers, which no lock may keep apart, submit the same job.
    job_number = previous_job.job_number + 1 if previous_job else None
    new_job = next_job.submit_next_job(
        run_dir, plan, site, job_number=job_number, wait_s=decision.wait_s, retry_for_s=retry_for_s
    )
    # A verdict or a cancel in the meantime may have missed the new job.
    if read_verdict(run_dir) or cancel_request.pending_cancel(run_dir):
        with contextlib.suppress(PitError):
            client(site).cancel([new_job.job_id])
    if previous_job and in_job:
        revoke_grant(submissions.job_dir(run_dir, previous_job.job_number))
    if in_job and previous_job and cause.kind == "preempted":
        # Slurm has also requeued the preempted job, which would have continued the run without a new one.
        with contextlib.suppress(PitError):
            client(site).cancel([previous_job.job_id])


def _revoke_if_not_restarted(run_dir: Path, previous_job: run_folder.JobRef, cause: Cause) -> None:
    """Revoke the grant of an ended job. Raises TryLater if Slurm has restarted the job: see job/begin_attempt.py."""
    job_dir = submissions.job_dir(run_dir, previous_job.job_number)
    revoke_grant(job_dir)
    revalidate_nfs(run_dir / "attempts")
    later_attempts = [path for path in run_folder.attempt_dirs(run_dir) if is_later_attempt(path, cause, previous_job)]
    if later_attempts:
        revoke_grant(job_dir, grant.grant_token(previous_job.job_id))
        problem = f"job {previous_job.job_id} has started attempt {later_attempts[-1].name} in the meantime"
        raise TryLater(problem, where=str(run_dir), hint="see: pit launch show")


def is_later_attempt(attempt: Path, cause: Cause, job: run_folder.JobRef) -> bool:
    """Whether a job started this attempt after the attempt of a cause."""
    start = run_folder.read_or_none(attempt / "start.json", AttemptStart)
    if start is None or start.job_number != job.job_number:
        return False
    return not cause.attempt or (attempt.name.isdecimal() and int(attempt.name) > int(cause.attempt))


def restore_grant(run_dir: Path, job: run_folder.JobRef) -> None:
    """Give an ended job its grant back, because no other job follows it."""
    revoke_grant(submissions.job_dir(run_dir, job.job_number), grant.grant_token(job.job_id))


def revoke_grant(job_dir: Path, token: str = grant.REVOKED) -> None:
    """Replace the grant of a job, so that the job starts no further attempt if Slurm requeues it."""
    with contextlib.suppress(OSError):
        grant.replace(job_dir, token)


def _requeue(site: Site, job_id: str) -> bool:
    try:
        client(site).requeue([job_id])
    except PitError:  # --no-requeue, or Slurm has forgotten the job: submit a fresh one
        return False
    return True


def without_ssh(site: Site) -> Site:
    """Return the site for a process on one of its nodes, which calls Slurm without ssh."""
    return replace(site, connection=Connection(timeout_s=site.connection.timeout_s))


def write_verdict(
    run_dir: Path, kind: VerdictKind, reason: str = "", exit_code: int | None = None, moved_to: str = ""
) -> Verdict:
    """Write the run's verdict, unless it has one; return the verdict that is on disk. Raises what writing raises.

    reason: "" for a cancel, whose reason is in REASONS. moved_to: the run at another site that continues this one.
    """
    final_code: VerdictCode = kind if kind in ("succeeded", "cancelled") else "failed"
    code: VerdictCode = "moving" if moved_to else final_code
    verdict = Verdict(
        state="succeeded" if code == "succeeded" else "stopped",
        code=code,
        kind=kind,
        t=timestamps.now_rfc3339(),
        reason=reason or REASONS.get(code, ""),
        attempts=len(run_folder.attempt_dirs(run_dir)),
        submissions=_count_jobs(run_dir),
        exit_code=exit_code,
        moved_to=moved_to,
    )
    path = run_dir / "verdict.json"
    temp_path = run_dir / f".verdict.{os.getpid()}.{secrets.token_hex(4)}"
    try:
        write_atomic(temp_path, msgspec.json.encode(verdict) + b"\n")
        os.link(temp_path, path)
    except FileExistsError:
        _drop_cancel(run_dir)
        return read_verdict(run_dir) or verdict
    except OSError as error:
        raise from_os_error(error, path) from error
    finally:
        temp_path.unlink(missing_ok=True)
    _drop_cancel(run_dir)
    run_folder.append_event(run_dir, verdict.state, kind=kind, code=verdict.code, reason=verdict.reason)
    return verdict


def _count_jobs(run_dir: Path) -> int:
    """Return the number of jobs, or supervisors, of a run."""
    with contextlib.suppress(DataError):
        return len(submissions.job_numbers(run_dir)) or submissions.next_job_number(run_dir)
    return 0


def _drop_cancel(run_dir: Path) -> None:
    with contextlib.suppress(OSError):  # a cancel request has no effect beside a verdict
        (run_dir / cancel_request.CANCEL_FILE).unlink()


def read_verdict(run_dir: Path) -> Verdict | None:
    """Return the run's verdict; None while the run is unfinished. Raises DataError for a damaged file."""
    return run_folder.read_record(run_dir / "verdict.json", Verdict)


def reopen(run_dir: Path) -> Verdict | None:
    """Withdraw a verdict, which resets the retry budgets, or a cancel request; return the verdict.

    The caller holds the run's lock.
    """
    _drop_cancel(run_dir)
    verdict = read_verdict(run_dir)
    if verdict:
        archive_dir = run_dir / "verdicts"
        archive_dir.mkdir(mode=0o755, exist_ok=True)
        os.rename(run_dir / "verdict.json", archive_dir / f"{len(list(archive_dir.iterdir()))}.json")
        hooks.mark_again(run_dir)
    run_folder.append_event(run_dir, "reopened", was=verdict.reason if verdict else "")
    return verdict


def cause_history(run_dir: Path, *, before_attempt: str = "", before_job: int | None = None) -> list[Cause]:
    """Return the causes of a run's attempts and of its jobs without one since it was last reopened, oldest first.

    before_attempt: leave out this attempt and later ones. before_job: leave out this job, which has no attempt.
    """
    causes: list[tuple[int, int, Cause]] = []
    jobs_with_attempt: set[int] = set()
    withdrawn = [
        verdict for path in (run_dir / "verdicts").glob("*.json") if (verdict := run_folder.read_or_none(path, Verdict))
    ]
    first_attempt = max((verdict.attempts for verdict in withdrawn), default=0)
    first_job = max((verdict.submissions for verdict in withdrawn), default=0)
    for index, path in enumerate(run_folder.attempt_dirs(run_dir)):
        if path.name == before_attempt:
            break
        start = run_folder.read_or_none(path / "start.json", AttemptStart)
        job = start.job_number if start else 0
        jobs_with_attempt.add(job)
        cause = run_folder.read_or_none(path / "cause.json", Cause)
        if cause and index >= first_attempt:
            causes.append((job, index, cause))
    for number, cause in unstarted_jobs.unstarted_causes(run_dir):
        if number >= first_job and number not in jobs_with_attempt and number != before_job:
            causes.append((number, -1, cause))
    return [cause for _, _, cause in sorted(causes, key=lambda verdict: verdict[:2])]
