"""From a cause to what follows: decided, written down, done. Whoever comes second finds it done.

verdict.json                    made by link(2): there is one, and the first to be made holds
attempts/<n>/decision.json      what was decided after that attempt
jobs/<k>/cause.json             why a job ended that never began an attempt: see unstarted_jobs.py
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

import msgspec
from msgspec.structs import replace

from pitools.core import timestamps
from pitools.core.errors import DataError, PitError, TryLater
from pitools.core.fs import from_os_error, write_atomic
from pitools.core.locks import lock
from pitools.launch.diagnosis import diagnose, unstarted_jobs
from pitools.launch.plan import Plan
from pitools.launch.recovery import policy, slurm_query
from pitools.launch.submission import exclusions, grant, local_process, next_job, submissions
from pitools.run import cancel_request, run_folder
from pitools.run.attempt_records import AttemptStart, Cause, CauseKind, Decision, Verdict, VerdictCode
from pitools.site.connect import client
from pitools.site.schema import Connection, Site

RUN_LOCK = ".lock"
# What a verdict says of what a command asked for; of a failure its cause says it.
REASONS: dict[VerdictCode, str] = {
    "cancelled": "it was cancelled by `pit launch cancel`",
    "moving": "it is being moved to {site} as {run}",
    "moved": "moved to {site} as {run}, with {steps} steps",
}
_LOCK_WAIT_S = 20.0


def apply_from_job(run_dir: Path, plan: Plan, site: Site, cause: Cause, decision: Decision) -> Decision:
    """Do what a job of the run decided about an attempt: a verdict, exclusions, or the next job. Safe to repeat.

    Returns what holds: the verdict, where somebody came first with one. "retry" and "wait" are the caller's to do.
    Raises TryLater where another process is at it, and what submitting raises: `pit launch tick` does it then.
    """
    if decision.action == "wait" and policy.needs_slurm_state(cause):
        cause, decision = _with_slurm_statement(run_dir, plan, site, cause, decision)
    with lock(run_dir / RUN_LOCK, f"run {run_dir.name}", wait_s=_LOCK_WAIT_S):
        return apply_decision(run_dir, plan, site, cause, decision, in_job=True, job=_job_of_attempt(run_dir, cause))


def _with_slurm_statement(
    run_dir: Path, plan: Plan, site: Site, cause: Cause, decided: Decision
) -> tuple[Cause, Decision]:
    """The same with Slurm's own word for what ends this job, if it can be had while there is time."""
    attempt = run_dir / "attempts" / cause.attempt
    start = run_folder.read_or_none(attempt / "start.json", AttemptStart)
    told = slurm_query.termination_reason(without_ssh(site), start.job_id, start.started) if start else None
    if told is None:
        return cause, decided
    cause = diagnose.diagnose_attempt(run_dir, attempt, accounting=told, in_job=True)
    past = cause_history(run_dir, before_attempt=cause.attempt)
    # Its time is over, whatever is left of its limit.
    return cause, policy.decide(plan, site, cause, past, in_job=True, seconds_left=0.0)


def _job_of_attempt(run_dir: Path, cause: Cause) -> run_folder.JobRef | None:
    """The job that made an attempt."""
    start = run_folder.read_or_none(run_dir / "attempts" / cause.attempt / "start.json", AttemptStart)
    return submissions.read_job(run_dir, start.submission) if start else None


def apply_decision(
    run_dir: Path,
    plan: Plan,
    site: Site,
    cause: Cause,
    decision: Decision,
    *,
    in_job: bool,
    job: run_folder.JobRef | None,
    patience_s: float = next_job.RETRY_FOR_S,
) -> Decision:
    """The same for a caller that has the run's lock.

    in_job: on a node, so that Slurm is called from there. job: the job that this is about, to be followed.
    patience_s: with a Slurm that is busy.
    Raises TryLater where that has begun another attempt meanwhile.
    """
    if given := read_verdict(run_dir):
        action: policy.Action = "done" if given.state == "finished" else "stop"
        return replace(decision, action=action, kind=given.kind, reason=given.reason)
    if decision.action != "done" and cancel_request.pending_cancel(run_dir):
        decision = replace(decision, action="stop", kind="cancelled", reason=REASONS["cancelled"], exclude=())
    newest = max(submissions.submission_numbers(run_dir), default=0)
    if in_job and job and newest > job.number and decision.action != "done":
        return replace(decision, action="wait", reason=f"job {newest} of the run goes on with it")
    _record_decision(run_dir, site, cause, decision)
    if decision.action in ("done", "stop"):
        write_verdict(run_dir, decision.kind, decision.reason, cause.exit_code)
    elif decision.action == "resubmit":
        if in_job:  # a job that dies has little time; what it begins and cannot end, `tick` does
            site, patience_s = without_ssh(site), min(patience_s, site.recovery.grace_s / 2)
        _submit_following_job(run_dir, plan, site, in_job, cause, decision, job, patience_s)
    return decision


