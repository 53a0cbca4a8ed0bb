"""The jobs of a run, as its folder knows them. Most runs have one; a run that goes on in a fresh job has more.

<run>/jobs/
    .sending            flock(2) of whoever submits, and of its sbatch, whose answer it holds
    <k>/                the k-th submission, k = 0, 1, ...
        intent.json     pit.intent/1: on disk before sbatch is called
        job.json        pit.job-ref/1: the job that came of it; the newest is <run>/job.json too
        leave           a link that lets one job run, should there be two: see grant.py
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from pitools.core import timestamps
from pitools.core.errors import ClusterError, DataError
from pitools.core.fs import os_error, sync_dir
from pitools.core.record import Record
from pitools.run import run_folder
from pitools.run.run_folder import JobRef

if TYPE_CHECKING:  # every attempt begins with this module
    from pitools.site.schema import Site


class Intent(Record, frozen=True, kw_only=True, tag="pit.intent/1"):
    """A submission that is about to be made, or was.

    name: of the job, and of no other. cluster: as the site file named it, "" where it did not. args: sbatch's, beside
    the script. t: when it was first intended; tried: when sbatch was last called.
    """

    name: str
    number: int
    site: str
    cluster: str
    args: tuple[str, ...]
    t: str
    tried: str
    who: str


def at(run_dir: Path, number: int) -> Path:
    """The folder of the run's k-th job."""
    return run_dir / "jobs" / str(number)


def name(run_dir: Path, number: int) -> str:
    """What Slurm calls the run's k-th job."""
    return f"{run_dir.name}.{number}" if number else run_dir.name


def numbers(run_dir: Path) -> list[int]:
    """Which submissions were intended, oldest first."""
    found = (run_dir / "jobs").glob("*/intent.json")
    return sorted(int(path.parent.name) for path in found if path.parent.name.isdecimal())


def due(run_dir: Path) -> int:
    """The next submission's number: the newest one's where no job is known to have come of that. Raises DataError."""
    known = numbers(run_dir)
    if not known:
        # A local run, whose jobs are its supervisors, or one begun before its folder kept account of its jobs.
        newest = run_folder.read(run_dir / "job.json", JobRef)
        return newest.number + 1 if newest else 0
    return known[-1] if is_open(run_dir, known[-1]) else known[-1] + 1


def known(run_dir: Path, number: int) -> JobRef | None:
    """The run's k-th job; None where no id is known, or none that can be read: then Slurm is to say."""
    for path in (at(run_dir, number) / "job.json", run_dir / "job.json"):
        with contextlib.suppress(DataError):
            if (found := run_folder.read(path, JobRef)) and found.number == number:
                return found
    return None


def newest(run_dir: Path) -> JobRef | None:
    """The run's newest job of which an id is known, also where its sender was killed before `<run>/job.json` said so.

    Raises DataError where all that there is cannot be read.
    """
    for number in reversed(numbers(run_dir)):
        if found := known(run_dir, number):
            return found
    return run_folder.read(run_dir / "job.json", JobRef)


def is_open(run_dir: Path, number: int) -> bool:
    """Whether a submission was intended of which no job is known: there may be one all the same."""
    return (at(run_dir, number) / "intent.json").exists() and known(run_dir, number) is None


def intend(run_dir: Path, number: int, site: Site, args: tuple[str, ...]) -> Intent:
    """Write down, for good, that sbatch is about to be called. Raises NoSpace or ClusterError."""
    path = at(run_dir, number) / "intent.json"
    before, now = run_folder.read(path, Intent), timestamps.now()
    intent = Intent(
        name=name(run_dir, number),
        number=number,
        site=site.name,
        cluster=site.slurm.cluster,
        args=args,
        t=before.t if before else now,
        tried=now,
        who=f"uid {os.geteuid()} on {socket.gethostname()}, pid {os.getpid()}",
    )
    run_folder.write(path, intent, durable=True)
    try:
        for above in path.parents[1:4]:
            sync_dir(above)
    except OSError as error:
        raise os_error(error, path) from error
    return intent


def check_cluster(site: Site, ref: JobRef | Intent) -> None:
    """Raise ClusterError where a job was submitted to another cluster than the site's: its id means another job there.

    To be called before a job id of a run is given to Slurm.
    """
    if ref.cluster and site.slurm.cluster and ref.cluster != site.slurm.cluster:
        who = f"job {ref.job_id}" if isinstance(ref, JobRef) else f'job "{ref.name}"'
        what = f'{who} is of cluster "{ref.cluster}", and site "{site.name}" is cluster "{site.slurm.cluster}" now'
        hint = f'name a site of cluster "{ref.cluster}", or put slurm.cluster and slurm.conf of "{site.name}" back'
        raise ClusterError(what, where=f"site {site.name}", hint=hint)
