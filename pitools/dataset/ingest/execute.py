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
from pitools.dataset.ingest.staging_dir import StagingDir
from pitools.store.digest import RANGE_BYTES
from pitools.store.version_state import revalidate_nfs

# This much is done in this process before worker processes would have started.
_SERIAL_BYTES = 64 << 20


def run_plan(
    plan: IngestPlan,
    staging: StagingDir,
    *,
    run: str,
    workers: int,
    finished: dict[str, FinishedJob] | None = None,
    part: tuple[int, int] = (0, 1),
) -> dict[str, FinishedJob]:
    """Do the unfinished jobs and return an entry for each job; concurrent runs of the same plan share the work.

    run: id of this run; its journals are trusted, shards in journals of other runs are verified. finished: further
    trusted entries. part: (i, n) for the i-th of n nodes.
    """
    todo = plan.jobs[len(plan.jobs) * part[0] // part[1] : len(plan.jobs) * (part[0] + 1) // part[1]]
    queue = _JobQueue({plan.job_key(job): job for job in todo}, staging, run, finished or {})
    total = sum(plan.raw_bytes(job) for job in todo)
    hashed = sum(min(RANGE_BYTES, source.bytes) for source in plan.sources)
    workers = 1 if max(total, hashed) <= _SERIAL_BYTES else min(workers, len(todo))
    entries = dict(queue.trusted)
    with progress_bar("ingest", total) as advance:
        advance(sum(plan.raw_bytes(job) for job in todo if plan.job_key(job) in entries))
        for job, entry in worker_pool.run_tasks(
            partial(ShardWorker, plan, staging, run), queue.jobs(), workers=workers
        ):
            entries[entry.key] = entry
            advance(plan.raw_bytes(job))
    return entries


class _JobQueue:
    """Yield the unfinished jobs in order, while other runs may work on the same jobs.

    If another run is active, the first job is random, and so is the next after each job that the other run did. The
    two runs soon work far apart: a job is done twice only if both start it before either writes its journal entry.
    Jobs done by other runs are last, to be verified. trusted: entries of this run.
    """

    def __init__(self, jobs: Mapping[str, Job], staging: StagingDir, run: str, done: Mapping[str, FinishedJob]) -> None:
        revalidate_nfs(staging.journal)  # NFS may not show other nodes' journals yet
        self._jobs, self._keys, self._run = jobs, list(jobs), run
        IngestJournal(staging.journal, run).close()  # the file's name shows other runs that this one is active
        self._journals = JournalReader(staging.journal)
        self._journals.poll()
        own_jobs = {key: entry for key, entry in self._journals.entries.items() if self._journals.runs[key] == run}
        self.trusted = {key: entry for key, entry in {**own_jobs, **done}.items() if key in jobs}
        self._given = set(self.trusted)

    def jobs(self) -> Iterator[tuple[Job, FinishedJob | None]]:
        """Yield each job, and another run's journal entry for it."""
        index = self._next_unfinished() if self._journals.has_other_runs(self._run) else 0
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
            if any(run != self._run and key in self._given for run, key in self._journals.new):
                index = self._next_unfinished()
        for key in self._keys:
            if key not in self._given:
                yield self._jobs[key], self._journals.entries[key]

    def _next_unfinished(self) -> int | None:
        """Return the index of a random job that is neither yielded nor done by any run; None if there is none."""
        done = self._given | self._journals.entries.keys()
        unfinished = [index for index, key in enumerate(self._keys) if key not in done]
        return secrets.choice(unfinished) if unfinished else None


def save_plan(plan: IngestPlan, staging: StagingDir, run: str) -> str:
    """Write the plan into the staging folder for the other nodes of this run; return its digest. Raises OSError."""
    data = pickle.dumps((plan, staging))
    path = staging.path / f"plan.{run}"
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(data)
    return hashlib.sha256(data).hexdigest()


def run_part(staging_path: str, plan_digest: str, number: int, count: int, workers: int) -> int:
    """Do this node's part of the plan in a staging folder and return its number of jobs.

    plan_digest: run id and digest of the plan, `<run>.<digest>`. Raises DataError, NoSpace, ClusterError.
    """
    run, _, expected = plan_digest.partition(".")
    path = Path(staging_path) / f"plan.{run}"
    try:
        data = path.read_bytes()
        # Loading a pickle executes code, and other users may write to the folder: require the plan's own digest.
        if hashlib.sha256(data).hexdigest() != expected:
            raise ClusterError("plan: changed since it was written", where=str(path), hint="run the ingest again")
        plan, staging = pickle.loads(data)  # noqa: S301
        workers = workers or worker_pool.default_workers()
        return len(run_plan(plan, staging, run=run, workers=workers, part=(number, count)))
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not (Path(staging_path) / "store").is_dir():
            return 0  # a concurrent ingest of the same recordings published the version first
        raise from_os_error(error, Path(staging_path)) from error
