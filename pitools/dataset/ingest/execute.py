"""Run the unfinished jobs of a plan, or one node's part of them, in worker processes."""

from __future__ import annotations

import hashlib
import os
import pickle
import secrets
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from pitools.core import worker_pool
from pitools.core.errors import ClusterError
from pitools.core.fs import from_os_error
from pitools.core.progress import progress_bar
from pitools.dataset.ingest.journal import FinishedJob, IngestJournal, JournalReader
from pitools.dataset.ingest.plan import IngestPlan, Job
from pitools.dataset.ingest.shard_worker import ShardWorker
from pitools.dataset.ingest.work_dir import IngestWorkDir
from pitools.store.digest import RANGE_BYTES
from pitools.store.version_state import revalidate_nfs

# This much is done in this process before worker processes would have started.
_SERIAL_BYTES = 64 << 20


def run_plan(
    plan: IngestPlan,
    work_dir: IngestWorkDir,
    *,
    session: str,
    workers: int,
    finished: dict[str, FinishedJob] | None = None,
    part: tuple[int, int] = (0, 1),
) -> dict[str, FinishedJob]:
    """Do the unfinished jobs and return an entry for each job; concurrent sessions of the same plan share the work.

    session: id of this session; its journals are trusted, shards in journals of other sessions are verified. finished:
    further trusted entries. part: (i, n) for the i-th of n nodes.
    """
    todo = plan.jobs[len(plan.jobs) * part[0] // part[1] : len(plan.jobs) * (part[0] + 1) // part[1]]
    queue = _JobQueue({plan.job_key(job): job for job in todo}, work_dir, session, finished or {})
    total = sum(plan.raw_bytes(job) for job in todo)
    hashed = sum(min(RANGE_BYTES, file.bytes) for file in plan.files)
    workers = 1 if max(total, hashed) <= _SERIAL_BYTES else min(workers, len(todo))
    entries = dict(queue.trusted)
    with progress_bar("ingest", total) as advance:
        advance(sum(plan.raw_bytes(job) for job in todo if plan.job_key(job) in entries))
        for job, entry in worker_pool.run_tasks(
            queue.jobs(), partial(ShardWorker, plan, work_dir, session), workers=workers
        ):
            entries[entry.key] = entry
            advance(plan.raw_bytes(job))
    return entries


class _JobQueue:
    """Yield the unfinished jobs in order, while other sessions may work on the same jobs.

    If another session is active, the first job is random, and so is the next after each job that the other session did.
    The two soon work far apart: a job is done twice only if both start it before either writes its journal entry. Jobs
    done by other sessions are last, to be verified. trusted: entries of this session.
    """

    def __init__(
        self, jobs: Mapping[str, Job], work_dir: IngestWorkDir, session: str, done: Mapping[str, FinishedJob]
    ) -> None:
        revalidate_nfs(work_dir.journal)  # NFS may not show other nodes' journals yet
        self._jobs, self._keys, self._session = jobs, list(jobs), session
        IngestJournal(work_dir.journal, session).close()  # the file's name shows other sessions that this one is active
        self._journals = JournalReader(work_dir.journal)
        self._journals.poll()
        own_jobs = {
            key: entry for key, entry in self._journals.entries.items() if self._journals.sessions[key] == session
        }
        self.trusted = {key: entry for key, entry in {**own_jobs, **done}.items() if key in jobs}
        self._given = set(self.trusted)

    def jobs(self) -> Iterator[tuple[Job, FinishedJob | None]]:
        """Yield each job, and another session's journal entry for it."""
        index = self._next_unfinished() if self._journals.has_other_sessions(self._session) else 0
        while index is not None:
            if index == len(self._keys):  # wrap around to the jobs before a random start
                index = self._next_unfinished()
                continue
            key = self._keys[index]
            index += 1
            if key in self._given:
                continue
            if key in self._journals.entries:
                index = self._next_unfinished()
                continue
            self._given.add(key)
            yield self._jobs[key], None
            self._journals.poll()
            if any(session != self._session and key in self._given for session, key in self._journals.new):
                index = self._next_unfinished()
        for key in self._keys:
            if key not in self._given:
                yield self._jobs[key], self._journals.entries[key]

    def _next_unfinished(self) -> int | None:
        """Return the index of a random job that is neither yielded nor done by any session; None if there is none."""
        done = self._given | self._journals.entries.keys()
        unfinished = [index for index, key in enumerate(self._keys) if key not in done]
        return secrets.choice(unfinished) if unfinished else None


def save_plan(plan: IngestPlan, work_dir: IngestWorkDir, session: str) -> str:
    """Write the plan into the working folder for the other nodes of this session; return its digest. Raises OSError."""
    data = pickle.dumps((plan, work_dir))
    path = work_dir.path / f"plan.{session}"
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(data)
    return hashlib.sha256(data).hexdigest()


def run_part(work_path: str, plan_id: str, number: int, count: int, workers: int) -> int:
    """Do this node's part of the plan in a working folder and return its number of jobs.

    plan_id: session id and digest of the plan, `<session>.<digest>`. Raises DataError, NoSpace, ClusterError.
    """
    session, _, expected = plan_id.partition(".")
    path = Path(work_path) / f"plan.{session}"
    try:
        data = path.read_bytes()
        # Loading a pickle executes code, and other users may write to the folder: require the plan's own digest.
        if hashlib.sha256(data).hexdigest() != expected:
            raise ClusterError("plan: changed since it was written", where=str(path), hint="run the ingest again")
        plan, work_dir = pickle.loads(data)  # noqa: S301
        workers = workers or worker_pool.default_workers()
        return len(run_plan(plan, work_dir, session=session, workers=workers, part=(number, count)))
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not (Path(work_path) / "store").is_dir():
            return 0  # a concurrent ingest of the same recordings published the version first
        raise from_os_error(error, Path(work_path)) from error
