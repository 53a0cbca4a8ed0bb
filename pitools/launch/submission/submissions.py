"""List and record the submissions of a run. Most runs have one; a run that resumes in a new job has more.

<run>/jobs/
    .sending            flock(2) of whoever submits, and of its sbatch, whose answer it holds
    <k>/                the k-th submission, k = 0, 1, ...
        intent.json     pit.submission-intent/1: on disk before sbatch is called
        job.json        pit.job-ref/1: the job that came of it; the newest is <run>/job.json too
        grant           a link that lets one job run, should there be two: see grant.py
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

if TYPE_CHECKING:  # every attempt begins with this module
    from pitools.site.schema import Site


class SubmissionIntent(Record, frozen=True, kw_only=True, tag="pit.submission-intent/1"):
    """A submission that is about to be made, or was.

    name: of the job, and of no other. cluster: as the site file named it, "" where it did not. args: sbatch's, beside
    the script. intended_at: when it was first intended; last_tried_at: when sbatch was last called.
    """

    name: str
    number: int
    site: str
    cluster: str
    args: tuple[str, ...]
    intended_at: str
    last_tried_at: str
    submitter: str


def job_dir(run_dir: Path, number: int) -> Path:
    """The folder of the run's k-th job."""
    return run_dir / "jobs" / str(number)


def slurm_job_name(run_dir: Path, number: int) -> str:
    """Return the Slurm job name of the run's k-th job."""
    return f"{run_dir.name}.{number}" if number else run_dir.name


def submission_numbers(run_dir: Path) -> list[int]:
    """Return the numbers of the submissions with an intent, oldest first."""
    intents = (run_dir / "jobs").glob("*/intent.json")
    return sorted(int(path.parent.name) for path in intents if path.parent.name.isdecimal())


def next_number(run_dir: Path) -> int:
    """The next submission's number: the newest one's where no job is known to have come of that. Raises DataError."""
    numbers = submission_numbers(run_dir)
    if not numbers:
        # A local run, whose jobs are its supervisors, or one begun before its folder kept account of its jobs.
        newest = run_folder.read_record(run_dir / "job.json", JobRef)
        return newest.number + 1 if newest else 0
    return numbers[-1] if is_unresolved(run_dir, numbers[-1]) else numbers[-1] + 1


def read_job(run_dir: Path, number: int) -> JobRef | None:
    """The run's k-th job; None where no id is known, or none that can be read: then Slurm is to say."""
    for path in (job_dir(run_dir, number) / "job.json", run_dir / "job.json"):
        with contextlib.suppress(DataError):
            if (job := run_folder.read_record(path, JobRef)) and job.number == number:
                return job
    return None


def latest_job(run_dir: Path) -> JobRef | None:
    """The run's newest job of which an id is known, also where its sender was killed before `<run>/job.json` said so.

    Raises DataError where all that there is cannot be read.
    """
    for number in reversed(submission_numbers(run_dir)):
        if job := read_job(run_dir, number):
            return job
    return run_folder.read_record(run_dir / "job.json", JobRef)


def is_unresolved(run_dir: Path, number: int) -> bool:
    """Whether a submission was intended of which no job is known: there may be one all the same."""
    return (job_dir(run_dir, number) / "intent.json").exists() and read_job(run_dir, number) is None


def record_intent(run_dir: Path, number: int, site: Site, args: tuple[str, ...]) -> SubmissionIntent:
    """Write down, for good, that sbatch is about to be called. Raises NoSpace or ClusterError."""
    path = job_dir(run_dir, number) / "intent.json"
    previous, now = run_folder.read_record(path, SubmissionIntent), timestamps.now_rfc3339()
    intent = SubmissionIntent(
        name=slurm_job_name(run_dir, number),
        number=number,
        site=site.name,
        cluster=site.slurm.cluster,
        args=args,
        intended_at=previous.intended_at if previous else now,
        last_tried_at=now,
        submitter=f"uid {os.geteuid()} on {socket.gethostname()}, pid {os.getpid()}",
    )
    run_folder.write_record(path, intent, durable=True)
    try:
        for above in path.parents[1:4]:
            fsync_dir(above)
    except OSError as error:
        raise from_os_error(error, path) from error
    return intent


def require_same_cluster(site: Site, job: JobRef | SubmissionIntent) -> None:
    """Raise ClusterError where a job was submitted to another cluster than the site's: its id means another job there.

    To be called before a job id of a run is given to Slurm.
    """
    if job.cluster and site.slurm.cluster and job.cluster != site.slurm.cluster:
        who = f"job {job.job_id}" if isinstance(job, JobRef) else f'job "{job.name}"'
        what = f'{who} is of cluster "{job.cluster}", and site "{site.name}" is cluster "{site.slurm.cluster}" now'
        hint = f'name a site of cluster "{job.cluster}", or put slurm.cluster and slurm.conf of "{site.name}" back'
        raise ClusterError(what, where=f"site {site.name}", hint=hint)
