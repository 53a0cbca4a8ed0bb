"""Continue a run: query its newest job, diagnose an ended attempt, and apply the decision.

`pit launch resume`, `tick`, `watch` and `--wait` use this module; jobs use job/job_recovery.py.
A pending or running job is left alone, and a failed query leads to no decision.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from msgspec.structs import replace

from pitools.core.errors import ClusterError, ConfigError, DataError, PitError, TryLater, Unreachable, UsageError
from pitools.core.fs import write_atomic
from pitools.core.locks import is_owned_by_user, lock, not_owner_error
from pitools.core.record import Record
from pitools.launch import hooks
from pitools.launch.diagnosis import diagnose, patterns, unstarted_jobs
from pitools.launch.plan import Plan, load_plan, render_script
from pitools.launch.provenance import provenance
from pitools.launch.recovery import apply_decision, cancel_run, policy, requeue_delay, slurm_query
from pitools.launch.submission import grant, local_process, next_job, submissions
from pitools.run import cancel_request, move_record, run_folder
from pitools.run.attempt_records import AttemptStart, Decision
from pitools.site.schema import Site
from pitools.slurm.records import AccountingRow
from pitools.slurm.states import UNKNOWN, is_final

TICKET_HINT = "see pit place list; to begin its request again: pit place run REQUEST.toml"
# A controller that lost its state, or has not restored it yet, reports no jobs either.
_ABSENT_FOR_S = 600.0
_MAX_STATE_AGE_S = 5.0  # the most seconds that a cached state may be old: a user expects the present one
JobEnd = tuple[str, AccountingRow | None]  # slurmctld's state of a job, and how it ended


class ResumeResult(Record, frozen=True, kw_only=True, tag="pit.resume-result/1"):
    """What `resume_run` did with a run.

    action: "untouched" (its job is pending, running or of unknown state), "already_ended" (the run has its verdict),
    "submitted" (an unfinished submission is completed), or the action of the decision. job_id: of the newest job.
    """

    run_id: str
    action: Literal["untouched", "already_ended", "submitted", "done", "retry", "resubmit", "defer", "stop"]
    reason: str
    job_id: str = ""
    attempt: str = ""
    cause: str = ""
    exclude: tuple[str, ...] = ()


def resume_run(run_dir: Path, site: Site, *, force: bool = False, state: str = "") -> ResumeResult:
    """Continue a run if it is due. Safe to repeat, also concurrently.

    force: also continue a run that has its verdict or a cancel request. state: Slurm's state of the newest job, if the
    caller has just queried it, else "".
    Raises TryLater if another process holds the run's lock, if Slurm does not respond, or with `force` if the job of a
    run with a verdict has not ended; UsageError with `force` for a run of pit place; DataError for an incomplete run;
    ClusterError if Slurm refuses a job; ConfigError for another site than the run's.
    """
    _check(run_dir, site)
    if force and run_folder.is_ticket(run_dir):
        raise UsageError(f"run {run_dir.name} is of pit place, and has one job", where=str(run_dir), hint=TICKET_HINT)
    with hooks.deliver_at_end(run_dir), lock(run_dir / apply_decision.RUN_LOCK, f"run {run_dir.name}"):
        verdict = apply_decision.read_verdict(run_dir)
        if verdict and not force:
            return _result(run_dir, "already_ended", f"{verdict.state}: {verdict.reason}", cause=verdict.kind)
        if cancel_request.pending_cancel(run_dir):
            if not force:
                done = cancel_run.execute_cancel(run_dir, site)
                if done is None:
                    return _result(run_dir, "untouched", "its cancel is pending: its ranks are still ending")
                return _result(run_dir, "done" if done.state == "succeeded" else "stop", done.reason, cause=done.kind)
            apply_decision.reopen(run_dir)
        unresolved_at = _unresolved_since(run_dir)
        ref = submissions.latest_job(run_dir) if unresolved_at is None else None
        if ref is None and run_folder.is_ticket(run_dir):
            return _result(run_dir, "untouched", "pit place submits its job")
        if unresolved_at is None and ref is None:
            if verdict:
                apply_decision.reopen(run_dir)
            return _submit_first_job(run_dir, site)
        if ref:
            submissions.require_same_cluster(site, ref)
            ref = _granted_job(run_dir, ref)
            if not (is_final(state) or state == "PENDING"):
                state = slurm_query.job_states(site, [ref], max_age_s=_MAX_STATE_AGE_S)[ref.job_id]
            if verdict and not is_final(state):
                # The shared cache may be out of queries, and still hold RUNNING for a job that was just cancelled.
                state = slurm_query.current_state(site, ref.job_id) or state
            if not is_final(state) and not _has_ended(run_dir, site, ref, state):
                accounting = (
                    requeue_delay.delayed_job_accounting(run_dir, ref, site)
                    if state == "PENDING" and not verdict
                    else None
                )
                if verdict:
                    raise _still_ending_error(run_dir, ref, state)
                return bypass_delayed_job(run_dir, site, ref, accounting) if accounting else _untouched(run_dir, state)
            if slurm_query.is_queued_or_running(site, ref.job_id) or (
                site.scheduler == "none" and local_process.is_supervised(run_dir)
            ):
                clear_absence(run_dir, ref)
                if verdict:
                    raise _still_ending_error(run_dir, ref, state)
                return _result(run_dir, "untouched", "its job is pending or running again")
        if verdict:
            if move_record.completed_move(run_dir):  # the run is no longer moved away, and may be moved again
                (run_dir / move_record.MOVE_FILE).unlink()
            apply_decision.reopen(run_dir)
        if unresolved_at is not None:
            new_job = next_job.submit_next_job(
                run_dir, load_plan(run_dir), site, job_number=submissions.job_numbers(run_dir)[-1]
            )
            return _result(
                run_dir, "submitted", f"the submission of {unresolved_at} is completed", job_id=new_job.job_id
            )
        assert ref is not None
        return recover(run_dir, site, ref, slurm_query.query_end(site, ref.job_id, state), state, force)


def query_ends(run_dirs: Sequence[Path], site: Site) -> dict[str, JobEnd]:
    """Return what Slurm says of the jobs of many runs, for `settle_run`: by one squeue and one sacct for all.

    Raises TryLater.
    """
    ids: list[str] = []
    for run_dir in run_dirs:
        with contextlib.suppress(PitError, OSError):  # reported, or left alone, by `settle_run`
            ids += [ref.job_id] if (ref := _job_to_settle(run_dir, site)) else []
    known = slurm_query.current_states(site, ids)
    states = {job_id: known.get(job_id, UNKNOWN) for job_id in ids}
    ends = slurm_query.query_ends(site, states)
    return {job_id: (state, ends[job_id]) for job_id, state in states.items()}


def settle_run(run_dir: Path, site: Site, ends: Mapping[str, JobEnd] = {}) -> bool:
    """Diagnose a run whose job has ended, and record its verdict if no other job is to follow. Submits nothing.

    For commands that show runs: does nothing for another user's run, or while another process holds the run's lock.
    ends: what Slurm has just said of jobs; others are queried. Returns False if Slurm does not respond.
    """
    try:
        _check(run_dir, site)
        with hooks.deliver_at_end(run_dir):
            ref = _job_to_settle(run_dir, site)
            # Without the lock: Slurm may be slow, and the job itself needs the lock when it ends.
            ended = _query_ended(run_dir, site, ref, ends) if ref else None
            if ref is None or ended is None:
                return True
            with lock(run_dir / apply_decision.RUN_LOCK, f"run {run_dir.name}"):
                if _job_to_settle(run_dir, site) != ref:
                    return True
                if tasks := _array_tasks(run_dir):
                    _conclude_array(run_dir, site, ref, tasks)
                else:
                    recover(run_dir, site, ref, *ended, force=False, may_submit=False)
    except Unreachable:
        return False
    except (PitError, OSError):
        pass
    return True


def _job_to_settle(run_dir: Path, site: Site) -> run_folder.JobRef | None:
    """Return the newest job of a run without a verdict or a cancel request; None while its submission is unfinished."""
    if apply_decision.read_verdict(run_dir) or cancel_request.pending_cancel(run_dir):
        return None
    ref = submissions.latest_job(run_dir) if _unresolved_since(run_dir) is None else None
    if ref is None:
        return None
    submissions.require_same_cluster(site, ref)
    return _granted_job(run_dir, ref)


def _query_ended(
    run_dir: Path, site: Site, ref: run_folder.JobRef, ends: Mapping[str, JobEnd]
) -> tuple[AccountingRow | None, str] | None:
    """Return a job's accounting and state if it has ended; else None. Raises what querying raises."""
    if site.scheduler == "none":
        is_open = not is_final(slurm_query.job_states(site, [ref])[ref.job_id])
        state, is_open = "FAILED", is_open or local_process.is_supervised(run_dir)
    else:  # the cache of all commands may be out of queries
        state = ends[ref.job_id][0] if ref.job_id in ends else slurm_query.current_state(site, ref.job_id) or UNKNOWN
        is_open = state != UNKNOWN and not is_final(state)
    if is_open:
        return None
    accounting = ends[ref.job_id][1] if ref.job_id in ends else slurm_query.query_end(site, ref.job_id, state)
    if not (accounting or is_final(state) or _has_ended(run_dir, site, ref, state)):
        return None
    return accounting, state


