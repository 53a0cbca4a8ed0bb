"""A job that Slurm put back in the queue after a node's failure, and holds there: the run need not wait for it.

Slurm starts a job that it has requeued no sooner than its credentials expire, which by default is two minutes later;
and where the node answers again by then, it starts it there.
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
    """Whether a job that waits has run before, and was not yet seen waiting for its turn. Asks nobody."""
    last = _start_by_job(run_dir, ref)
    return last is not None and site.recovery.chain == "fresh" and not _mark_path(run_dir, ref, last).exists()


def held_job_accounting(run_dir: Path, ref: run_folder.JobRef, site: Site) -> AccountingRow | None:
    """How the job's last start ended, where a node had failed and Slurm holds the job back since; else None.

    Raises what asking Slurm raises.
    """
    last = _start_by_job(run_dir, ref)
    if last is None or not may_be_held(run_dir, ref, site):
        return None
    found = [one for one in client(site).job(ref.job_id) if one.raw_id == ref.job_id]
    if not found or found[0].state != "PENDING" or (found[0].restarts or 0) <= last.restart:
        return None
    reason = pending_reason(found[0].reason)
    if reason is not PendingReason.BEGIN_TIME:
        if reason is not PendingReason.NONE:  # it has its place in the queue: that is not given away
            mark_waiting(run_dir, ref)
        return None
    # Slurm keeps whole seconds. An end before that start is of an earlier one: the database has yet to hear of this.
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
    """Ask no more of a job that waits: it begins when Slurm lets it."""
    if last := _start_by_job(run_dir, ref):
        _mark_path(run_dir, ref, last).touch(0o644)


def _start_by_job(run_dir: Path, ref: run_folder.JobRef) -> AttemptStart | None:
    """The start of the run's newest attempt, if this job made it."""
    last = run_folder.last_attempt(run_dir)
    start = run_folder.read_or_none(last / "start.json", AttemptStart) if last else None
    return start if start and start.job_id == ref.job_id else None


def _mark_path(run_dir: Path, ref: run_folder.JobRef, last: AttemptStart) -> Path:
    return run_dir / f".waits.{ref.job_id}.{last.attempt}"
