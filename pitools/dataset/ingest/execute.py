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
from pitools.core.fs import os_error
from pitools.core.progress import bar
from pitools.dataset.ingest.journal import Entry, Journal, Reader
from pitools.dataset.ingest.plan import Job, Plan
from pitools.dataset.ingest.shard_worker import Maker
from pitools.dataset.ingest.staging_dir import Place
from pitools.store.digest import RANGE
from pitools.store.version_state import refresh

# Less than this is done before worker processes would have begun.
_SMALL = 64 << 20


def complete(
    plan: Plan,
    place: Place,
    *,
    run: str,
    workers: int,
    done: dict[str, Entry] | None = None,
    part: tuple[int, int] = (0, 1),
) -> dict[str, Entry]:
    """Do what is not done yet, and return an entry for each job. With others that do the same the work is shared.

    run: whose work it is; what journals of this run say is believed, of others' only what is found to be so. done:
    entries that are known otherwise. part: (i, n) for the i-th of n nodes.
    """
    todo = plan.jobs[len(plan.jobs) * part[0] // part[1] : len(plan.jobs) * (part[0] + 1) // part[1]]
    queue = _Queue({plan.key(job): job for job in todo}, place, run, done or {})
    total = sum(plan.raw_bytes(job) for job in todo)
    hashed = sum(min(RANGE, source.bytes) for source in plan.sources)
    workers = 1 if max(total, hashed) <= _SMALL else min(workers, len(todo))
    entries = dict(queue.believed)
    with bar("ingest", total) as advance:
        advance(sum(plan.raw_bytes(job) for job in todo if plan.key(job) in entries))
        for job, entry in worker_pool.run(partial(Maker, plan, place, run), queue.jobs(), workers=workers):
            entries[entry.key] = entry
            advance(plan.raw_bytes(job))
    return entries


class _Queue:
    """The jobs that are left, in order, while others may do the same ones from elsewhere.

    Where another run is at work the first job is one at random, and so is the next one wherever that run has been: so
    the two soon are apart, and a job is done twice only where both take it up before either has written it down. What
    others have done comes last, to be compared with what they wrote down. believed: entries of what this run has done.
    """

    def __init__(self, jobs: Mapping[str, Job], place: Place, run: str, done: Mapping[str, Entry]) -> None:
        refresh(place.journal)  # on a network file system, other nodes' journals may not show yet
        self._jobs, self._keys, self._run = jobs, list(jobs), run
        Journal(place.journal, run).close()  # by its name others see that somebody is here
        self._journals = Reader(place.journal)
        self._journals.look()
        mine = {key: entry for key, entry in self._journals.entries.items() if self._journals.runs[key] == run}
        self.believed = {key: entry for key, entry in {**mine, **done}.items() if key in jobs}
        self._given = set(self.believed)

    def jobs(self) -> Iterator[tuple[Job, Entry | None]]:
        """A job, and what another run has written down of it; one by one, as they are asked for."""
        at = self._elsewhere() if self._journals.others(self._run) else 0
        while at is not None:
            if at == len(self._keys):  # those before the first one
                at = self._elsewhere()
                continue
            key = self._keys[at]
            at += 1
            if key in self._given:
                continue
            if key in self._journals.entries:
                at = self._elsewhere()
                continue
            self._given.add(key)
            yield self._jobs[key], None
            self._journals.look()
            if any(run != self._run and key in self._given for run, key in self._journals.new):
                at = self._elsewhere()
        for key in self._keys:
            if key not in self._given:
                yield self._jobs[key], self._journals.entries[key]

    def _elsewhere(self) -> int | None:
        """Any job that nobody has done or been given here; None where there is none."""
        left = [at for at, key in enumerate(self._keys) if key not in self._given and key not in self._journals.entries]
        return secrets.choice(left) if left else None


def keep(plan: Plan, place: Place, run: str) -> str:
    """Leave the plan in the working folder, for the other nodes of this run; returns its digest. Raises OSError."""
    data = pickle.dumps((plan, place))
    path = place.path / f"plan.{run}"
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(data)
    return hashlib.sha256(data).hexdigest()


def take_part(work: str, plan: str, number: int, count: int, workers: int) -> int:
    """Do one node's part of a plan in a working folder, and return how many jobs it had. Called on that node.

    plan: the run whose it is, and its digest, as `<run>.<digest>`. Raises DataError, NoSpace, ClusterError.
    """
    run, _, told = plan.partition(".")
    path = Path(work) / f"plan.{run}"
    try:
        data = path.read_bytes()
        # To load a pickle is to run it: the folder may be open to others, so nothing but our own will do.
        if hashlib.sha256(data).hexdigest() != told:
            raise ClusterError("it is not the plan that was left there", where=str(path), hint="run the ingest again")
        made, place = pickle.loads(data)  # noqa: S301
        return len(
            complete(made, place, run=run, workers=workers or worker_pool.default_workers(), part=(number, count))
        )
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not (Path(work) / "store").is_dir():
            return 0  # another ingest of the same was first: whoever began this one finds its version
        raise os_error(error, Path(work)) from error
