"""Cancel a run: asked for on disk first, then its jobs are ended, and only then it is the run's verdict.

<run>/cancel.json       pit.cancel/1: asked for, and not carried out; nobody continues the run from then on

Slurm silent or without its configuration, or a supervisor on this machine that still ends its ranks: it stays asked
for, and whoever looks after the run (`tick`, `watch`, `--wait`, `cancel` again, the job itself at its next end) carries
it out. Slurm denies it: the run goes on, and where nobody was there to be told so, the file says why.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from pitools.core import subprocesses, timestamps
from pitools.core.errors import ClusterError, ConfigError, PitError, ToolMissing, TryLater
from pitools.core.locks import is_owned_by_user, lock, owner
from pitools.launch import slurm_cache
from pitools.launch.diagnosis import evidence
from pitools.launch.recovery import apply_decision, slurm_query
from pitools.launch.submission import exactly_once, local_process, submissions
from pitools.run import cancel_request, move_record, run_folder
from pitools.run.attempt_records import Verdict
from pitools.site.connect import client
from pitools.site.schema import Site
from pitools.slurm import errors

_LOCK_WAIT_S = 20.0
_END_TIMEOUT_S = 5.0  # what most programs need for their end; for others `cancel` does not wait


def cancel_run(run_dir: Path, site: Site) -> Verdict | None:
    """End a run for good, and every job of it; safe to repeat.

    Returns the verdict that it had before: of a run that has ended by itself nothing is cancelled. Where ranks on this
    machine take longer for their end than some seconds, it stays asked for until they are gone. Raises ConfigError
    when there is no job; TryLater or ToolMissing where Slurm gives no answer, and the cancel stays asked for;
    ClusterError where it is refused, and the run goes on.
    """
    given = apply_decision.read_verdict(run_dir)
    if given and given.kind != "cancelled":  # who cancelled it may not have lived to end its jobs
        return given
    if submissions.latest_job(run_dir) is None and not submissions.submission_numbers(run_dir):
        # It may have lost its word of them: Slurm calls them by the run's name.
        hint = f"scancel --name={run_dir.name}" if site.scheduler == "slurm" else "its folder can go"
        raise ConfigError("the run has no job", where=str(run_dir), hint=hint)
    moving = given if given and given.code == "moving" else None
    if given and not moving:
        _end_jobs(run_dir, site, is_over=True)
        return given
    if not moving and _last_attempt_succeeded(run_dir):
        _end_jobs(run_dir, site)
        return None
    _request_cancel(run_dir, moving)
    try:
        execute_cancel(run_dir, site, wait_s=_END_TIMEOUT_S)
    except (TryLater, ToolMissing) as error:
        hint = f"it stays asked for: `pit launch tick --site {site.name}` tries again, and so does this command"
        raise error.with_hint(hint) from error
    except PitError:
        _withdraw_request(run_dir, moving)
        raise
    return None


def execute_cancel(run_dir: Path, site: Site, *, wait_s: float = 0.0) -> Verdict | None:
    """End the jobs of a run whose cancel was asked for, and write its verdict; None while ranks on this machine end.

    wait_s: how long to wait for them. Raises as `cancel`.
    """
    try:
        _end_jobs(run_dir, site)
    except ClusterError as error:
        if errors.is_denied(error):  # it would be again, and is not asked for any more
            run_folder.write_record(
                run_dir / cancel_request.CANCEL_FILE,
                cancel_request.CancelRequest(t=timestamps.now_rfc3339(), refused_by_slurm=error.message),
            )
            run_folder.append_event(run_dir, "cancel refused", reason=error.message)
            raise error.with_hint("the run goes on") from error
        raise
    if site.scheduler == "none" and not _all_ended(run_dir, wait_s):
        return None
    if _last_attempt_succeeded(run_dir) and _ended_without_signal(run_dir):
        return apply_decision.write_verdict(run_dir, "finished", "it finished before its cancel was carried out", 0)
    return apply_decision.write_verdict(run_dir, "cancelled")


def _request_cancel(run_dir: Path, moving: Verdict | None) -> None:
    """Write down that the run is to be cancelled; one that is being moved is so no longer."""
    run_folder.write_record(
        run_dir / cancel_request.CANCEL_FILE, cancel_request.CancelRequest(t=timestamps.now_rfc3339()), durable=True
    )
    if moving:
        with lock(run_dir / apply_decision.RUN_LOCK, f"run {run_dir.name}", wait_s=_LOCK_WAIT_S):
            if apply_decision.read_verdict(run_dir) == moving:
                (run_dir / "verdict.json").unlink(missing_ok=True)


def _withdraw_request(run_dir: Path, moving: Verdict | None) -> None:
    """Let a run go on whose cancel was refused."""
    (run_dir / cancel_request.CANCEL_FILE).unlink(missing_ok=True)
    if moving and (run_dir / move_record.FILE).exists():
        apply_decision.write_verdict(run_dir, moving.kind, moving.reason, moved_to=moving.moved_to)


def _last_attempt_succeeded(run_dir: Path) -> bool:
    """Whether the run's last attempt ended well, though nobody has given its verdict yet."""
    ended = run_folder.last_exit(run_dir)
    return ended is not None and ended.exit_code == 0 and ended.state in ("", "COMPLETED")


