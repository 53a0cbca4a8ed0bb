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
from pitools.core.locks import held, is_own, others
from pitools.core.record import Record
from pitools.launch.diagnosis import diagnose, unstarted_jobs
from pitools.launch.plan import load_plan
from pitools.launch.provenance import provenance
from pitools.launch.recovery import apply_decision, cancel_run, policy, requeue_hold, slurm_query
from pitools.launch.recovery.apply_decision import settle
from pitools.launch.submission import grant, local_process, next_job, submissions
from pitools.run import cancel_request, move_record, run_folder
from pitools.run.attempt_records import Decision, Start
from pitools.site.schema import Site
from pitools.slurm.records import Accounting
from pitools.slurm.states import UNKNOWN, is_finished

__all__ = ["Resumed", "resume", "settle"]

# A controller that lost its memory, or has not yet read it back, knows no jobs either.
_GONE_S = 600.0
_NEW_S = 5.0  # a person who asks for it means the present


class Resumed(Record, frozen=True, kw_only=True, tag="pit.resumed/1"):
    """What was found of a run, and done.

    action: "left" (its job waits or runs, or nobody knows), "over" (it had its verdict), "submitted" (a submission that
    was begun is finished), and those of a decision. job_id: of its newest job, now.
    """

    run_id: str
    action: Literal["left", "over", "submitted", "done", "again", "resubmit", "wait", "stop"]
    reason: str
    job_id: str = ""
    attempt: str = ""
    cause: str = ""
    exclude: tuple[str, ...] = ()


def resume(run_dir: Path, site: Site, *, force: bool = False, state: str = "") -> Resumed:
    """Continue a run if that is due. Safe to repeat, and for two at once.

    force: also one that has its verdict, whatever that is. state: Slurm's word for the newest job, where the caller has
    just asked. Raises TryLater where another process is at it, Slurm is silent, or with `force` the job that a verdict
    ended is still there; DataError for what is no run any more, ClusterError where Slurm refuses a job or the site is
    not the run's.
    """
    _check(run_dir, site)
    with held(run_dir / apply_decision.LOCK, f"run {run_dir.name}"):
        given = apply_decision.verdict(run_dir)
        if given and not force:
            return _said(run_dir, "over", f"{given.state}: {given.reason}", cause=given.kind)
        if cancel_request.read(run_dir):
            if not force:
                done = cancel_run.carry_out(run_dir, site)
                if done is None:
                    return _said(run_dir, "left", "its cancel was asked for, and its ranks still end")
                return _said(run_dir, "done" if done.state == "finished" else "stop", done.reason, cause=done.kind)
            apply_decision.reopen(run_dir)
        open_one = _open(run_dir)
        ref = submissions.newest(run_dir) if open_one is None else None
        if open_one is None and ref is None:
            return _first(run_dir, site)
        if ref:
            submissions.check_cluster(site, ref)
            ref = _the_one_that_ran(run_dir, ref)
            if not (is_finished(state) or state == "PENDING"):
                state = slurm_query.states(site, [ref], max_age_s=_NEW_S)[ref.job_id]
            if given and not is_finished(state):
                # Calls for what all share may be spent, and a job that was just cancelled be called RUNNING.
                state = slurm_query.now(site, ref.job_id) or state
            if not is_finished(state) and not _has_ended(run_dir, site, ref, state):
                told = requeue_hold.told(run_dir, ref, site) if state == "PENDING" and not given else None
                if given:
                    raise _still_ending(run_dir, ref, state)
                return _past(run_dir, site, ref, told) if told else _left(run_dir, state)
            if slurm_query.lives(site, ref.job_id) or (
                site.scheduler == "none" and local_process.is_supervised(run_dir)
            ):
                seen(run_dir, ref)
                if given:
                    raise _still_ending(run_dir, ref, state)
                return _said(run_dir, "left", "its job waits or runs again")
        if given:
            if move_record.moved(run_dir):  # from here on it is no longer away, and may be moved anew
                (run_dir / move_record.FILE).unlink()
            apply_decision.reopen(run_dir)
        if open_one is not None:
            sent = next_job.send(run_dir, load_plan(run_dir), site, number=submissions.numbers(run_dir)[-1])
            return _said(run_dir, "submitted", f"the submission begun at {open_one} is finished", job_id=sent.job_id)
        assert ref is not None
        return _go_on(run_dir, site, ref, slurm_query.told(site, ref.job_id, state), state, force)


