"""Detect a job that Slurm requeued after a node's failure and holds in the queue, so that the run need not wait.

Slurm starts a requeued job only after its credentials have expired, by default after two minutes, and may start it on
the same node if that node responds again.
"""

from __future__ import annotations

from pathlib import Path

from pitools.run import run_folder
from pitools.run.attempt_records import AttemptStart
from pitools.site.connect import client
from pitools.site.schema import Site
from pitools.slurm.records import AccountingRow
from pitools.slurm.states import PendingReason, pending_reason


def may_be_held(run_dir: Path, ref: run_folder.JobRef, site: Site) -> bool:
    """Whether a pending job has run before and is not known to wait for resources. Does not query Slurm."""
    last = _start_by_job(run_dir, ref)
    return last is not None and site.recovery.chain == "fresh" and not _mark_path(run_dir, ref, last).exists()


def held_job_accounting(run_dir: Path, ref: run_folder.JobRef, site: Site) -> AccountingRow | None:
    """Return the accounting of the job's last start if a node failed and Slurm holds the job since; else None.

    Raises what querying Slurm raises.
    """
    last = _start_by_job(run_dir, ref)
    if last is None or not may_be_held(run_dir, ref, site):
        return None
    found = [one for one in client(site).job(ref.job_id) if one.raw_id == ref.job_id]
    if not found or found[0].state != "PENDING" or (found[0].restarts or 0) <= last.restart:
        return None
    reason = pending_reason(found[0].reason)
    if reason is not PendingReason.BEGIN_TIME:
        if reason is not PendingReason.NONE:  # it waits for resources: keep its place in the queue
            mark_waiting(run_dir, ref)
        return None
    # Slurm keeps whole seconds. An end before that start is of an earlier one: the database lags behind.
    ended = [
        one
        for one in client(site).accounting([ref.job_id])
        if one.raw_id == ref.job_id and one.end[:19] >= last.started[:19]
    ]
    if ended and ended[-1].state == "NODE_FAIL":
        return ended[-1]
    if ended:
        mark_waiting(run_dir, ref)
    return None


def mark_waiting(run_dir: Path, ref: run_folder.JobRef) -> None:
    """Mark a job as waiting for resources: it is not checked again for a hold."""
    if last := _start_by_job(run_dir, ref):
        _mark_path(run_dir, ref, last).touch(0o644)


def _start_by_job(run_dir: Path, ref: run_folder.JobRef) -> AttemptStart | None:
    """Return the start record of the run's newest attempt if it belongs to this job, else None."""
    last = run_folder.last_attempt(run_dir)
    start = run_folder.read_or_none(last / "start.json", AttemptStart) if last else None
    return start if start and start.job_id == ref.job_id else None


def _mark_path(run_dir: Path, ref: run_folder.JobRef, last: AttemptStart) -> Path:
    return run_dir / f".waits.{ref.job_id}.{last.attempt}"