def _array_tasks(run_dir: Path) -> dict[str, Path]:
    """Return the last attempt of each task of an array of callables; {} for any other run."""
    attempts = run_folder.attempt_dirs(run_dir)
    return {attempt.name.partition(".")[0]: attempt for attempt in attempts if "." in attempt.name}


def _conclude_array(run_dir: Path, site: Site, ref: run_folder.JobRef, tasks: dict[str, Path]) -> None:
    """Diagnose each task of an ended array, and record the verdict: by the first task that failed, if one did."""
    rows = slurm_query.query_tasks(site, ref.job_id)
    causes = {
        task: diagnose.diagnose_attempt(run_dir, attempt, accounting=rows.get(task)) for task, attempt in tasks.items()
    }
    task, cause = next(((task, cause) for task, cause in causes.items() if cause.kind != "succeeded"), ("", None))
    ended_badly = {task: row.state for task, row in rows.items() if is_final(row.state) and row.state != "COMPLETED"}
    never_began = [(task, state) for task, state in ended_badly.items() if task not in tasks]
    if cause:
        apply_decision.write_verdict(run_dir, cause.kind, f"task {task}: {cause.reason}", cause.exit_code)
    elif never_began:
        task, state = never_began[0]
        kind = patterns.load_table().states.get(state, "unknown")
        apply_decision.write_verdict(run_dir, kind, f"task {task}: {state} before it began")
    else:
        apply_decision.write_verdict(run_dir, "succeeded", f"{len(causes)} tasks ended with code 0", 0)


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
    if site.scheduler == "slurm" and not submissions.job_numbers(run_dir) and (run_dir / "jobs").is_dir():
        _render_missing_script(run_dir, plan, site)
    missing = [name for name in ("script.sbatch", "attempts") if not (run_dir / name).exists()]
    if missing and site.scheduler == "slurm":
        hint = "its checkpoints are in checkpoints/: copy them to a new run"
        raise DataError(f"the run is incomplete: no {missing[0]}", where=str(run_dir), hint=hint)


