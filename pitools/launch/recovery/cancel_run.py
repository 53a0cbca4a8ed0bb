"""Cancel a run: write the request, end the run's jobs, then write the verdict.

<run>/cancel.json       pit.cancel/1: a request that is not carried out yet; the run is not continued from then on

The request stays pending if Slurm is unreachable or has no configuration, or if a supervisor on this machine is still
terminating ranks. `tick`, `watch`, `--wait`, a repeated `cancel` or the job at its end then carry it out.
If Slurm denies the cancel, the run continues; a pending request records the reason.
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
from pitools.core.locks import is_owned_by_user, lock, not_owner_error, owner_name
from pitools.launch import hooks, slurm_cache
from pitools.launch.diagnosis import evidence
from pitools.launch.recovery import apply_decision, slurm_query
from pitools.launch.submission import exactly_once, local_process, submissions
from pitools.run import cancel_request, move_record, run_folder
from pitools.run.attempt_records import Verdict
from pitools.site.connect import client
from pitools.site.schema import Site
from pitools.slurm import errors

_LOCK_TIMEOUT_S = 20.0
_END_TIMEOUT_S = 5.0  # most programs end within this time; `cancel` waits no longer


def cancel_run(run_dir: Path, site: Site) -> Verdict | None:
    """Cancel a run and all of its jobs. Safe to repeat.

    Returns the verdict that the run had before, if any: an ended run is not cancelled. If ranks on this machine take
    longer than _END_TIMEOUT_S to end, the request stays pending until they have ended. Raises ConfigError if the run
    has attempts, but no known job; TryLater or ToolMissing if Slurm does not respond (the request stays pending);
    ClusterError if the cancel is refused (the run continues).
    """
    verdict = apply_decision.read_verdict(run_dir)
    # An earlier cancel, or move, may have been killed before it ended the jobs.
    if verdict and verdict.kind not in ("cancelled", "moved"):
        return verdict
    if submissions.latest_job(run_dir) is None and not submissions.job_numbers(run_dir):
        if verdict is None:  # so that `tick` does not submit it
            apply_decision.write_verdict(run_dir, "cancelled")
        if verdict is None and not run_folder.attempt_dirs(run_dir):
            return None
        # Its records of jobs may be lost; Slurm names its first job after the run.
        hint = f"scancel --name={run_dir.name}" if site.scheduler == "slurm" else "its folder can go"
        raise ConfigError("the run has no job", where=str(run_dir), hint=hint)
    moving = verdict if verdict and verdict.code == "moving" else None
    if verdict and not moving:
        _end_jobs(run_dir, site, is_over=True)
        return verdict
    if not moving and _last_attempt_succeeded(run_dir):
        _end_jobs(run_dir, site)
        return None
    _request_cancel(run_dir, moving)
    try:
        execute_cancel(run_dir, site, wait_s=_END_TIMEOUT_S)
    except (TryLater, ToolMissing) as error:
        hint = f"the request stays pending: `pit launch tick --site {site.name}` or this command tries again"
        raise error.with_hint(hint) from error
    except PitError:
        _withdraw_request(run_dir, moving)
        raise
    hooks.deliver(run_dir)
    return None


def execute_cancel(run_dir: Path, site: Site, *, wait_s: float = 0.0) -> Verdict | None:
    """Carry out a pending cancel: end the run's jobs and return its verdict; None while local ranks are ending.

    wait_s: how long to wait for local ranks. Raises the errors of `cancel_run`.
    """
    try:
        _end_jobs(run_dir, site)
    except ClusterError as error:
        if errors.is_denied(error):  # it would be denied again: the request is no longer pending
            run_folder.write_record(
                run_dir / cancel_request.CANCEL_FILE,
                cancel_request.CancelRequest(t=timestamps.now_rfc3339(), refused_by_slurm=error.message),
            )
            run_folder.append_event(run_dir, "cancel-refused", reason=error.message)
            raise error.with_hint("the run continues") from error
        raise
    if site.scheduler == "none" and not _all_ended(run_dir, wait_s):
        return None
    if _last_attempt_succeeded(run_dir) and _ended_without_signal(run_dir):
        return apply_decision.write_verdict(run_dir, "succeeded", "finished before its cancel was carried out", 0)
    return apply_decision.write_verdict(run_dir, "cancelled")


def _request_cancel(run_dir: Path, moving: Verdict | None) -> None:
    """Write the cancel request, and withdraw the verdict of a run that is being moved."""
    try:
        run_folder.write_record(
            run_dir / cancel_request.CANCEL_FILE, cancel_request.CancelRequest(t=timestamps.now_rfc3339()), durable=True
        )
    except ClusterError as error:
        if is_owned_by_user(run_dir):
            raise
        raise not_owner_error(run_dir, f"run {run_dir.name}") from error
    if moving:
        with lock(run_dir / apply_decision.RUN_LOCK, f"run {run_dir.name}", timeout_s=_LOCK_TIMEOUT_S):
            if apply_decision.read_verdict(run_dir) == moving:
                (run_dir / "verdict.json").unlink(missing_ok=True)


def _withdraw_request(run_dir: Path, moving: Verdict | None) -> None:
    """Delete the cancel request after a refusal, and restore the verdict of a run that is being moved."""
    (run_dir / cancel_request.CANCEL_FILE).unlink(missing_ok=True)
    if moving and (run_dir / move_record.MOVE_FILE).exists():
        apply_decision.write_verdict(run_dir, moving.kind, moving.reason, moved_to=moving.moved_to)


def _last_attempt_succeeded(run_dir: Path) -> bool:
    """Whether the run's last attempt succeeded, also before a verdict is written."""
    ended = run_folder.last_exit(run_dir)
    return ended is not None and ended.exit_code == 0 and ended.state in ("", "COMPLETED")


