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
from pitools.core.fs import os_error, write_atomic
from pitools.core.locks import held
from pitools.launch.diagnosis import diagnose, unstarted_jobs
from pitools.launch.plan import Plan
from pitools.launch.recovery import policy, slurm_query
from pitools.launch.submission import exclusions, grant, local_process, next_job, submissions
from pitools.run import cancel_request, run_folder
from pitools.run.attempt_records import Cause, Decision, Kind, Start, Verdict, VerdictCode
from pitools.site.connect import client
from pitools.site.schema import Reach, Site

LOCK = ".lock"
# What a verdict says of what a command asked for; of a failure its cause says it.
REASONS: dict[VerdictCode, str] = {
    "cancelled": "it was cancelled by `pit launch cancel`",
    "moving": "it is being moved to {site} as {run}",
    "moved": "moved to {site} as {run}, with {steps} steps",
}
_LOCK_WAIT_S = 20.0


def settle(run_dir: Path, plan: Plan, site: Site, cause: Cause, decided: Decision) -> Decision:
    """Do what a job of the run decided about an attempt: a verdict, exclusions, or the next job. Safe to repeat.

    Returns what holds: the verdict, where somebody came first with one. "again" and "wait" are the caller's to do.
    Raises TryLater where another process is at it, and what submitting raises: `pit launch tick` does it then.
    """
    if decided.action == "wait" and policy.is_unsure(cause):
        cause, decided = _asked(run_dir, plan, site, cause, decided)
    with held(run_dir / LOCK, f"run {run_dir.name}", wait_s=_LOCK_WAIT_S):
        return act(run_dir, plan, site, cause, decided, in_job=True, after=_job_of(run_dir, cause))


def _asked(run_dir: Path, plan: Plan, site: Site, cause: Cause, decided: Decision) -> tuple[Cause, Decision]:
    """The same with Slurm's own word for what ends this job, if it can be had while there is time."""
    attempt = run_dir / "attempts" / cause.attempt
    start = run_folder.read_or_none(attempt / "start.json", Start)
    told = slurm_query.ending(as_seen_here(site), start.job_id, start.started) if start else None
    if told is None:
        return cause, decided
    cause = diagnose.judge_attempt(run_dir, attempt, told=told, in_job=True)
    past = history(run_dir, before=cause.attempt)
    # Its time is over, whatever is left of its limit.
    return cause, policy.decide(plan, site, cause, past, in_job=True, left_s=0.0)


def _job_of(run_dir: Path, cause: Cause) -> run_folder.JobRef | None:
    """The job that made an attempt."""
    start = run_folder.read_or_none(run_dir / "attempts" / cause.attempt / "start.json", Start)
    return submissions.known(run_dir, start.job) if start else None


def act(
    run_dir: Path,
    plan: Plan,
    site: Site,
    cause: Cause,
    decided: Decision,
    *,
    in_job: bool,
    after: run_folder.JobRef | None,
    patience_s: float = next_job.PATIENCE_S,
) -> Decision:
    """The same for a caller that has the run's lock.

    in_job: on a node, so that Slurm is called from there. after: the job that this is about, to be followed.
    patience_s: with a Slurm that is busy.
    Raises TryLater where that has begun another attempt meanwhile.
    """
    if given := verdict(run_dir):
        action: policy.Action = "done" if given.state == "finished" else "stop"
        return replace(decided, action=action, kind=given.kind, reason=given.reason)
    if decided.action != "done" and cancel_request.read(run_dir):
        decided = replace(decided, action="stop", kind="cancelled", reason=REASONS["cancelled"], exclude=())
    newest = max(submissions.numbers(run_dir), default=0)
    if in_job and after and newest > after.number and decided.action != "done":
        return replace(decided, action="wait", reason=f"job {newest} of the run goes on with it")
    _write_down(run_dir, site, cause, decided)
    if decided.action in ("done", "stop"):
        conclude(run_dir, decided.kind, decided.reason, cause.exit_code)
    elif decided.action == "resubmit":
        if in_job:  # a job that dies has little time; what it begins and cannot end, `tick` does
            site, patience_s = as_seen_here(site), min(patience_s, site.recover.grace_s / 2)
        _next_job(run_dir, plan, site, in_job, cause, decided, after, patience_s)
    return decided


