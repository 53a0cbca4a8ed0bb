"""Stop this job's ranks once a newer job owns the run.

Slurm may declare a node dead that still computes, or requeue a job that already has a successor. Two jobs of a run must
not train at the same time.
"""

from __future__ import annotations

import os
from pathlib import Path

from pitools.core.errors import PitError
from pitools.launch.job.job_context import JobContext, load_context
from pitools.launch.submission import grant, submissions

CHECK_EVERY_S = 30.0


def superseded_by(job: JobContext) -> str:
    """Return why the job no longer owns its run; "" while it does, or if the folder cannot be read."""
    try:
        newer = [number for number in submissions.job_numbers(job.run_dir) if number > job.job_number]
        granted = grant.read_grant(submissions.job_dir(job.run_dir, job.job_number))
    except OSError:
        return ""
    if newer:
        return f"job {newer[-1]} of the run has taken over"
    token = grant.grant_token(job.job_id)
    return "" if granted in ("", token) else f"the submission's grant is {granted} (expected {token})"


def current_job() -> JobContext | None:
    """Return the job of this process; None unless it is a submission of a run."""
    try:
        context = load_context(os.environ)
    except PitError:
        return None
    return context if context.mode == "run" and Path(context.run_dir, "jobs").is_dir() else None