def _record_decision(run_dir: Path, site: Site, cause: Cause, decided: Decision) -> None:
    if cause.attempt:
        run_folder.write_record(run_dir / "attempts" / cause.attempt / "decision.json", decided)
    with contextlib.suppress(PitError):  # a list that cannot be kept is no reason to stop
        exclusions.exclude_nodes(run_dir.parent, site, decided.exclude, cause, run_dir.name)
    run_folder.append_event(
        run_dir,
        "decided",
        attempt=cause.attempt,
        kind=decided.kind,
        action=decided.action,
        reason=decided.reason,
        exclude=list(decided.exclude),
    )


def _submit_following_job(
    run_dir: Path,
    plan: Plan,
    site: Site,
    in_job: bool,
    cause: Cause,
    decided: Decision,
    previous_job: run_folder.JobRef | None,
    patience_s: float,
) -> None:
    if site.scheduler == "none":
        job = local_process.start_supervisor(run_dir, site)
        run_folder.write_record(run_dir / "job.json", job)
        run_folder.append_event(run_dir, "submitted", job_id=job.job_id)
        return
    # Only while it runs: what has ended may be forgotten, and a state that was final once is believed for good.
    if (
        in_job
        and site.recovery.chain == "requeue"
        and previous_job
        and not decided.exclude
        and _requeue(site, previous_job.job_id)
    ):
        run_folder.append_event(run_dir, "requeued", job_id=previous_job.job_id)
        return
    if previous_job and not in_job:
        _revoke_if_not_restarted(run_dir, previous_job, cause)
    # By its number: whoever comes to the same decision elsewhere, where no lock keeps us apart, sends the same job.
    number = previous_job.number + 1 if previous_job else None
    sent = next_job.submit_next_job(run_dir, plan, site, number=number, wait_s=decided.wait_s, retry_for_s=patience_s)
    if read_verdict(run_dir) or cancel_request.pending_cancel(
        run_dir
    ):  # in between: who did that may not have seen the job
        with contextlib.suppress(PitError):
            client(site).cancel([sent.job_id])
    if previous_job and in_job:
        revoke_grant(submissions.job_dir(run_dir, previous_job.number))
    if in_job and previous_job and cause.kind == "preempted":
        # Slurm has put this very job back in the queue as well, for when the new one had not been taken.
        with contextlib.suppress(PitError):
            client(site).cancel([previous_job.job_id])


def _revoke_if_not_restarted(run_dir: Path, previous_job: run_folder.JobRef, cause: Cause) -> None:
    """Keep a job that is over from beginning again. Raises TryLater where it has: see job/begin_attempt.py."""
    at = submissions.job_dir(run_dir, previous_job.number)
    revoke_grant(at)
    later = [path for path in run_folder.attempt_dirs(run_dir) if is_later_attempt(path, cause, previous_job)]
    if later:
        revoke_grant(at, grant.grant_token(previous_job.job_id))
        what = f"job {previous_job.job_id} has begun attempt {later[-1].name} meanwhile"
        raise TryLater(what, where=str(run_dir), hint="see: pit launch show")


def is_later_attempt(attempt: Path, cause: Cause, job: run_folder.JobRef) -> bool:
    """Whether a job has made this attempt since the one that a cause is of."""
    start = run_folder.read_or_none(attempt / "start.json", AttemptStart)
    if start is None or start.submission != job.number:
        return False
    return not cause.attempt or (attempt.name.isdecimal() and int(attempt.name) > int(cause.attempt))


def restore_grant(run_dir: Path, job: run_folder.JobRef) -> None:
    """Let a job begin again of which leave was taken, where none came to follow it."""
    revoke_grant(submissions.job_dir(run_dir, job.number), grant.grant_token(job.job_id))