def _write_down(run_dir: Path, site: Site, cause: Cause, decided: Decision) -> None:
    if cause.attempt:
        run_folder.write(run_dir / "attempts" / cause.attempt / "decision.json", decided)
    with contextlib.suppress(PitError):  # a list that cannot be kept is no reason to stop
        exclusions.add(run_dir.parent, site, decided.exclude, cause, run_dir.name)
    run_folder.note(
        run_dir,
        "decided",
        attempt=cause.attempt,
        kind=decided.kind,
        action=decided.action,
        reason=decided.reason,
        exclude=list(decided.exclude),
    )


def _next_job(
    run_dir: Path,
    plan: Plan,
    site: Site,
    in_job: bool,
    cause: Cause,
    decided: Decision,
    old: run_folder.JobRef | None,
    patience_s: float,
) -> None:
    if site.scheduler == "none":
        job = local_process.start(run_dir, site)
        run_folder.write(run_dir / "job.json", job)
        run_folder.note(run_dir, "submitted", job_id=job.job_id)
        return
    # Only while it runs: what has ended may be forgotten, and a state that was final once is believed for good.
    if in_job and site.recover.chain == "requeue" and old and not decided.exclude and _requeued(site, old.job_id):
        run_folder.note(run_dir, "requeued", job_id=old.job_id)
        return
    if old and not in_job:
        _take_leave(run_dir, old, cause)
    # By its number: whoever comes to the same decision elsewhere, where no lock keeps us apart, sends the same job.
    number = old.number + 1 if old else None
    sent = next_job.send(run_dir, plan, site, number=number, wait_s=decided.wait_s, patience_s=patience_s)
    if verdict(run_dir) or cancel_request.read(run_dir):  # in between: who did that may not have seen the job
        with contextlib.suppress(PitError):
            client(site).cancel([sent.job_id])
    if old and in_job:
        _no_leave(submissions.at(run_dir, old.number))
    if in_job and old and cause.kind == "preempted":
        # Slurm has put this very job back in the queue as well, for when the new one had not been taken.
        with contextlib.suppress(PitError):
            client(site).cancel([old.job_id])


def _take_leave(run_dir: Path, old: run_folder.JobRef, cause: Cause) -> None:
    """Keep a job that is over from beginning again. Raises TryLater where it has: see job/begin_attempt.py."""
    at = submissions.at(run_dir, old.number)
    _no_leave(at)
    later = [path for path in run_folder.attempts(run_dir) if is_after(path, cause, old)]
    if later:
        _no_leave(at, grant.word(old.job_id))
        what = f"job {old.job_id} has begun attempt {later[-1].name} meanwhile"
        raise TryLater(what, where=str(run_dir), hint="see: pit launch show")


def is_after(attempt: Path, cause: Cause, job: run_folder.JobRef) -> bool:
    """Whether a job has made this attempt since the one that a cause is of."""
    start = run_folder.read_or_none(attempt / "start.json", Start)
    if start is None or start.job != job.number:
        return False
    return not cause.attempt or (attempt.name.isdecimal() and int(attempt.name) > int(cause.attempt))


def give_leave(run_dir: Path, old: run_folder.JobRef) -> None:
    """Let a job begin again of which leave was taken, where none came to follow it."""
    _no_leave(submissions.at(run_dir, old.number), grant.word(old.job_id))


def _no_leave(at: Path, word: str = grant.NO) -> None:
    """From now on the job that this was the leave of does not begin again, should Slurm have put it back as well."""
    building = at / f".leave.{secrets.token_hex(4)}"
    with contextlib.suppress(OSError):
        building.symlink_to(word)
        os.replace(building, at / grant.LINK)


