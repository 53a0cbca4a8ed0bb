"""The queue over all sites: a folder, and one folder in it for each job.

<place>/                        PIT_QUEUE, else <XDG state>/pitools/place; private to the user (mode 0700)
    tick.lock                   flock(2), held during a tick
    site.<name>.lock            flock(2), held during a tick, or longer while its actions at that site go on
    sites.json                  pit.dispatch-status/1: the sites as of the last tick
    jobs/<job-id>/
        job.json                pit.queued-request/1: the request; it never changes
        journal.jsonl           pit.journal-entry/1: decisions and observations, oldest first
        run/                    fetched files of its last run over ssh
        run.<n>/                all files of the run over ssh that was stopped last, ticket n's, for the next ticket
        cancel                  mark: the user cancelled the job
        lost.<n>                mark: the user declared that ticket n will not run; removed as soon as its site
                                answers for the ticket
    done/<job-id>/              a job that is over, for KEEP_S; with the fetched files of its runs over ssh

A job's state follows from its journal alone (journal.py), which only the tick writes.
"""

from __future__ import annotations

import fcntl
import math
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from pitools.core import timestamps
from pitools.core.errors import DataError, UsageError, suggest
from pitools.core.fs import from_os_error, fsync_dir, sync_fs, write_atomic
from pitools.core.user_dirs import ensure_private_dir, xdg_dir
from pitools.launch.request import Request
from pitools.place.dispatch.journal import QueuedRequest, QueueJob, fold_entries, read_journal
from pitools.run import run_folder

KEEP_S = 30 * 86400.0  # how long a job that is over can be listed

_ID = re.compile(r"[a-z0-9][a-z0-9_-]{0,80}")
_SUBMITTED = re.compile(r"-(\d{8}-\d{6})-[0-9a-f]+$")


def queue_dir() -> Path:
    """Return the queue's folder; create it, private to the user, if it is missing. Raises ClusterError."""
    override = os.environ.get("PIT_QUEUE", "")
    place = ensure_private_dir(
        Path(override).absolute() if override else xdg_dir("XDG_STATE_HOME", ".local/state") / "pitools" / "place"
    )
    for part in ("jobs", "done"):
        ensure_private_dir(place / part)
    return place


def make_request(request: Request, sites: tuple[str, ...], *, user: str, request_text: str = "") -> QueuedRequest:
    """Return the queue's record of a request, with a new job id."""
    return QueuedRequest(
        job_id=run_folder.new_run_id(request.name),
        request=request,
        sites=sites,
        queued_at=timestamps.now_rfc3339(),
        tier=request.tier,
        owner=user,
        request_text=request_text,
    )


def enqueue(queue_dir: Path, requests: Sequence[QueuedRequest]) -> list[QueueJob]:
    """Add jobs to the queue. A job's folder appears by a rename, complete and durable. Raises ClusterError, NoSpace."""
    jobs = [QueueJob(request=request, path=queue_dir / "jobs" / request.job_id) for request in requests]
    try:
        for job in jobs:
            building = _staging_path(job.path)
            building.mkdir(mode=0o700)
            write_atomic(building / "job.json", msgspec.json.encode(job.request) + b"\n", mode=0o600, durable=False)
        sync_fs(queue_dir)  # one sync for all: fsync of two hundred files takes seconds
        for job in jobs:
            os.rename(_staging_path(job.path), job.path)
        fsync_dir(queue_dir / "jobs")
    except OSError as error:
        raise from_os_error(error, queue_dir) from error
    finally:
        for job in jobs:
            shutil.rmtree(_staging_path(job.path), ignore_errors=True)
    return jobs


def _staging_path(path: Path) -> Path:
    return path.with_name(f".{path.name}")


def read_jobs(queue_dir: Path, *, done: bool = False) -> tuple[list[QueueJob], list[DataError]]:
    """Return the queue's jobs, oldest first, and the errors of unreadable ones. done: the archived jobs instead."""
    jobs: list[QueueJob] = []
    broken: list[DataError] = []
    for path in (queue_dir / ("done" if done else "jobs")).iterdir():
        try:
            if _ID.fullmatch(path.name) and (job := _read(path)):
                jobs.append(job)
        except DataError as error:  # one damaged folder must not stop the other jobs
            broken.append(error)
        except OSError as error:
            broken.append(DataError(error.strerror or str(error), where=str(error.filename or path)))
    return sorted(jobs, key=lambda job: (job.request.queued_at, job.job_id)), broken