def _check(run_dir: Path, site: Site) -> None:
    if not run_dir.is_dir():
        raise UsageError(f'no run "{run_dir}"', hint="see: pit launch list")
    if not is_own(run_dir):
        raise others(run_dir, f"run {run_dir.name}")
    run_folder.require_own(run_dir, group_above=site.paths.runs_access == "group")
    plan = load_plan(run_dir)
    provenance.require_no_copy(run_dir, plan)
    if plan.site != site.name:
        raise ConfigError(f'the run is of site "{plan.site}", not "{site.name}"', where=str(run_dir))
    missing = [name for name in ("script.sbatch", "attempts") if not (run_dir / name).exists()]
    if missing and site.scheduler == "slurm":
        if not submissions.numbers(run_dir) and not (run_dir / "job.json").exists():
            what = "the run was never submitted: whoever made it was killed before that"
            raise DataError(what, where=str(run_dir), hint="start it again: pit launch run; this folder can go")
        hint = "its checkpoints are in checkpoints/: a new run can be given them"
        raise DataError(f"a part of the run is gone: {missing[0]}", where=str(run_dir), hint=hint)


def _first(run_dir: Path, site: Site) -> Resumed:
    """Submit a run whose maker was killed before it came to that.

    Raises DataError where it left too little, TryLater where it may have come to more.
    """
    if site.scheduler == "none" and local_process.is_supervised(run_dir):
        hint = "the same command again in a minute"
        raise TryLater("a process of the run may be about to begin", where=str(run_dir), hint=hint)
    if not (site.scheduler == "slurm" and (run_dir / "jobs").is_dir()):
        raise DataError("the run has no job", where=str(run_dir), hint="start it again: pit launch run")
    sent = next_job.send(run_dir, load_plan(run_dir), site, number=0)
    return _said(run_dir, "submitted", "it had been made, and never submitted", job_id=sent.job_id)


def _open(run_dir: Path) -> str | None:
    """When the submission was begun of which no job is known; None where there is none."""
    known = submissions.numbers(run_dir)
    if not known or not submissions.is_open(run_dir, known[-1]):
        return None
    intent = run_folder.read(submissions.at(run_dir, known[-1]) / "intent.json", submissions.Intent)
    return intent.t if intent else ""


def _the_one_that_ran(run_dir: Path, ref: run_folder.JobRef) -> run_folder.JobRef:
    """Of two jobs that one doubtful submission made: the one that had leave."""
    word = ""
    with contextlib.suppress(OSError):
        word = grant.told(submissions.at(run_dir, ref.number))
    return replace(ref, job_id=grant.granted_job_id(word) or ref.job_id)


def _has_ended(run_dir: Path, site: Site, ref: run_folder.JobRef, state: str) -> bool:
    """Whether a job of which Slurm has no word any more is over: its script said so, or it was missed for long."""
    if state != UNKNOWN or not slurm_query.is_gone(site, ref.job_id):
        seen(run_dir, ref)
        return False
    mark, now = _mark(run_dir, ref), time.time()
    if not mark.exists():
        mark.touch(0o644)
        os.utime(mark, (now, now))  # not the file server's time
    return now - mark.stat().st_mtime >= (0.0 if _said_so(run_dir, ref) else _GONE_S)


def seen(run_dir: Path, ref: run_folder.JobRef) -> None:
    """Its job is known: should it be missed again, that counts from then on."""
    _mark(run_dir, ref).unlink(missing_ok=True)


def _mark(run_dir: Path, ref: run_folder.JobRef) -> Path:
    return run_dir / f".missed.{ref.job_id}"


def _said_so(run_dir: Path, ref: run_folder.JobRef) -> bool:
    """Whether the job's script wrote down its last end: between two attempts it lives on."""
    last = _last_of(run_dir, ref)
    if last is None or not (last / "exit.json").exists():
        return False
    decided = run_folder.read_or_none(last / "decision.json", Decision)
    return decided is None or decided.action != "again"


def _last_of(run_dir: Path, ref: run_folder.JobRef) -> Path | None:
    """The newest attempt, if it is this job's."""
    last = run_folder.last_attempt(run_dir)
    start = run_folder.read(last / "start.json", Start) if last else None
    return last if start is None or start.job_id in ("", ref.job_id) or start.job >= ref.number else None