def _render_missing_script(run_dir: Path, plan: Plan, site: Site) -> None:
    """Write the script of a run whose submitter was killed before it did."""
    script = run_dir / "script.sbatch"
    if not script.exists() and not (run_dir / "job.json").exists():
        write_atomic(script, render_script(plan, site, run_dir=str(run_dir)), durable=False)


def _submit_first_job(run_dir: Path, site: Site) -> ResumeResult:
    """Submit, or start, a run whose submitter was killed before that.

    Raises DataError for a run of a callable, TryLater if a supervisor may be about to start.
    """
    if site.scheduler == "none":
        if local_process.is_supervised(run_dir):
            hint = "run the same command again in a minute"
            raise TryLater("a process of the run may be about to start", where=str(run_dir), hint=hint)
        new_job = local_process.start_job(run_dir, site)
    elif (run_dir / "jobs").is_dir():
        new_job = next_job.submit_next_job(run_dir, load_plan(run_dir), site, job_number=0)
    else:
        raise DataError("the run has no job", where=str(run_dir), hint="start it again: pit launch run")
    return _result(run_dir, "submitted", "the run was created, but never submitted", job_id=new_job.job_id)


def _unresolved_since(run_dir: Path) -> str | None:
    """Return when the unfinished submission, if any, was begun; a submission is unfinished while its job is unknown."""
    numbers = submissions.job_numbers(run_dir)
    if not numbers or not submissions.is_unresolved(run_dir, numbers[-1]):
        return None
    intent = run_folder.read_record(
        submissions.job_dir(run_dir, numbers[-1]) / "intent.json", submissions.SubmissionIntent
    )
    return intent.intended_at if intent else ""