def _requeued(site: Site, job_id: str) -> bool:
    try:
        client(site).requeue([job_id])
    except PitError:  # --no-requeue, or forgotten: a fresh job then
        return False
    return True


def as_seen_here(site: Site) -> Site:
    """The site for a process on one of its own nodes, which calls Slurm without ssh."""
    return replace(site, reach=Reach(timeout_s=site.reach.timeout_s))


def conclude(run_dir: Path, kind: Kind, reason: str = "", exit_code: int | None = None, moved_to: str = "") -> Verdict:
    """Write the run's verdict, unless it has one; returns the one that holds. Raises what writing raises.

    reason: "" for a cancel, whose is in REASONS. moved_to: the run at another site that it is to go on as.
    """
    ended: VerdictCode = kind if kind in ("finished", "cancelled") else "failed"
    code: VerdictCode = "moving" if moved_to else ended
    made = Verdict(
        state="finished" if code == "finished" else "stopped",
        code=code,
        kind=kind,
        t=timestamps.now(),
        reason=reason or REASONS.get(code, ""),
        attempts=len(run_folder.attempts(run_dir)),
        jobs=_jobs(run_dir),
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
        return verdict(run_dir) or made
    except OSError as error:
        raise os_error(error, path) from error
    finally:
        building.unlink(missing_ok=True)
    _drop_cancel(run_dir)
    run_folder.note(run_dir, made.state, kind=kind, reason=made.reason)
    return made


def _jobs(run_dir: Path) -> int:
    """How many jobs, or supervisors, a run has had."""
    with contextlib.suppress(DataError):
        return len(submissions.numbers(run_dir)) or submissions.due(run_dir)
    return 0


def _drop_cancel(run_dir: Path) -> None:
    with contextlib.suppress(OSError):  # beside a verdict it says nothing
        (run_dir / cancel_request.FILE).unlink()


def verdict(run_dir: Path) -> Verdict | None:
    """The run's verdict; None while it is to go on. Raises DataError for a file that is none."""
    return run_folder.read(run_dir / "verdict.json", Verdict)


def reopen(run_dir: Path) -> Verdict | None:
    """Take back a verdict, with what was spent until then, or a cancel; returns the verdict.

    The caller has the run's lock.
    """
    _drop_cancel(run_dir)
    given = verdict(run_dir)
    if given:
        kept = run_dir / "verdicts"
        kept.mkdir(mode=0o755, exist_ok=True)
        os.rename(run_dir / "verdict.json", kept / f"{len(list(kept.iterdir()))}.json")
        run_folder.note(run_dir, "reopened", was=given.reason)
    return given


def history(run_dir: Path, *, before: str = "", before_job: int | None = None) -> list[Cause]:
    """The causes of a run's attempts and of its jobs without one, oldest first, since it was last reopened.

    before: leave out this attempt and what came after it. before_job: leave out this job, which began none.
    """
    found: list[tuple[int, int, Cause]] = []
    begun: set[int] = set()
    taken_back = [
        one for path in (run_dir / "verdicts").glob("*.json") if (one := run_folder.read_or_none(path, Verdict))
    ]
    since = max((one.attempts for one in taken_back), default=0)
    since_job = max((one.jobs for one in taken_back), default=0)
    for at, path in enumerate(run_folder.attempts(run_dir)):
        if path.name == before:
            break
        start = run_folder.read_or_none(path / "start.json", Start)
        job = start.job if start else 0
        begun.add(job)
        cause = run_folder.read_or_none(path / "cause.json", Cause)
        if cause and at >= since:
            found.append((job, at, cause))
    for number, cause in unstarted_jobs.causes(run_dir):
        if number >= since_job and number not in begun and number != before_job:
            found.append((number, -1, cause))
    return [cause for _, _, cause in sorted(found, key=lambda one: one[:2])]
