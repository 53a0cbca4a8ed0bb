"""Find a job by its name after an sbatch that ended before it printed the id."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from pitools.core.errors import PitError, TryLater
from pitools.launch.submission import grant
from pitools.run import run_folder
from pitools.slurm.client import Client
from pitools.slurm.errors import OutcomeUnknown
from pitools.slurm.job_components import parent_job_id

_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.25, 5.0
_MAX_QUEUE_DELAY_S = 30.0  # if slurmctld does not report its MessageTimeout
_MAX_CLOCK_SKEW = timedelta(hours=1)


def find_by_name(
    slurm: Client,
    name: str,
    path: Path,
    *,
    intended: datetime,
    sbatch_ended_s: float,
    deadline: float,
    outcome_error: OutcomeUnknown,
    task: str = "",
) -> str | None:
    """Return the id of the job that Slurm shows under a name; None once Slurm would show such a job and does not.

    Args:
        path: the job's folder in its run; its grant decides between several jobs of the name.
        intended: the earliest time at which the job may have been submitted.
        sbatch_ended_s: for how long sbatch has certainly been over, in seconds.
        deadline: when to give up, by time.monotonic; one query is made in any case.
        outcome_error: the error to raise then.
        task: of the array of this name; "" for a single job.
    """
    settled_at, pause_s = 0.0, _FIRST_PAUSE_S
    while True:
        # A failed query does not prove that the job is absent.
        with contextlib.suppress(PitError, OSError):
            now = time.monotonic()
            if task:
                if array_id := _find_array_in_queue(slurm, name):
                    return f"{array_id}_{task}"
            elif job_id := _find_in_queue(slurm, name, path):
                return job_id
            settled_at = settled_at or now + _slurmctld_delay_s(slurm) - sbatch_ended_s
            if now >= settled_at:
                job_id = _find_in_accounting(slurm, name, intended)
                return f"{job_id}_{task}" if task and job_id else job_id
        if time.monotonic() + pause_s > deadline:
            hint = "run the same command again: it queries Slurm for the job first"
            raise OutcomeUnknown(outcome_error.message, where=outcome_error.where, hint=hint) from outcome_error
        time.sleep(pause_s * random.uniform(0.75, 1.0))  # noqa: S311
        pause_s = min(2 * pause_s, _MAX_PAUSE_S)


def _slurmctld_delay_s(slurm: Client) -> float:
    """Return how long slurmctld may still process a request after its sender has timed out, in seconds."""
    try:
        return float(slurm.config().values.get("MessageTimeout", "").split()[0])
    except (ValueError, IndexError):
        return _MAX_QUEUE_DELAY_S


def _find_in_queue(slurm: Client, name: str, path: Path) -> str | None:
    jobs = slurm.jobs(user=slurm.user(), name=name, all_states=True)
    ids = sorted({job.raw_id for job in jobs}, key=int)
    if len(ids) < 2:
        return ids[0] if ids else None
    winner = pick_winner(path, ids)
    if waiting := sorted({job.raw_id for job in jobs if job.state == "PENDING"} - {winner}, key=int):
        slurm.cancel(waiting)
    run_folder.append_event(path.parent.parent, "duplicate-jobs", kept=winner, cancelled=waiting)
    return winner


def _find_array_in_queue(slurm: Client, name: str) -> str | None:
    """Return the id of the array of this name; of two, the first."""
    jobs = slurm.jobs(user=slurm.user(), name=name, all_states=True)
    return min((parent_job_id(job.job_id) for job in jobs), key=int, default=None)


def pick_winner(path: Path, ids: Sequence[str]) -> str:
    """Return the id that holds the grant; give a free grant to the first. The first if the holder is not in `ids`."""
    holder = grant.granted_job_id(grant.claim(path, grant.grant_token(ids[0])))
    return holder if holder in ids else ids[0]


def _find_in_accounting(slurm: Client, name: str, intended: datetime) -> str | None:
    since = intended.astimezone(UTC) - _MAX_CLOCK_SKEW
    try:
        rows = slurm.accounting(user=slurm.user(), name=name, since=since, all_starts=False)
    except TryLater:
        raise
    except PitError:  # the cluster keeps no accounting: only the queue counts
        return None
    return min((parent_job_id(job.job_id) for job in rows), key=int, default=None)
