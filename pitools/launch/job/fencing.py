"""A job that goes on with a run alone: another that has taken over since, rightly or not, ends it.

Slurm may give up a node that still computes, or put a job back that somebody has followed up: two jobs of a run must
not train at once, whoever was wrong.
"""

from __future__ import annotations

import os
from pathlib import Path

from pitools.core.errors import PitError
from pitools.launch.job.job_context import Job, job
from pitools.launch.submission import grant, submissions

EVERY_S = 30.0


def overtaken(job: Job) -> str:
    """Why the job may not go on with its run, in words; "" while it may, and where that cannot be seen."""
    try:
        newer = [number for number in submissions.numbers(job.run_dir) if number > job.number]
        word = grant.told(submissions.at(job.run_dir, job.number))
    except OSError:
        return ""
    if newer:
        return f"job {newer[-1]} of the run goes on with it"
    return "" if word in ("", grant.word(job.job_id)) else f"this job has no leave to run any more: {word}"


def of_this_job() -> Job | None:
    """The job that this process is in, if it is one of those that a run was sent as."""
    try:
        found = job(os.environ)
    except PitError:
        return None
    return found if found.mode == "run" and Path(found.run_dir, "jobs").is_dir() else None
