"""A run goes on: its newest job is asked after, what has ended is judged, and what follows from it is done.

All that continues a run from outside its jobs comes through here: `pit launch resume`, `tick`, `watch` and `--wait`.
A job that waits or runs is never touched, and nothing is decided because a question found no answer.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Literal

from msgspec.structs import replace

from pitools.core.errors import ClusterError, ConfigError, DataError, PitError, TryLater, UsageError
from pitools.core.locks import is_owned_by_user, lock, not_owner_error
from pitools.core.record import Record
from pitools.launch.diagnosis import diagnose, unstarted_jobs
from pitools.launch.plan import load_plan
from pitools.launch.provenance import provenance
from pitools.launch.recovery import apply_decision, cancel_run, policy, requeue_hold, slurm_query
from pitools.launch.recovery.apply_decision import apply_from_job
from pitools.launch.submission import grant, local_process, next_job, submissions
from pitools.run import cancel_request, move_record, run_folder
from pitools.run.attempt_records import AttemptStart, Decision
from pitools.site.schema import Site
from pitools.slurm.records import AccountingRow
from pitools.slurm.states import UNKNOWN, is_finished

__all__ = ["ResumeResult", "apply_from_job", "resume_run"]

# A controller that lost its memory, or has not yet read it back, knows no jobs either.
_ABSENT_FOR_S = 600.0
_YOUNG_S = 5.0  # a person who asks for it means the present


class ResumeResult(Record, frozen=True, kw_only=True, tag="pit.resume-result/1"):
    """What was found of a run, and done.

    action: "untouched" (its job waits or runs, or nobody knows), "already_ended" (it had its verdict), "submitted" (a
    submission that was begun is finished), and those of a decision. job_id: of its newest job, now.
    """

    run_id: str
    action: Literal["untouched", "already_ended", "submitted", "done", "retry", "resubmit", "wait", "stop"]
    reason: str
    job_id: str = ""
    attempt: str = ""
    cause: str = ""
    exclude: tuple[str, ...] = ()


def resume_run(run_dir: Path, site: Site, *, force: bool = False, state: str = "") -> ResumeResult:
    """Continue a run if that is due. Safe to repeat, and for two at once.

    force: also one that has its verdict, whatever that is. state: Slurm's word for the newest job, where the caller has
    just asked. Raises TryLater where another process is at it, Slurm is silent, or with `force` the job that a verdict
    ended is still there; DataError for what is no run any more, ClusterError where Slurm refuses a job or the site is
    not the run's.
    """
    _check(run_dir, site)
    with lock(run_dir / apply_decision.RUN_LOCK, f"run {run_dir.name}"):
        given = apply_decision.read_verdict(run_dir)
        if given and not force:
            return _result(run_dir, "already_ended", f"{given.state}: {given.reason}", cause=given.kind)
        if cancel_request.pending_cancel(run_dir):
            if not force:
                done = cancel_run.execute_cancel(run_dir, site)
                if done is None:
                    return _result(run_dir, "untouched", "its cancel was asked for, and its ranks still end")
                return _result(run_dir, "done" if done.state == "finished" else "stop", done.reason, cause=done.kind)
            apply_decision.reopen(run_dir)
        open_one = _unresolved_since(run_dir)
        ref = submissions.latest_job(run_dir) if open_one is None else None
        if open_one is None and ref is None:
            return _submit_first_job(run_dir, site)
        if ref:
            submissions.require_same_cluster(site, ref)
            ref = _granted_job(run_dir, ref)
            if not (is_finished(state) or state == "PENDING"):
                state = slurm_query.job_states(site, [ref], max_age_s=_YOUNG_S)[ref.job_id]
            if given and not is_finished(state):
                # Calls for what all share may be spent, and a job that was just cancelled be called RUNNING.
                state = slurm_query.current_state(site, ref.job_id) or state
            if not is_finished(state) and not _has_ended(run_dir, site, ref, state):
                told = (
                    requeue_hold.held_job_accounting(run_dir, ref, site) if state == "PENDING" and not given else None
                )
                if given:
                    raise _still_ending_error(run_dir, ref, state)
                return bypass_held_job(run_dir, site, ref, told) if told else _untouched(run_dir, state)
            if slurm_query.is_queued_or_running(site, ref.job_id) or (
                site.scheduler == "none" and local_process.is_supervised(run_dir)
            ):
                clear_absence(run_dir, ref)
                if given:
                    raise _still_ending_error(run_dir, ref, state)
                return _result(run_dir, "untouched", "its job waits or runs again")
        if given:
            if move_record.completed_move(run_dir):  # from here on it is no longer away, and may be moved anew
                (run_dir / move_record.FILE).unlink()
            apply_decision.reopen(run_dir)
        if open_one is not None:
            sent = next_job.submit_next_job(
                run_dir, load_plan(run_dir), site, number=submissions.submission_numbers(run_dir)[-1]
            )
            return _result(run_dir, "submitted", f"the submission begun at {open_one} is finished", job_id=sent.job_id)
        assert ref is not None
        return recover(run_dir, site, ref, slurm_query.accounting_row(site, ref.job_id, state), state, force)


def _check(run_dir: Path, site: Site) -> None:
    if not run_dir.is_dir():
        raise UsageError(f'no run "{run_dir}"', hint="see: pit launch list")
    if not is_owned_by_user(run_dir):
        raise not_owner_error(run_dir, f"run {run_dir.name}")
    run_folder.require_own_run(run_dir, group_above=site.paths.runs_access == "group")
    plan = load_plan(run_dir)
    provenance.require_no_copy(run_dir, plan)
    if plan.site != site.name:
        raise ConfigError(f'the run is of site "{plan.site}", not "{site.name}"', where=str(run_dir))
    missing = [name for name in ("script.sbatch", "attempts") if not (run_dir / name).exists()]
    if missing and site.scheduler == "slurm":
        if not submissions.submission_numbers(run_dir) and not (run_dir / "job.json").exists():
            what = "the run was never submitted: whoever made it was killed before that"
            raise DataError(what, where=str(run_dir), hint="start it again: pit launch run; this folder can go")
        hint = "its checkpoints are in checkpoints/: a new run can be given them"
        raise DataError(f"a part of the run is gone: {missing[0]}", where=str(run_dir), hint=hint)


def _submit_first_job(run_dir: Path, site: Site) -> ResumeResult:
    """Submit a run whose maker was killed before it came to that.

    Raises DataError where it left too little, TryLater where it may have come to more.
    """
    if site.scheduler == "none" and local_process.is_supervised(run_dir):
        hint = "the same command again in a minute"
        raise TryLater("a process of the run may be about to begin", where=str(run_dir), hint=hint)
    if not (site.scheduler == "slurm" and (run_dir / "jobs").is_dir()):
        raise DataError("the run has no job", where=str(run_dir), hint="start it again: pit launch run")
    sent = next_job.submit_next_job(run_dir, load_plan(run_dir), site, number=0)
    return _result(run_dir, "submitted", "it had been made, and never submitted", job_id=sent.job_id)


def _unresolved_since(run_dir: Path) -> str | None:
    """When the submission was begun of which no job is known; None where there is none."""
    known = submissions.submission_numbers(run_dir)
    if not known or not submissions.is_unresolved(run_dir, known[-1]):
        return None
    intent = run_folder.read_record(
        submissions.job_dir(run_dir, known[-1]) / "intent.json", submissions.SubmissionIntent
    )
    return intent.intended_at if intent else ""


def _granted_job(run_dir: Path, ref: run_folder.JobRef) -> run_folder.JobRef:
    """Of two jobs that one doubtful submission made: the one that had leave."""
    word = ""
    with contextlib.suppress(OSError):
        word = grant.read_grant(submissions.job_dir(run_dir, ref.number))
    return replace(ref, job_id=grant.granted_job_id(word) or ref.job_id)


def _has_ended(run_dir: Path, site: Site, ref: run_folder.JobRef, state: str) -> bool:
    """Whether a job of which Slurm has no word any more is over: its script said so, or it was missed for long."""
    if state != UNKNOWN or not slurm_query.is_forgotten(site, ref.job_id):
        clear_absence(run_dir, ref)
        return False
    mark, now = _absence_mark(run_dir, ref), time.time()
    if not mark.exists():
        mark.touch(0o644)
        os.utime(mark, (now, now))  # not the file server's time
    return now - mark.stat().st_mtime >= (0.0 if _script_recorded_end(run_dir, ref) else _ABSENT_FOR_S)


def clear_absence(run_dir: Path, ref: run_folder.JobRef) -> None:
    """Its job is known: should it be missed again, that counts from then on."""
    _absence_mark(run_dir, ref).unlink(missing_ok=True)


def _absence_mark(run_dir: Path, ref: run_folder.JobRef) -> Path:
    return run_dir / f".missed.{ref.job_id}"


def _script_recorded_end(run_dir: Path, ref: run_folder.JobRef) -> bool:
    """Whether the job's script wrote down its last end: between two attempts it lives on."""
    last = _last_attempt_of(run_dir, ref)
    if last is None or not (last / "exit.json").exists():
        return False
    decided = run_folder.read_or_none(last / "decision.json", Decision)
    return decided is None or decided.action != "retry"


