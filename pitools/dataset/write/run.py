"""All jobs of a plan, or one node's part of them: by worker processes, going on where others stopped."""

from __future__ import annotations

import hashlib
import os
import pickle
from functools import partial
from pathlib import Path

from pitools.core.errors import ClusterError
from pitools.core.files import os_error
from pitools.core.progress import bar
from pitools.dataset.write import crew
from pitools.dataset.write.journal import Entry, Reader
from pitools.dataset.write.maker import Known, Maker
from pitools.dataset.write.place import Place
from pitools.dataset.write.plan import Plan
from pitools.store.catalog import refresh
from pitools.store.digest import RANGE

# Less than this is done before worker processes would have begun.
_SMALL = 64 << 20


def complete(
    plan: Plan, place: Place, *, run: str, workers: int, done: dict[str, Entry] | None = None,
    part: tuple[int, int] = (0, 1),
) -> dict[str, Entry]:  # fmt: skip
    """Do what is not done yet, and return an entry for each job.

    run: whose work it is; what journals of this run say is believed, of others' only what is found to be so. done:
    entries that are known otherwise. part: (i, n) for the i-th of n nodes.
    """
    known = known_by(place, run, done or {})
    todo = plan.jobs[len(plan.jobs) * part[0] // part[1] : len(plan.jobs) * (part[0] + 1) // part[1]]
    total = sum(plan.raw_bytes(job) for job in todo)
    hashed = sum(min(RANGE, source.bytes) for source in plan.sources)
    workers = 1 if max(total, hashed) <= _SMALL else min(workers, len(todo))
    entries: dict[str, Entry] = {}
    with bar("ingest", total) as advance:
        for job, entry in crew.run(partial(Maker, plan, place, run, known), todo, workers=workers):
            entries[entry.key] = entry
            advance(plan.raw_bytes(job))
    return entries


def known_by(place: Place, run: str, done: dict[str, Entry]) -> Known:
    """What journals, and the caller, know to be done."""
    refresh(place.journal)  # on a network file system, other nodes' journals may not show yet
    journals = Reader(place.journal)
    journals.look()
    trusted = {key for key, whose in journals.runs.items() if whose == run} | done.keys()
    return Known(entries=journals.entries | done, trusted=frozenset(trusted))


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
        return len(complete(made, place, run=run, workers=workers or crew.default_workers(), part=(number, count)))
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not (Path(work) / "store").is_dir():
            return 0  # another ingest of the same was first: whoever began this one finds its version
        raise os_error(error, Path(work)) from error
