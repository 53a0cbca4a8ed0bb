"""The queue over all sites: a folder, and one folder in it for each job.

<place>/                        PIT_PLACE, else <XDG state>/pitools/place; nobody else's to read
    tick.lock                   flock(2) of the tick at work
    sites.json                  pit.dispatch-status/1: what the last tick saw
    jobs/<job-id>/
        job.json                pit.queued-request/1: what was asked for; it never changes
        journal.jsonl           pit.journal-entry/1: what was decided and what was seen, oldest first
        cancel                  somebody wants it withdrawn
        lost.<n>                somebody answers for it that its ticket of this number will not run; void, and
                                removed, as soon as its site answers for the ticket
    done/<job-id>/              the same for KEEP_S, once the job is over, with what its runs over ssh brought home

What a job is now follows from its journal alone (journal.py), which only the tick writes.
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
    """The queue's folder, made where there is none, for its owner alone. Raises ClusterError."""
    given = os.environ.get("PIT_PLACE", "")
    place = ensure_private_dir(
        Path(given).absolute() if given else xdg_dir("XDG_STATE_HOME", ".local/state") / "pitools" / "place"
    )
    for part in ("jobs", "done"):
        ensure_private_dir(place / part)
    return place


def make_request(request: Request, sites: tuple[str, ...], *, user: str, request_text: str = "") -> QueuedRequest:
    """A request as the queue will know it."""
    return QueuedRequest(
        job_id=run_folder.new_run_id(request.name),
        request=request,
        sites=sites,
        submitted=timestamps.now_rfc3339(),
        tier=request.tier,
        owner=user,
        request_text=request_text,
    )


def enqueue(queue_dir: Path, requests: Sequence[QueuedRequest]) -> list[QueueJob]:
    """Put jobs into the queue; from the moment that one is seen there it is whole and durable."""
    made = [QueueJob(request=one, path=queue_dir / "jobs" / one.job_id) for one in requests]
    try:
        for job in made:
            building = _staging_path(job.path)
            building.mkdir(mode=0o700)
            write_atomic(building / "job.json", msgspec.json.encode(job.request) + b"\n", mode=0o600, durable=False)
        sync_fs(queue_dir)  # once for all: two hundred files on their own take seconds
        for job in made:
            os.rename(_staging_path(job.path), job.path)
        fsync_dir(queue_dir / "jobs")
    except OSError as error:
        for job in made:
            shutil.rmtree(_staging_path(job.path), ignore_errors=True)
        raise from_os_error(error, queue_dir) from error
    return made


def _staging_path(path: Path) -> Path:
    return path.with_name(f".{path.name}")


def read_jobs(queue_dir: Path, *, done: bool = False) -> tuple[list[QueueJob], list[DataError]]:
    """Every job that is not put away, oldest first, and what is wrong with those that cannot be read; or the others."""
    found: list[QueueJob] = []
    broken: list[DataError] = []
    for path in (queue_dir / ("done" if done else "jobs")).iterdir():
        try:
            if _ID.fullmatch(path.name) and (job := _read(path)):
                found.append(job)
        except DataError as error:  # one broken folder must not stop the others
            broken.append(error)
        except OSError as error:
            broken.append(DataError(error.strerror or str(error), where=str(error.filename or path)))
    return sorted(found, key=lambda job: (job.request.submitted, job.job_id)), broken


def find_job(queue_dir: Path, job_id: str) -> QueueJob:
    """The job of this id, over or not. Raises UsageError naming the nearest."""
    if _ID.fullmatch(job_id):
        for part in ("jobs", "done", "jobs"):  # it may move while it is looked for
            if job := _read(queue_dir / part / job_id):
                return job
    known = [path.name for path in (queue_dir / "jobs").iterdir()]
    raise UsageError(f'no job "{job_id}" in the queue', where=str(queue_dir), hint=suggest(job_id, known[-20:]))


def _read(path: Path) -> QueueJob | None:
    asked = run_folder.read_record(path / "job.json", QueuedRequest)
    if asked is None:
        return None
    if asked.job_id != path.name:
        raise DataError(f'job_id = "{asked.job_id}" is not the folder\'s name', where=str(path))
    lost = frozenset(int(n) for mark in path.glob("lost.*") if (n := mark.name.removeprefix("lost.")).isdecimal())
    job = QueueJob(request=asked, path=path, is_cancelled=(path / "cancel").exists(), declared_lost=lost)
    return fold_entries(job, read_journal(path / "journal.jsonl"))


def archive(queue_dir: Path, job: QueueJob) -> None:
    """Put a job that is over away."""
    try:
        os.rename(job.path, queue_dir / "done" / job.job_id)
    except OSError as error:
        raise from_os_error(error, job.path) from error


def archived(queue_dir: Path) -> list[tuple[str, str]]:
    """The jobs that are put away, in the order of their submission: (when, id), as the ids tell. Looks into none.

    When: UTC, as `20261121-013341`; "" for what has no such name.
    """
    with os.scandir(queue_dir / "done") as found:
        names = [one.name for one in found]
    return sorted((when[1] if (when := _SUBMITTED.search(name)) else "", name) for name in names)


def prune_archive(queue_dir: Path) -> None:
    """Remove the jobs that have been over for KEEP_S; what cannot be removed stays."""
    until_s = time.time() - KEEP_S
    latest = time.strftime("%Y%m%d-%H%M%S", time.gmtime(until_s))
    for submitted, name in archived(queue_dir):
        path = queue_dir / "done" / name
        if submitted > latest:
            return
        if submitted and _ended_s(path) < until_s:
            shutil.rmtree(path, ignore_errors=True)


def _ended_s(path: Path) -> float:
    """When something last became of a job; 0 where a removal was cut short."""
    try:
        return (path / "journal.jsonl").stat().st_mtime
    except FileNotFoundError:
        return 0.0
    except OSError:
        return math.inf


def write_mark(job: QueueJob, name: str) -> None:
    """Leave a mark for the next tick: `cancel`, or `lost.<n>`. Raises UsageError for a job that is over."""
    try:
        (job.path / name).touch(mode=0o600)
    except FileNotFoundError as error:
        raise UsageError(f'job "{job.job_id}" is over', where=str(job.path)) from error
    except OSError as error:
        raise from_os_error(error, job.path) from error


def remove_lost_mark(job: QueueJob, ticket_number: int) -> QueueJob:
    """Remove the mark that ticket n is lost, also one that was made after the job was read. Returns the job without it.

    Raises ClusterError, NoSpace where the folder cannot be written.
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
    """Be the tick: yields whether no other is at work. The kernel frees the lock on any death."""
    descriptor = os.open(queue_dir / "tick.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        os.close(descriptor)