def _ended_without_signal(run_dir: Path) -> bool:
    """Whether the last attempt received no termination signal, after which 0 may mean stopped; False for arrays."""
    last = run_folder.last_attempt(run_dir)
    return last is not None and last.name.isdecimal() and not evidence.was_signalled(last)


def _end_jobs(run_dir: Path, site: Site, *, is_over: bool = False) -> None:
    """End every job of the run. Raises what ending them raises.

    is_over: the run has its verdict, perhaps an old one; Slurm may have given its job ids to other jobs since.
    """
    job = submissions.latest_job(run_dir)
    if site.scheduler == "none":
        try:
            if job and local_process.is_alive(job):
                _require_owner(run_dir, job.pid)
            if job:
                local_process.terminate_supervisor(job)
        except PermissionError as error:
            problem = f"process {job.pid if job else 0} of the run belongs to another user"
            raise ClusterError(problem, where=str(run_dir), hint="only its owner or root can cancel it") from error
    else:
        if job:
            submissions.require_same_cluster(site, job)
        refs = [_find_job(run_dir, site, number) for number in submissions.job_numbers(run_dir)]
        names = {ref.job_id: submissions.submitted_name(run_dir, ref.job_number) for ref in (*refs, job) if ref}
        user = "" if is_owned_by_user(run_dir) else _require_owners_jobs(run_dir, site, names)
        if is_over and refs:
            for job_id, name in names.items():
                client(site).cancel([job_id], name=name, user=user)
        elif names:
            _scancel(run_dir, site, list(names), user)
        with contextlib.suppress(PitError):  # cached states expire in any case
            slurm_cache.invalidate(site)
    run_folder.append_event(run_dir, "cancel", job_id=job.job_id if job else "")


def _scancel(run_dir: Path, site: Site, ids: list[str], user: str) -> None:
    """End jobs. Raises TryLater for errors other than a refusal, such as an unavailable configuration."""
    try:
        client(site).cancel(ids, user=user)
    except ClusterError as error:
        if isinstance(error, ToolMissing) or errors.is_denied(error):
            raise
        hint = f"to withdraw the cancel: pit launch resume {run_dir.name} --force"
        raise TryLater(
            error.message, where=error.where, hint=f"{error.hint}; {hint}" if error.hint else hint
        ) from error


def _all_ended(run_dir: Path, wait_s: float) -> bool:
    """Whether the run's supervisor, which outlives its ranks, has ended; then end the ranks of a killed one."""
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
    """End the ranks that a killed supervisor left: SIGTERM, then SIGKILL after its grace."""
    pids = slurm_query.orphan_pids(attempt)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + local_process.KILL_GRACE_S
    while pids and slurm_query.orphan_pids(attempt) and time.monotonic() < deadline:
        time.sleep(0.1)
    subprocesses.kill_sessions(*pids)


def _require_owner(run_dir: Path, pid: int) -> None:
    """Raise ClusterError for a process that does not belong to the run's owner; root could end any process."""
    with contextlib.suppress(FileNotFoundError):  # it has just ended
        if Path(f"/proc/{pid}").stat().st_uid != run_dir.stat().st_uid:
            problem = f"process {pid} of the run's record does not belong to the run's owner"
            raise ClusterError(problem, where=str(run_dir), hint=f"show its owner: ps -o user,args {pid}")


def _require_owners_jobs(run_dir: Path, site: Site, names: Mapping[str, str]) -> str:
    """Return the Slurm user of the run's jobs, "" if unknown. Raises ClusterError for a job of another user.

    names: job id → name. An operator of Slurm could end any job. At a site whose host is `user@host`, all jobs are that
    user's. The query uses the number at the beginning of an id: squeue skips tasks such as `5_[1-3]`.
    """
    slurm_user = site.connection.host.rpartition("@")[0] or owner_name(run_dir)
    numbers = list(dict.fromkeys(re.split(r"\D", job_id)[0] for job_id in names))
    jobs = client(site).jobs(numbers, all_states=True) if numbers else []
    for job in jobs:
        if job.user != slurm_user:
            problem = f"job {job.job_id} of the run's record: wrong user (expected {slurm_user}, got {job.user})"
            hint = f"scancel --user={slurm_user} --name={','.join(names.values())}"
            raise ClusterError(problem, where=str(run_dir), hint=hint)
    return slurm_user if jobs and not slurm_user.isdecimal() else ""


def _find_job(run_dir: Path, site: Site, number: int) -> run_folder.JobRef | None:
    """Return a job of the run; after an unanswered sbatch search for it by name. A later start reads the request.

    In another user's folder it is not searched for: their records could make this user end jobs of their own.
    """
    must_search = submissions.is_unresolved(run_dir, number) and is_owned_by_user(run_dir)
    return exactly_once.find_submitted(run_dir, site, number) if must_search else submissions.read_job(run_dir, number)