def revoke_grant(job_dir: Path, token: str = grant.REVOKED) -> None:
    """From now on the job that this was the leave of does not begin again, should Slurm have put it back as well."""
    building = job_dir / f".grant.{secrets.token_hex(4)}"
    with contextlib.suppress(OSError):
        building.symlink_to(token)
        os.replace(building, job_dir / grant.GRANT_LINK)


def _requeue(site: Site, job_id: str) -> bool:
    try:
        client(site).requeue([job_id])
    except PitError:  # --no-requeue, or forgotten: a fresh job then
        return False
    return True


def without_ssh(site: Site) -> Site:
    """The site for a process on one of its own nodes, which calls Slurm without ssh."""
    return replace(site, connection=Connection(timeout_s=site.connection.timeout_s))


def write_verdict(
    run_dir: Path, kind: CauseKind, reason: str = "", exit_code: int | None = None, moved_to: str = ""
) -> Verdict:
    """Write the run's verdict, unless it has one; returns the one that holds. Raises what writing raises.

    reason: "" for a cancel, whose is in REASONS. moved_to: the run at another site that it is to go on as.
    """
    ended: VerdictCode = kind if kind in ("finished", "cancelled") else "failed"
    code: VerdictCode = "moving" if moved_to else ended
    made = Verdict(
        state="finished" if code == "finished" else "stopped",
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
    building = run_dir / f".verdict.{os.getpid()}.{secrets.token_hex(4)}"
    try:
        write_atomic(building, msgspec.json.encode(made) + b"\n")
        os.link(building, path)
    except FileExistsError:
        _drop_cancel(run_dir)
        return read_verdict(run_dir) or made
    except OSError as error:
        raise from_os_error(error, path) from error
    finally:
        building.unlink(missing_ok=True)
    _drop_cancel(run_dir)
    run_folder.append_event(run_dir, made.state, kind=kind, reason=made.reason)
    return made


def _count_jobs(run_dir: Path) -> int:
    """How many jobs, or supervisors, a run has had."""
    with contextlib.suppress(DataError):
        return len(submissions.submission_numbers(run_dir)) or submissions.next_number(run_dir)
    return 0


def _drop_cancel(run_dir: Path) -> None:
    with contextlib.suppress(OSError):  # beside a verdict it says nothing
        (run_dir / cancel_request.CANCEL_FILE).unlink()


def read_verdict(run_dir: Path) -> Verdict | None:
    """The run's verdict; None while it is to go on. Raises DataError for a file that is none."""
    return run_folder.read_record(run_dir / "verdict.json", Verdict)


def reopen(run_dir: Path) -> Verdict | None:
    """Take back a verdict, with what was spent until then, or a cancel; returns the verdict.

    The caller has the run's lock.
    """
    _drop_cancel(run_dir)
    given = read_verdict(run_dir)
    if given:
        kept = run_dir / "verdicts"
        kept.mkdir(mode=0o755, exist_ok=True)
        os.rename(run_dir / "verdict.json", kept / f"{len(list(kept.iterdir()))}.json")
        run_folder.append_event(run_dir, "reopened", was=given.reason)
    return given


def cause_history(run_dir: Path, *, before_attempt: str = "", before_job: int | None = None) -> list[Cause]:
    """The causes of a run's attempts and of its jobs without one, oldest first, since it was last reopened.

    before_attempt: leave out this attempt and what came after it. before_job: leave out this job, which began none.
    """
    found: list[tuple[int, int, Cause]] = []
    begun: set[int] = set()
    taken_back = [
        one for path in (run_dir / "verdicts").glob("*.json") if (one := run_folder.read_or_none(path, Verdict))
    ]
    since = max((one.attempts for one in taken_back), default=0)
    since_job = max((one.submissions for one in taken_back), default=0)
    for at, path in enumerate(run_folder.attempt_dirs(run_dir)):
        if path.name == before_attempt:
            break
        start = run_folder.read_or_none(path / "start.json", AttemptStart)
        job = start.submission if start else 0
        begun.add(job)
        cause = run_folder.read_or_none(path / "cause.json", Cause)
        if cause and at >= since:
            found.append((job, at, cause))
    for number, cause in unstarted_jobs.unstarted_causes(run_dir):
        if number >= since_job and number not in begun and number != before_job:
            found.append((number, -1, cause))
    return [cause for _, _, cause in sorted(found, key=lambda one: one[:2])]
