"""Follow the runs below a folder: a run is read again only where its folder has changed.

Records are replaced by renames, which change their folder's time. A folder that changed less than 2 s before its
reading is read again, for a change in the same tick of the file system's clock. Of a step log that has grown only the
last line is read.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from pitools.core.errors import PitError
from pitools.core.fs import from_os_error
from pitools.core.record import decode_json
from pitools.launch.monitor import status
from pitools.launch.monitor.run_snapshot import RunSnapshot
from pitools.launch.slurm_cache import CachedState
from pitools.run import run_folder
from pitools.run.run_folder import RunRecord
from pitools.run.steps import Step
from pitools.site.schema import Site

MAX_RUNS = 1000  # of a site, the newest

_SETTLED_S = 2.0
_RELIST_S, _RENEW_S = 30.0, 10.0
_TAIL_BYTES = 4096  # a step's line has a few hundred
_Mark = tuple[int, ...]


class FollowedRun(NamedTuple):
    """A run as it was last read. record: None of one that cannot be read, or of another site. problem: why, or None.

    ended_at: the time of the verdict, "" without one. step_at: when the step log last grew, Unix time; 0.0 without one.
    """

    run_dir: Path
    record: RunRecord | None = None
    problem: PitError | None = None
    ended_at: str = ""
    step_at: float = 0.0


class _Reader:
    """Reads a run, and keeps what it has read."""

    def __init__(self, run_dir: Path) -> None:
        self.run = FollowedRun(run_dir)
        self.snapshot: RunSnapshot | None = None
        self._watched: tuple[str, ...] = (str(run_dir),)
        self._marks: tuple[_Mark, ...] = ()
        self._is_settled = self._is_over = False  # over: only its own folder's time can tell of a change
        self._step_log, self._step_bytes = "", -1
        self._cached: CachedState | None = None
        self._renewed_s = 0.0

    def refresh(self, site: Site, states: Mapping[str, CachedState], now_s: float) -> None:
        """Read what has changed, and renew the record."""
        if self._is_over and _mark(self._watched[0]) == self._marks[0]:
            return
        run_dir, self._is_over = self.run.run_dir, False
        try:
            is_changed = self._read_if_changed(now_s)
            if self.snapshot is None or self.snapshot.plan.site != site.name:
                self.run = FollowedRun(run_dir)
                return
            grown_at = self._read_new_steps(self.snapshot)
            verdict, record = self.snapshot.verdict, self.run.record
            cached = None if verdict else states.get(self.snapshot.job_id)
            # The state also depends on the age of a submission, and of a local run on its process.
            is_due = not verdict and now_s - self._renewed_s > _RENEW_S
            if is_changed or is_due or cached != self._cached or record is None:
                record = status.record_of(self.snapshot, site, cached)
                self._cached, self._renewed_s = cached, now_s
            elif grown_at:
                record = replace(record, steps=self.snapshot.steps, loss=self.snapshot.loss)
            self.run = FollowedRun(run_dir, record, None, verdict.t if verdict else "", grown_at or self.run.step_at)
            self._is_over = self._is_settled and verdict is not None
        except (PitError, OSError) as error:
            is_closed = isinstance(error, PermissionError)  # another user's: nothing that needs this one
            problem = error if isinstance(error, PitError) else from_os_error(error, run_dir)
            self.run, self._is_settled = FollowedRun(run_dir, problem=None if is_closed else problem), False

    def _read_if_changed(self, now_s: float) -> bool:
        """Read the folder if it has changed, and return whether it had."""
        if self._is_settled and self._marks == tuple(map(_mark, self._watched)):
            return False
        run_dir = self.run.run_dir
        folder, attempt = str(run_dir), run_folder.last_attempt(run_dir)
        self._watched = (folder, f"{folder}/attempts", *([str(attempt)] if attempt else ()))
        self._step_log, self._step_bytes = f"{attempt}/steps/0.jsonl", -1
        if not os.path.exists(self._step_log):  # noqa: PTH110
            more = (f"{folder}/checkpoints", f"{folder}/progress")  # these then say how far it is
            self._watched += (f"{attempt}/steps", *more)
        self._marks = tuple(map(_mark, self._watched))  # before the reading: a change meanwhile is seen
        self.snapshot = RunSnapshot.read(run_dir)
        newest_s = max((mark[0] / 1e9 for mark in self._marks if len(mark) > 1), default=0.0)
        self._is_settled = now_s - newest_s > _SETTLED_S
        return True

    def _read_new_steps(self, snapshot: RunSnapshot) -> float:
        """Read the last step if the step log has grown; return when it grew, Unix time, or 0.0."""
        mark = _mark(self._step_log)
        if len(mark) < 2 or mark[1] == self._step_bytes:
            return 0.0
        self._step_bytes = mark[1]
        if step := _last_step(self._step_log, max(0, mark[1] - _TAIL_BYTES)):
            self.snapshot = snapshot._replace(steps=step.step + 1, loss=step.loss)
        return mark[0] / 1e9


class FollowedRuns:
    """The runs of a site below its folder of runs."""

    def __init__(self, root: Path, site: Site) -> None:
        self._root, self._site = root, site
        self._readers: dict[str, _Reader] = {}
        self._root_mark: _Mark = ()
        self._listed_s = 0.0

    def poll(self, states: Mapping[str, CachedState]) -> list[FollowedRun]:
        """Return the site's runs, oldest first. states: of jobs, by their ids. Raises ClusterError for the folder."""
        now_s, mark = time.time(), _mark(str(self._root))
        if mark != self._root_mark or now_s - self._listed_s > _RELIST_S or now_s - mark[0] / 1e9 < _SETTLED_S:
            paths = run_folder.run_dirs(self._root)[-MAX_RUNS:]
            self._readers = {path.name: self._readers.get(path.name) or _Reader(path) for path in paths}
            self._root_mark, self._listed_s = mark, now_s
        for reader in self._readers.values():
            reader.refresh(self._site, states, now_s)
        return [reader.run for reader in self._readers.values() if reader.run.record or reader.run.problem]

    def open_jobs(self) -> list[str]:
        """Return the ids of the jobs whose state only Slurm has."""
        snapshots = [reader.snapshot for reader in list(self._readers.values()) if reader.run.record]
        jobs = [status.open_job(snapshot, self._site) for snapshot in snapshots if snapshot]
        return [job.job_id for job in jobs if job and not job.host]


def _last_step(path: str, offset: int) -> Step | None:
    """Return the last step of a log after an offset; None if it is incomplete. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        lines = os.pread(descriptor, _TAIL_BYTES, offset).split(b"\n")
    finally:
        os.close(descriptor)
    try:
        return decode_json(lines[-2], Step) if len(lines) > 1 else None
    except msgspec.DecodeError:
        return None


def _mark(path: str) -> _Mark:
    """Return the time, size and number of a file, of which a change of the file changes one; or its error's number."""
    try:
        found = os.stat(path)  # noqa: PTH116 - a Path costs as much as the call, four times a run and second
    except OSError as error:
        return (error.errno or 0,)
    return found.st_mtime_ns, found.st_size, found.st_ino