def _left(run_dir: Path, state: str) -> Resumed:
    why = "Slurm has no word of its job" if state == UNKNOWN else f"its job is {state.lower()}"
    return _said(run_dir, "left", why)


def _still_ending(run_dir: Path, ref: run_folder.JobRef, state: str) -> TryLater:
    """The error that a run cannot begin again yet: the job that its verdict ended is not gone."""
    what = f"job {ref.job_id} of the run has not ended yet (state {state})"
    hint = f"give it its time to save, or: scancel {ref.job_id}; then the same command again"
    return TryLater(what, where=str(run_dir), hint=hint)


def _past(run_dir: Path, site: Site, ref: run_folder.JobRef, told: Accounting) -> Resumed:
    """Go on without waiting for a job that Slurm holds back: a fresh one has the run, and this one is withdrawn."""
    try:
        # At once or not at all: meanwhile the held one has no leave, and its time may come.
        done = _go_on(run_dir, site, ref, told, told.state, force=False, patience_s=0.0)
    except PitError as error:
        if max(submissions.numbers(run_dir), default=0) > ref.number:
            raise
        apply_decision.give_leave(run_dir, ref)  # refused, a limit perhaps: then this one goes on
        if not isinstance(error, ClusterError):
            raise
        requeue_hold.leave_it(run_dir, ref)
        return _said(run_dir, "left", f"Slurm holds its job back, and takes no other: {error.what}")
    if done.action == "resubmit":  # should it begin first, it finds that it has no leave
        with contextlib.suppress(PitError):
            slurm_query.withdraw(site, ref.job_id)
    return done


def _go_on(
    run_dir: Path,
    site: Site,
    ref: run_folder.JobRef,
    told: Accounting | None,
    state: str,
    force: bool,
    patience_s: float = next_job.PATIENCE_S,
) -> Resumed:
    last = _last_of(run_dir, ref)
    if site.scheduler == "none" and last and (alive := slurm_query.survivors(last)):
        what = f"its ranks still run, and what started them does not: {', '.join(map(str, alive))}"
        raise ClusterError(what, where=str(run_dir), hint=f"end them first: kill {' '.join(map(str, alive))}")
    plan = load_plan(run_dir)
    if last is not None:
        if told and told.state == "NODE_FAIL":
            slurm_query.which_nodes(site, last)
        cause = diagnose.judge_attempt(run_dir, last, told=told)
    else:
        cause = unstarted_jobs.judge(run_dir, ref, told, state, python=plan.python)
        run_folder.write(unstarted_jobs.path(run_dir, ref), cause)
    past = apply_decision.history(run_dir, before=cause.attempt, before_job=ref.number if last is None else None)
    decided = policy.decide(plan, site, cause, past)
    if told is None and policy.is_unsure(cause):
        # What a person has cancelled is not begun again because Slurm keeps no account of it.
        decided = replace(decided, action="stop", reason=f"{cause.reason}; to go on: pit launch resume --force")
    if force and decided.action != "resubmit":
        decided = replace(decided, action="resubmit", reason=f"asked to go on; {decided.reason}")
    if decided.action == "resubmit" and site.scheduler == "slurm" and not (run_dir / "jobs").is_dir():
        # A callable's pickle is known by the id of the job that it was submitted with.
        decided = replace(decided, action="stop", reason=f"{cause.reason}; its submitter alone can submit it again")
    decided = apply_decision.act(run_dir, plan, site, cause, decided, in_job=False, after=ref, patience_s=patience_s)
    return _said(
        run_dir, decided.action, decided.reason, attempt=cause.attempt, cause=decided.kind, exclude=decided.exclude
    )


def _said(
    run_dir: Path,
    action: str,
    reason: str,
    *,
    job_id: str = "",
    attempt: str = "",
    cause: str = "",
    exclude: tuple[str, ...] = (),
) -> Resumed:
    ref = None
    with contextlib.suppress(DataError, ClusterError):
        ref = submissions.newest(run_dir)
    return Resumed(
        run_id=run_dir.name,
        action=action,
        reason=reason,
        job_id=job_id or (ref.job_id if ref else ""),  # type: ignore[arg-type]
        attempt=attempt,
        cause=cause,
        exclude=exclude,
    )
