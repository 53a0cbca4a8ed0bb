"""The queue over all sites: a folder, and one folder in it for each job.

<place>/                        PIT_PLACE, else <XDG state>/pitools/place; nobody else's to read
    tick.lock                   flock(2) of the tick at work
    sites.json                  pit.place-sites/1: what the last tick saw
    jobs/<job-id>/
        job.json                pit.queued/1: what was asked for; it never changes
        journal.jsonl           pit.place-entry/1: what was decided and what was seen, oldest first
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
from pitools.core.errors import DataError, UsageError, nearest
from pitools.core.fs import os_error, sync_dir, sync_file_system, write_atomic
from pitools.core.user_dirs import base, private
from pitools.launch.request import Request
from pitools.place.dispatch.journal import Job, Queued, fold, read_journal
from pitools.run import run_folder

KEEP_S = 30 * 86400.0  # how long a job that is over can be listed

_ID = re.compile(r"[a-z0-9][a-z0-9_-]{0,80}")
_SUBMITTED = re.compile(r"-(\d{8}-\d{6})-[0-9a-f]+$")


def root() -> Path:
    """The queue's folder, made where there is none, for its owner alone. Raises ClusterError."""
    given = os.environ.get("PIT_PLACE", "")
    place = private(Path(given).absolute() if given else base("XDG_STATE_HOME", ".local/state") / "pitools" / "place")
    for part in ("jobs", "done"):
        private(place / part)
    return place


def ask(request: Request, sites: tuple[str, ...], *, owner: str, request_text: str = "") -> Queued:
    """A request as the queue will know it."""
    return Queued(
        job_id=run_folder.new_id(request.name),
        request=request,
        sites=sites,
        submitted=timestamps.now(),
        tier=request.tier,
        owner=owner,
        request_text=request_text,
    )


def add(place: Path, asked: Sequence[Queued]) -> list[Job]:
    """Put jobs into the queue; from the moment that one is seen there it is whole and durable."""
    made = [Job(asked=one, path=place / "jobs" / one.job_id) for one in asked]
    try:
        for job in made:
            building = _building(job.path)
            building.mkdir(mode=0o700)
            write_atomic(building / "job.json", msgspec.json.encode(job.asked) + b"\n", mode=0o600, durable=False)
        sync_file_system(place)  # once for all: two hundred files on their own take seconds
        for job in made:
            os.rename(_building(job.path), job.path)
        sync_dir(place / "jobs")
    except OSError as error:
        for job in made:
            shutil.rmtree(_building(job.path), ignore_errors=True)
        raise os_error(error, place) from error
    return made


def _building(path: Path) -> Path:
    return path.with_name(f".{path.name}")


def jobs(place: Path, *, done: bool = False) -> tuple[list[Job], list[DataError]]:
    """Every job that is not put away, oldest first, and what is wrong with those that cannot be read; or the others."""
    found: list[Job] = []
    broken: list[DataError] = []
    for path in (place / ("done" if done else "jobs")).iterdir():
        try:
            if _ID.fullmatch(path.name) and (job := _read(path)):
                found.append(job)
        except DataError as error:  # one broken folder must not stop the others
            broken.append(error)
        except OSError as error:
            broken.append(DataError(error.strerror or str(error), where=str(error.filename or path)))
    return sorted(found, key=lambda job: (job.asked.submitted, job.job_id)), broken


def find(place: Path, job_id: str) -> Job:
    """The job of this id, over or not. Raises UsageError naming the nearest."""
    if _ID.fullmatch(job_id):
        for part in ("jobs", "done", "jobs"):  # it may move while it is looked for
            if job := _read(place / part / job_id):
                return job
    known = [path.name for path in (place / "jobs").iterdir()]
    raise UsageError(f'no job "{job_id}" in the queue', where=str(place), hint=nearest(job_id, known[-20:]))


def _read(path: Path) -> Job | None:
    asked = run_folder.read(path / "job.json", Queued)
    if asked is None:
        return None
    if asked.job_id != path.name:
        raise DataError(f'job_id = "{asked.job_id}" is not the folder\'s name', where=str(path))
    lost = frozenset(int(n) for mark in path.glob("lost.*") if (n := mark.name.removeprefix("lost.")).isdecimal())
    job = Job(asked=asked, path=path, is_cancelled=(path / "cancel").exists(), lost=lost)
    return fold(job, read_journal(path / "journal.jsonl"))


def close(place: Path, job: Job) -> None:
    """Put a job that is over away."""
    try:
        os.rename(job.path, place / "done" / job.job_id)
    except OSError as error:
        raise os_error(error, job.path) from error


def over(place: Path) -> list[tuple[str, str]]:
    """The jobs that are put away, in the order of their submission: (when, id), as the ids tell. Looks into none.

    When: UTC, as `20261121-013341`; "" for what has no such name.
    """
    with os.scandir(place / "done") as found:
        names = [one.name for one in found]
    return sorted((when[1] if (when := _SUBMITTED.search(name)) else "", name) for name in names)


def prune(place: Path) -> None:
    """Remove the jobs that have been over for KEEP_S; what cannot be removed stays."""
    until_s = time.time() - KEEP_S
    latest = time.strftime("%Y%m%d-%H%M%S", time.gmtime(until_s))
    for submitted, name in over(place):
        path = place / "done" / name
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


def mark(job: Job, name: str) -> None:
    """Leave a mark for the next tick: `cancel`, or `lost.<n>`. Raises UsageError for a job that is over."""
    try:
        (job.path / name).touch(mode=0o600)
    except FileNotFoundError as error:
        raise UsageError(f'job "{job.job_id}" is over', where=str(job.path)) from error
    except OSError as error:
        raise os_error(error, job.path) from error


def unmark(job: Job, n: int) -> Job:
    """Remove the mark that ticket n is lost, also one that was made after the job was read. Returns the job without it.

    Raises ClusterError, NoSpace where the folder cannot be written.
    """
    path = job.path / f"lost.{n}"
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise os_error(error, path) from error
    return msgspec.structs.replace(job, lost=job.lost - {n}) if n in job.lost else job


@contextmanager
def locked(place: Path) -> Iterator[bool]:
    """Be the tick: yields whether no other is at work. The kernel frees the lock on any death."""
    descriptor = os.open(place / "tick.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        os.close(descriptor)