def _granted_job(run_dir: Path, ref: run_folder.JobRef) -> run_folder.JobRef:
    """Return the job with the grant, of the two that an unanswered submission may have created."""
    token = ""
    with contextlib.suppress(OSError):
        token = grant.read_grant(submissions.job_dir(run_dir, ref.job_number))
    return replace(ref, job_id=grant.granted_job_id(token) or ref.job_id)


def _has_ended(run_dir: Path, site: Site, ref: run_folder.JobRef, state: str) -> bool:
    """Whether a job unknown to Slurm has ended: its script recorded that, or it has been absent for _ABSENT_FOR_S."""
    if state != UNKNOWN or not slurm_query.is_forgotten(site, ref.job_id):
        clear_absence(run_dir, ref)
        return False
    mark, now = _absence_mark(run_dir, ref), time.time()
    if not mark.exists():
        mark.touch(0o644)
        os.utime(mark, (now, now))  # not the file server's time
    return now - mark.stat().st_mtime >= (0.0 if _script_recorded_end(run_dir, ref) else _ABSENT_FOR_S)


def clear_absence(run_dir: Path, ref: run_folder.JobRef) -> None:
    """Forget that the job was absent: Slurm knows it."""
    _absence_mark(run_dir, ref).unlink(missing_ok=True)


def _absence_mark(run_dir: Path, ref: run_folder.JobRef) -> Path:
    return run_dir / f".missed.{ref.job_id}"


def _script_recorded_end(run_dir: Path, ref: run_folder.JobRef) -> bool:
    """Whether the job's script recorded the end of its last attempt, and starts no other in the same job."""
    attempt = _last_attempt_of(run_dir, ref)
    if attempt is None or not (attempt / "exit.json").exists():
        return False
    decision = run_folder.read_or_none(attempt / "decision.json", Decision)
    return decision is None or decision.action != "retry"


def _last_attempt_of(run_dir: Path, ref: run_folder.JobRef) -> Path | None:
    """Return the run's newest attempt if it belongs to this job, else None."""
    attempt = run_folder.last_attempt(run_dir)
    start = run_folder.read_record(attempt / "start.json", AttemptStart) if attempt else None
    return attempt if start is None or start.job_id in ("", ref.job_id) or start.job_number >= ref.job_number else None


def _untouched(run_dir: Path, state: str) -> ResumeResult:
    reason = "Slurm does not know its job" if state == UNKNOWN else f"its job is {state.lower()}"
    return _result(run_dir, "untouched", reason)


def _still_ending_error(run_dir: Path, ref: run_folder.JobRef, state: str) -> TryLater:
    """Return the error that a run cannot be continued yet, because its last job has not ended."""
    problem = f"job {ref.job_id} of the run has not ended yet (state {state})"
    hint = f"let it save, or: scancel {ref.job_id}; then run the same command again"
    return TryLater(problem, where=str(run_dir), hint=hint)