def _ended_without_signal(run_dir: Path) -> bool:
    """Whether nobody told the last attempt to end, which a program may call a success; never of an array's tasks."""
    last = run_folder.last_attempt(run_dir)
    return last is not None and last.name.isdecimal() and not evidence.was_signalled(last)


def _end_jobs(run_dir: Path, site: Site, *, is_over: bool = False) -> None:
    """End every job of the run. Raises what ending them raises.

    is_over: it has its verdict, perhaps for long, and since then its ids may have become other jobs'.
    """
    job = submissions.latest_job(run_dir)
    if site.scheduler == "none":
        try:
            if job and local_process.is_alive(job):
                _require_owner(run_dir, job.pid)
            if job:
                local_process.terminate_supervisor(job)
        except PermissionError as error:
            what = f"process {job.pid if job else 0} of the run is another user's"
            raise ClusterError(what, where=str(run_dir), hint="only they, or root, can cancel it") from error
    else:
        if job:
            submissions.require_same_cluster(site, job)
        made = [_find_job(run_dir, site, number) for number in submissions.submission_numbers(run_dir)]
        known = {one.job_id: submissions.slurm_job_name(run_dir, one.number) for one in (*made, job) if one}
        user = "" if is_owned_by_user(run_dir) else _require_owners_jobs(run_dir, site, known)
        if is_over and made:
            for job_id, name in known.items():
                client(site).cancel([job_id], name=name, user=user)
        elif known:
            _scancel(run_dir, site, list(known), user)
        with contextlib.suppress(PitError):  # what is kept grows old by itself
            slurm_cache.invalidate(site)
    run_folder.append_event(run_dir, "cancel", job_id=job.job_id if job else "")


def _scancel(run_dir: Path, site: Site, ids: list[str], user: str) -> None:
    """End jobs. Raises TryLater for whatever is no refusal, such as a configuration that cannot be had just now."""
    try:
        client(site).cancel(ids, user=user)
    except ClusterError as error:
        if isinstance(error, ToolMissing) or errors.is_denied(error):
            raise
        hint = f"to take the cancel back: pit launch resume {run_dir.name} --force"
        raise TryLater(
            error.message, where=error.where, hint=f"{error.hint}; {hint}" if error.hint else hint
        ) from error


def _all_ended(run_dir: Path, wait_s: float) -> bool:
    """Whether the run's supervisor has ended, which outlives its ranks, and what one that was killed left has, too."""
    deadline = time.monotonic() + wait_s
    while local_process.is_supervised(run_dir) or (
        (job := submissions.latest_job(run_dir)) and local_process.is_alive(job)
    ):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.05)
    if attempt := run_folder.last_attempt(run_dir):
        _kill_orphans(attempt)
    return True


def _kill_orphans(attempt: Path) -> None:
    """End the ranks of a supervisor that was killed as it would have: SIGTERM, and SIGKILL after its grace."""
    left = slurm_query.orphan_pids(attempt)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + local_process.KILL_GRACE_S
    while left and slurm_query.orphan_pids(attempt) and time.monotonic() < deadline:
        time.sleep(0.1)
    subprocesses.kill_sessions(*left)


def _require_owner(run_dir: Path, pid: int) -> None:
    """Raise ClusterError for a process that is not the run's owner's: root would end whatever a record names."""
    with contextlib.suppress(FileNotFoundError):  # it ended just now
        if Path(f"/proc/{pid}").stat().st_uid != run_dir.stat().st_uid:
            what = f"process {pid}, which its record names, is not of the run's owner"
            raise ClusterError(what, where=str(run_dir), hint=f"look whose it is: ps -o user,args {pid}")


def _require_owners_jobs(run_dir: Path, site: Site, known: Mapping[str, str]) -> str:
    """The same for jobs, id → name: an operator of Slurm may end anybody's. Returns what Slurm calls the owner, where
    that is a name. Where a site's host is `user@host` everybody's jobs there are that user's.

    Asked for is the job that an id begins with: squeue passes over tasks, `5_[1-3]`, that scancel ends.
    """
    whose = site.connection.host.rpartition("@")[0] or owner(run_dir)
    numbers = list(dict.fromkeys(re.split(r"\D", job_id)[0] for job_id in known))
    found = client(site).jobs(numbers, all_states=True) if numbers else []
    for job in found:
        if job.user != whose:
            what = f"job {job.job_id}, which its record names, is {job.user}'s (expected {whose}'s, as the run)"
            hint = f"scancel --user={whose} --name={','.join(known.values())}"
            raise ClusterError(what, where=str(run_dir), hint=hint)
    return whose if found and not whose.isdecimal() else ""


def _find_job(run_dir: Path, site: Site, number: int) -> run_folder.JobRef | None:
    """The run's k-th job, looked for where its sender never heard of it. One that begins later finds the cancel.

    Another user's is not looked for: what their folder says of it would have us end jobs of our own.
    """
    look = submissions.is_unresolved(run_dir, number) and is_owned_by_user(run_dir)
    return exactly_once.find_submitted(run_dir, site, number) if look else submissions.read_job(run_dir, number)