def _last_attempt_of(run_dir: Path, ref: run_folder.JobRef) -> Path | None:
    """The newest attempt, if it is this job's."""
    last = run_folder.last_attempt(run_dir)
    start = run_folder.read_record(last / "start.json", AttemptStart) if last else None
    return last if start is None or start.job_id in ("", ref.job_id) or start.submission >= ref.number else None


def _untouched(run_dir: Path, state: str) -> ResumeResult:
    why = "Slurm has no word of its job" if state == UNKNOWN else f"its job is {state.lower()}"
    return _result(run_dir, "untouched", why)


def _still_ending_error(run_dir: Path, ref: run_folder.JobRef, state: str) -> TryLater:
    """The error that a run cannot begin again yet: the job that its verdict ended is not gone."""
    what = f"job {ref.job_id} of the run has not ended yet (state {state})"
    hint = f"give it its time to save, or: scancel {ref.job_id}; then the same command again"
    return TryLater(what, where=str(run_dir), hint=hint)


def bypass_held_job(run_dir: Path, site: Site, ref: run_folder.JobRef, accounting: AccountingRow) -> ResumeResult:
    """Go on without waiting for a job that Slurm holds back: a fresh one has the run, and this one is withdrawn."""
    try:
        # At once or not at all: meanwhile the held one has no leave, and its time may come.
        done = recover(run_dir, site, ref, accounting, accounting.state, force=False, patience_s=0.0)
    except PitError as error:
        if max(submissions.submission_numbers(run_dir), default=0) > ref.number:
            raise
        apply_decision.restore_grant(run_dir, ref)  # refused, a limit perhaps: then this one goes on
        if not isinstance(error, ClusterError):
            raise
        requeue_hold.mark_waiting(run_dir, ref)
        return _result(run_dir, "untouched", f"Slurm holds its job back, and takes no other: {error.message}")
    if done.action == "resubmit":  # should it begin first, it finds that it has no leave
        with contextlib.suppress(PitError):
            slurm_query.cancel_job(site, ref.job_id)
    return done