def bypass_delayed_job(run_dir: Path, site: Site, ref: run_folder.JobRef, accounting: AccountingRow) -> ResumeResult:
    """Submit a fresh job in place of one that Slurm delays after a node's failure, and cancel the delayed one."""
    try:
        # Without retries: until the fresh job is submitted, the delayed one has no grant, and Slurm may start it.
        result = recover(run_dir, site, ref, accounting, accounting.state, force=False, retry_for_s=0.0)
    except PitError as error:
        if max(submissions.job_numbers(run_dir), default=0) > ref.job_number:
            raise
        apply_decision.restore_grant(run_dir, ref)  # refused, perhaps by a limit: the delayed job continues the run
        if not isinstance(error, ClusterError):
            raise
        requeue_delay.mark_not_delayed(run_dir, ref)
        return _result(run_dir, "untouched", f"Slurm delays its job, and accepts no other: {error.message}")
    if result.action == "resubmit":  # if Slurm starts it first, it ends for lack of a grant
        with contextlib.suppress(PitError):
            slurm_query.cancel_job(site, ref.job_id)
    return result


def recover(
    run_dir: Path,
    site: Site,
    ref: run_folder.JobRef,
    accounting: AccountingRow | None,
    state: str,
    force: bool,
    retry_for_s: float = next_job.RETRY_FOR_S,
    may_submit: bool = True,
) -> ResumeResult:
    """Diagnose an ended job, decide what follows and apply it. The caller holds the run's lock.

    may_submit: False applies only a decision to end the run.
    """
    attempt = _last_attempt_of(run_dir, ref)
    if site.scheduler == "none" and attempt and (pids := slurm_query.orphan_pids(attempt)):
        problem = f"the run's supervisor has ended, but its ranks still run: {', '.join(map(str, pids))}"
        raise ClusterError(problem, where=str(run_dir), hint=f"end them first: kill {' '.join(map(str, pids))}")
    plan = load_plan(run_dir)
    if attempt is not None:
        if accounting and accounting.state == "NODE_FAIL":
            slurm_query.record_lost_nodes(site, attempt)
        cause = diagnose.diagnose_attempt(run_dir, attempt, accounting=accounting)
    else:
        cause = unstarted_jobs.diagnose_unstarted(run_dir, ref, accounting, state, python=plan.python)
        run_folder.write_record(unstarted_jobs.cause_path(run_dir, ref), cause)
    history = apply_decision.cause_history(
        run_dir, before_attempt=cause.attempt, before_job=ref.job_number if attempt is None else None
    )
    is_ticket = run_folder.is_ticket(run_dir)
    decision = policy.decide(plan, site, cause, history, is_ticket=is_ticket)
    if accounting is None and policy.needs_slurm_state(cause) and not is_ticket:
        # Without accounting it may have been cancelled by a user: then it must not continue.
        decision = replace(decision, action="stop", reason=f"{cause.reason}; to continue: pit launch resume --force")
    if force and decision.action != "resubmit":
        decision = replace(decision, action="resubmit", reason=f"forced; {decision.reason}")
    if decision.action == "resubmit" and site.scheduler == "slurm" and not (run_dir / "jobs").is_dir():
        # submitit finds a callable's pickle by the id of the job that it was submitted with.
        decision = replace(decision, action="stop", reason=f"{cause.reason}; only its submitter can submit it again")
    if decision.action == "defer":
        return _result(run_dir, "untouched", decision.reason, attempt=cause.attempt, cause=decision.kind)
    if not may_submit and decision.action not in ("done", "stop"):
        return _result(run_dir, "untouched", "its job has ended, and another one is to continue it")
    decision = apply_decision.apply_decision(
        run_dir, plan, site, cause, decision, in_job=False, job=ref, retry_for_s=retry_for_s
    )
    return _result(
        run_dir, decision.action, decision.reason, attempt=cause.attempt, cause=decision.kind, exclude=decision.exclude
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
