"""List and record the submissions of a run. Most runs have one; a run that resumes in a new job has more.

<run>/jobs/
    .sbatch-output      sbatch's output; also the submission lock (flock(2)) of the submitting process and its sbatch
    <k>/                the k-th submission, k = 0, 1, ...
        intent.json     pit.submission-intent/1: on disk before sbatch is called
        job.json        pit.job-ref/1: the resulting job; the newest is also <run>/job.json
        grant           a link that lets one job run if there are two: see grant.py
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from pitools.core import timestamps
from pitools.core.errors import ClusterError, DataError
from pitools.core.fs import from_os_error, fsync_dir
from pitools.core.record import Record
from pitools.run import run_folder
from pitools.run.run_folder import JobRef

if TYPE_CHECKING:  # every attempt imports this module first: keep that fast
    from pitools.site.schema import Site


class SubmissionIntent(Record, frozen=True, kw_only=True, tag="pit.submission-intent/1"):
    """A submission, recorded before sbatch is called.

    name: the job's unique name. task: its number in the array of this name, "" for a single job. cluster: slurm.cluster
    of the site file, "" if not set. args: sbatch arguments besides the script. intended_at: when the intent was first
    recorded; last_tried_at: when sbatch was last called.
    """

    name: str
    job_number: int
    site: str
    cluster: str
    args: tuple[str, ...]
    intended_at: str
    last_tried_at: str
    submitter: str
    task: str = ""


def job_dir(run_dir: Path, job_number: int) -> Path:
    """Return the folder of the run's k-th submission."""
    return run_dir / "jobs" / str(job_number)


def slurm_job_name(run_dir: Path, job_number: int) -> str:
    """Return the Slurm job name of the run's k-th job."""
    return f"{run_dir.name}.{job_number}" if job_number else run_dir.name


def submitted_name(run_dir: Path, job_number: int) -> str:
    """Return the name with which the run's k-th job was submitted: that of an array for a task of it."""
    intent = run_folder.read_or_none(job_dir(run_dir, job_number) / "intent.json", SubmissionIntent)
    return intent.name if intent else slurm_job_name(run_dir, job_number)


def job_numbers(run_dir: Path) -> list[int]:
    """Return the numbers of the submissions with an intent, oldest first."""
    intents = (run_dir / "jobs").glob("*/intent.json")
    return sorted(int(path.parent.name) for path in intents if path.parent.name.isdecimal())


def next_job_number(run_dir: Path) -> int:
    """Return the number of the next submission: that of the newest while its job is unknown. Raises DataError."""
    numbers = job_numbers(run_dir)
    if not numbers:
        # A local run, whose jobs are its supervisors, or a run of an older pitools without a folder `jobs`.
        newest = run_folder.read_record(run_dir / "job.json", JobRef)
        return newest.job_number + 1 if newest else 0
    return numbers[-1] if is_unresolved(run_dir, numbers[-1]) else numbers[-1] + 1


def read_job(run_dir: Path, job_number: int) -> JobRef | None:
    """Return the run's k-th job; None if its id is unknown or unreadable: Slurm has to be queried then."""
    for path in (job_dir(run_dir, job_number) / "job.json", run_dir / "job.json"):
        with contextlib.suppress(DataError):
            if (job := run_folder.read_record(path, JobRef)) and job.job_number == job_number:
                return job
    return None


def latest_job(run_dir: Path) -> JobRef | None:
    """Return the run's newest job with a known id, also if its submitter was killed before it wrote `<run>/job.json`.

    Raises DataError if no record can be read.
    """
    for job_number in reversed(job_numbers(run_dir)):
        if job := read_job(run_dir, job_number):
            return job
    return run_folder.read_record(run_dir / "job.json", JobRef)


def is_unresolved(run_dir: Path, job_number: int) -> bool:
    """Whether a submission has an intent but no known job; Slurm may have the job."""
    return (job_dir(run_dir, job_number) / "intent.json").exists() and read_job(run_dir, job_number) is None


def record_intent(
    run_dir: Path, job_number: int, site: Site, args: tuple[str, ...], *, array: str = "", task: str = ""
) -> SubmissionIntent:
    """Record, durably, that sbatch is about to be called. Raises NoSpace or ClusterError.

    array, task: name of the array and number in it, of a job that is submitted as a task of an array.
    """
    path = job_dir(run_dir, job_number) / "intent.json"
    previous, now = run_folder.read_record(path, SubmissionIntent), timestamps.now_rfc3339()
    intent = SubmissionIntent(
        name=array or slurm_job_name(run_dir, job_number),
        job_number=job_number,
        site=site.name,
        cluster=site.slurm.cluster,
        args=args,
        intended_at=previous.intended_at if previous else now,
        last_tried_at=now,
        submitter=f"uid {os.geteuid()} on {socket.gethostname()}, pid {os.getpid()}",
        task=task,
    )
    run_folder.write_record(path, intent, durable=True)
    try:
        for parent in path.parents[1:4]:
            fsync_dir(parent)
    except OSError as error:
        raise from_os_error(error, path) from error
    return intent


def require_same_cluster(site: Site, job: JobRef | SubmissionIntent) -> None:
    """Raise ClusterError if a job was submitted to another cluster than the site's: its id is another job there.

    Call this before a job id of a run is passed to Slurm.
    """
    if job.cluster and site.slurm.cluster and job.cluster.lower() != site.slurm.cluster.lower():
        name = f"job {job.job_id}" if isinstance(job, JobRef) else f'job "{job.name}"'
        problem = f'{name} is of cluster "{job.cluster}", but site "{site.name}" is cluster "{site.slurm.cluster}"'
        hint = f'name a site of cluster "{job.cluster}", or restore slurm.cluster and slurm.conf of "{site.name}"'
        raise ClusterError(problem, where=f"site {site.name}", hint=hint)
