"""All jobs of a plan, or one node's part of them: by worker processes, going on where others stopped."""

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

# Less than this is done before worker processes would have begun.
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
    """Do what is not done yet, and return an entry for each job. With others that do the same the work is shared.

    run: whose work it is; what journals of this run say is believed, of others' only what is found to be so. done:
    entries that are known otherwise. part: (i, n) for the i-th of n nodes.
    """
    todo = plan.jobs[len(plan.jobs) * part[0] // part[1] : len(plan.jobs) * (part[0] + 1) // part[1]]
    queue = _JobQueue({plan.job_key(job): job for job in todo}, staging, run, finished or {})
    total = sum(plan.raw_bytes(job) for job in todo)
    hashed = sum(min(RANGE_BYTES, source.bytes) for source in plan.sources)
    workers = 1 if max(total, hashed) <= _SERIAL_BYTES else min(workers, len(todo))
    entries = dict(queue.believed)
    with progress_bar("ingest", total) as advance:
        advance(sum(plan.raw_bytes(job) for job in todo if plan.job_key(job) in entries))
        for job, entry in worker_pool.run_jobs(partial(ShardWorker, plan, staging, run), queue.jobs(), workers=workers):
            entries[entry.key] = entry
            advance(plan.raw_bytes(job))
    return entries


class _JobQueue:
    """The jobs that are left, in order, while others may do the same ones from elsewhere.

    Where another run is at work the first job is one at random, and so is the next one wherever that run has been: so
    the two soon are apart, and a job is done twice only where both take it up before either has written it down. What
    others have done comes last, to be compared with what they wrote down. believed: entries of what this run has done.
    """

    def __init__(self, jobs: Mapping[str, Job], staging: StagingDir, run: str, done: Mapping[str, FinishedJob]) -> None:
        revalidate_nfs(staging.journal)  # on a network file system, other nodes' journals may not show yet
        self._jobs, self._keys, self._run = jobs, list(jobs), run
        IngestJournal(staging.journal, run).close()  # by its name others see that somebody is here
        self._journals = JournalReader(staging.journal)
        self._journals.poll()
        own_jobs = {key: entry for key, entry in self._journals.entries.items() if self._journals.runs[key] == run}
        self.believed = {key: entry for key, entry in {**own_jobs, **done}.items() if key in jobs}
        self._given = set(self.believed)

    def jobs(self) -> Iterator[tuple[Job, FinishedJob | None]]:
        """A job, and what another run has written down of it; one by one, as they are asked for."""
        at = self._next_unfinished() if self._journals.has_other_runs(self._run) else 0
        while at is not None:
            if at == len(self._keys):  # those before the first one
                at = self._next_unfinished()
                continue
            key = self._keys[at]
            at += 1
            if key in self._given:
                continue
            if key in self._journals.entries:
                at = self._next_unfinished()
                continue
            self._given.add(key)
            yield self._jobs[key], None
            self._journals.poll()
            if any(run != self._run and key in self._given for run, key in self._journals.new):
                at = self._next_unfinished()
        for key in self._keys:
            if key not in self._given:
                yield self._jobs[key], self._journals.entries[key]

    def _next_unfinished(self) -> int | None:
        """Any job that nobody has done or been given here; None where there is none."""
        left = [at for at, key in enumerate(self._keys) if key not in self._given and key not in self._journals.entries]
        return secrets.choice(left) if left else None


def save_plan(plan: IngestPlan, staging: StagingDir, run: str) -> str:
    """Leave the plan in the working folder, for the other nodes of this run; returns its digest. Raises OSError."""
    data = pickle.dumps((plan, staging))
    path = staging.path / f"plan.{run}"
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(data)
    return hashlib.sha256(data).hexdigest()


def run_part(staging_path: str, plan_digest: str, number: int, count: int, workers: int) -> int:
    """Do one node's part of a plan in a working folder, and return how many jobs it had. Called on that node.

    plan_digest: the run whose it is, and its digest, as `<run>.<digest>`. Raises DataError, NoSpace, ClusterError.
    """
    run, _, told = plan_digest.partition(".")
    path = Path(staging_path) / f"plan.{run}"
    try:
        data = path.read_bytes()
        # To load a pickle is to run it: the folder may be open to others, so nothing but our own will do.
        if hashlib.sha256(data).hexdigest() != told:
            raise ClusterError("it is not the plan that was left there", where=str(path), hint="run the ingest again")
        made, place = pickle.loads(data)  # noqa: S301
        return len(
            run_plan(made, place, run=run, workers=workers or worker_pool.default_workers(), part=(number, count))
        )
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not (Path(staging_path) / "store").is_dir():
            return 0  # another ingest of the same was first: whoever began this one finds its version
        raise from_os_error(error, Path(staging_path)) from error