def recover(
    run_dir: Path,
    site: Site,
    ref: run_folder.JobRef,
    accounting: AccountingRow | None,
    state: str,
    force: bool,
    patience_s: float = next_job.RETRY_FOR_S,
) -> ResumeResult:
    last = _last_attempt_of(run_dir, ref)
    if site.scheduler == "none" and last and (alive := slurm_query.orphan_pids(last)):
        what = f"its ranks still run, and what started them does not: {', '.join(map(str, alive))}"
        raise ClusterError(what, where=str(run_dir), hint=f"end them first: kill {' '.join(map(str, alive))}")
    plan = load_plan(run_dir)
    if last is not None:
        if accounting and accounting.state == "NODE_FAIL":
            slurm_query.record_lost_nodes(site, last)
        cause = diagnose.diagnose_attempt(run_dir, last, accounting=accounting)
    else:
        cause = unstarted_jobs.diagnose_unstarted(run_dir, ref, accounting, state, python=plan.python)
        run_folder.write_record(unstarted_jobs.cause_path(run_dir, ref), cause)
    past = apply_decision.cause_history(
        run_dir, before_attempt=cause.attempt, before_job=ref.number if last is None else None
    )
    decided = policy.decide(plan, site, cause, past)
    if accounting is None and policy.needs_slurm_state(cause):
        # What a person has cancelled is not begun again because Slurm keeps no account of it.
        decided = replace(decided, action="stop", reason=f"{cause.reason}; to go on: pit launch resume --force")
    if force and decided.action != "resubmit":
        decided = replace(decided, action="resubmit", reason=f"asked to go on; {decided.reason}")
    if decided.action == "resubmit" and site.scheduler == "slurm" and not (run_dir / "jobs").is_dir():
        # A callable's pickle is known by the id of the job that it was submitted with.
        decided = replace(decided, action="stop", reason=f"{cause.reason}; its submitter alone can submit it again")
    decided = apply_decision.apply_decision(
        run_dir, plan, site, cause, decided, in_job=False, job=ref, patience_s=patience_s
    )
    return _result(
        run_dir, decided.action, decided.reason, attempt=cause.attempt, cause=decided.kind, exclude=decided.exclude
    )


def _result(
    run_dir: Path,
    action: str,
    reason: str,
    *,
    job_id: str = "",
    attempt: str = "",
    cause: str = "",
    exclude: tuple[str, ...] = (),
) -> ResumeResult:
    ref = None
    with contextlib.suppress(DataError, ClusterError):
        ref = submissions.latest_job(run_dir)
    return ResumeResult(
        run_id=run_dir.name,
        action=action,  # type: ignore[arg-type]
        reason=reason,
        job_id=job_id or (ref.job_id if ref else ""),
        attempt=attempt,
        cause=cause,
        exclude=exclude,
    )