def find_job(queue_dir: Path, job_id: str) -> QueueJob:
    """Return the job of this id, archived or not. Raises UsageError with the nearest id."""
    if _ID.fullmatch(job_id):
        for part in ("jobs", "done", "jobs"):  # a tick may archive the job during the search
            if job := _read(queue_dir / part / job_id):
                return job
    job_ids = [path.name for path in (queue_dir / "jobs").iterdir()]
    raise UsageError(f'no job "{job_id}" in the queue', where=str(queue_dir), hint=suggest(job_id, job_ids[-20:]))


def _read(path: Path) -> QueueJob | None:
    """Return the job in a folder; None if it is, or becomes, missing. Raises DataError."""
    request = run_folder.read_record(path / "job.json", QueuedRequest)
    if request is None:
        return None
    if request.job_id != path.name:
        raise DataError(f'job_id = "{request.job_id}" is not the folder\'s name', where=str(path))
    lost_numbers = frozenset(
        int(n) for mark in path.glob("lost.*") if (n := mark.name.removeprefix("lost.")).isdecimal()
    )
    job = QueueJob(request=request, path=path, is_cancelled=(path / "cancel").exists(), declared_lost=lost_numbers)
    job = fold_entries(job, read_journal(path / "journal.jsonl"))
    return job if (path / "job.json").exists() else None  # archived meanwhile, so its journal was missing


def archive(queue_dir: Path, job: QueueJob) -> None:
    """Move a job that is over into `done`, without the checkpoints and code that its next ticket would have needed."""
    for run_dir in job.path.glob("run.*"):
        shutil.rmtree(run_dir, ignore_errors=True)
    try:
        os.rename(job.path, queue_dir / "done" / job.job_id)
    except OSError as error:
        raise from_os_error(error, job.path) from error


def archived(queue_dir: Path) -> list[tuple[str, str]]:
    """Return (submission time, id) of the archived jobs, in order, from the names of their folders alone.

    The time is UTC, as `20261121-013341`; "" for other names.
    """
    with os.scandir(queue_dir / "done") as entries:
        names = [entry.name for entry in entries]
    return sorted((match[1] if (match := _SUBMITTED.search(name)) else "", name) for name in names)


def prune_archive(queue_dir: Path) -> None:
    """Remove the jobs that have been over for KEEP_S. A folder that cannot be removed stays."""
    until_s = time.time() - KEEP_S
    latest = time.strftime("%Y%m%d-%H%M%S", time.gmtime(until_s))
    for submitted, name in archived(queue_dir):
        path = queue_dir / "done" / name
        if submitted > latest:
            return
        if submitted and _ended_s(path) < until_s:
            shutil.rmtree(path, ignore_errors=True)


def _ended_s(path: Path) -> float:
    """Return the time of a job's last journal entry; 0 without a journal, as after an interrupted removal."""
    try:
        return (path / "journal.jsonl").stat().st_mtime
    except FileNotFoundError:
        return 0.0
    except OSError:
        return math.inf


def write_mark(job: QueueJob, name: str) -> None:
    """Create a mark for the next tick: `cancel`, or `lost.<n>`. Raises UsageError for a job that is over."""
    try:
        (job.path / name).touch(mode=0o600)
    except FileNotFoundError as error:
        raise UsageError(f'job "{job.job_id}" is over', where=str(job.path)) from error
    except OSError as error:
        raise from_os_error(error, job.path) from error


def remove_lost_mark(job: QueueJob, ticket_number: int) -> QueueJob:
    """Remove the mark that ticket n is lost, even if it is newer than `job`. Return the job without the mark.

    Raises ClusterError, or NoSpace if the folder is not writable.
    """
    path = job.path / f"lost.{ticket_number}"
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise from_os_error(error, path) from error
    return (
        msgspec.structs.replace(job, declared_lost=job.declared_lost - {ticket_number})
        if ticket_number in job.declared_lost
        else job
    )


@contextmanager
def tick_lock(queue_dir: Path) -> Iterator[bool]:
    """Try to lock the queue for a tick; yields whether the lock was free. The kernel releases it on any exit."""
    descriptor = try_lock(queue_dir / "tick.lock")
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            os.close(descriptor)


def try_lock(path: Path) -> int | None:
    """Lock a file and return its descriptor, to be closed; None if the lock is held. Raises ClusterError, NoSpace."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise from_os_error(error, path) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            return None
        raise from_os_error(error, path) from error
    return descriptor
