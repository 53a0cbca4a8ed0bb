"""Detect a job that Slurm requeued after a node's failure and starts only after a delay: the run need not wait for it.

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


def is_possibly_delayed(run_dir: Path, ref: run_folder.JobRef, site: Site) -> bool:
    """Whether a pending job has run before and is not known to wait for resources. Does not query Slurm."""
    start = _start_by_job(run_dir, ref)
    return start is not None and site.recovery.chain == "fresh" and not _mark_path(run_dir, ref, start).exists()


def delayed_job_accounting(run_dir: Path, ref: run_folder.JobRef, site: Site) -> AccountingRow | None:
    """Return the accounting of the job's last start if a node failed and Slurm delays the next; else None.

    Raises what querying Slurm raises.
    """
    start = _start_by_job(run_dir, ref)
    if start is None or not is_possibly_delayed(run_dir, ref, site):
        return None
    jobs = [row for row in client(site).job(ref.job_id) if ref.job_id in (row.job_id, row.raw_id)]
    if not jobs or jobs[0].state != "PENDING" or (jobs[0].restarts or 0) <= start.restart_count:
        return None
    reason = pending_reason(jobs[0].reason)
    if reason is not PendingReason.BEGIN_TIME:
        if reason is not PendingReason.NONE:  # it waits for resources: keep its place in the queue
            mark_not_delayed(run_dir, ref)
        return None
    # Slurm keeps whole seconds. An end before that start is of an earlier one: the database lags behind.
    rows = [
        row
        for row in client(site).accounting([ref.job_id])
        if ref.job_id in (row.job_id, row.raw_id) and row.end[:19] >= start.started[:19]
    ]
    if rows and rows[-1].state == "NODE_FAIL":
        return rows[-1]
    if rows:
        mark_not_delayed(run_dir, ref)
    return None


def mark_not_delayed(run_dir: Path, ref: run_folder.JobRef) -> None:
    """Mark a job as waiting for resources: it is not checked again for a delay."""
    if start := _start_by_job(run_dir, ref):
        _mark_path(run_dir, ref, start).touch(0o644)


def _start_by_job(run_dir: Path, ref: run_folder.JobRef) -> AttemptStart | None:
    """Return the start record of the run's newest attempt if it belongs to this job, else None."""
    last = run_folder.last_attempt(run_dir)
    start = run_folder.read_or_none(last / "start.json", AttemptStart) if last else None
    return start if start and start.job_id == ref.job_id else None


def _mark_path(run_dir: Path, ref: run_folder.JobRef, start: AttemptStart) -> Path:
    return run_dir / f".not-delayed.{ref.job_id}.{start.attempt}"
