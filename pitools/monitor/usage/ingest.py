"""Read accounting into a store, from a site's `sacct` or from a file of its output: only what is new since the last.

sacct is asked for a day at a time, each in a transaction of its own, so that a long history neither times out nor is
lost by an interruption. The next call asks from the cluster's time of the last, less an hour: sacct lists short jobs
by their times only seconds after their end, and slurmctld keeps records back while slurmdbd is away. Rows that had not
ended are read again, wherever they are.
"""

from __future__ import annotations

import contextlib
import itertools
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, tzinfo
from typing import BinaryIO

import msgspec

from pitools.core import progress, subprocesses
from pitools.core.errors import DataError
from pitools.core.timestamps import rfc3339_to_unix, unix_to_rfc3339
from pitools.ledger.believed import believed_runs
from pitools.ledger.run_ledger import fleet_runs
from pitools.monitor.usage import store as stores
from pitools.monitor.usage.sacct_text import COLUMNS, BadRecord, JobRow, read_jobs
from pitools.site.schema import Site
from pitools.slurm.fields import new_separator, parse_error
from pitools.slurm.multi_query import stdout_or_raise
from pitools.slurm.transport import LOGIN_OUTPUT_END, QUERY_ENV, RunFunction, Transport, run_command

_DAY_S = 86_400
_OVERLAP_S = 3600
_QUERY_TIMEOUT_S = 300.0  # of a day on a busy cluster, whose database may be slow
_IDS_PER_CALL = _MAX_RUNS = 1000
_SHOWN_PROBLEMS = 3


class Ingest:
    """Counts of an ingest. rows: read. changed: of them new or changed. bad: records that could not be read; problems:
    the first of those, with their lines.
    """

    def __init__(self, where: str) -> None:
        self.where = where
        self.rows = self.changed = self.bad = 0
        self.problems: list[str] = []

    def __str__(self) -> str:
        text = f"{self.where}: {self.rows} rows read, {self.changed} new or changed"
        return f"{text}, {self.bad} unreadable: {'; '.join(self.problems)}" if self.bad else text


def ingest_file(store: sqlite3.Connection, site: str, file: BinaryIO, where: str, zone: tzinfo | None = None) -> Ingest:
    """Read the output of `sacct -P` into the store as a site's. zone: of its times; None is this machine's.

    It says nothing of the days that it lacks: the next ingest from sacct asks for all of its own time. Raises DataError
    without the columns, or without any row that can be read.
    """
    done = Ingest(where)
    with stores.transaction(store):
        _write(store, site, read_jobs(file, "|", zone, where), done, set())
        if done.bad and not done.rows:
            raise DataError(f"no row can be read: {'; '.join(done.problems)}", where=where)
    return done


def ingest_site(
    store: sqlite3.Connection,
    site: Site,
    transport: Transport,
    since: int,
    *,
    run: RunFunction = subprocesses.run,
    now: Callable[[], float] = time.time,
) -> Ingest:
    """Read a site's accounting since a Unix time into the store: what sacct shows to this user.

    With it, the goodput of the site's runs whose folders this user can read. Raises Unreachable, ClusterError; what was
    read before stays.
    """
    name, done = site.name, Ingest(site.name)
    transport = msgspec.structs.replace(transport, timeout_s=max(transport.timeout_s, _QUERY_TIMEOUT_S))
    left, covered = stores.unfinished(store, name), stores.covered(store, name)
    spans = _spans(covered, since, int(now()))
    with progress.progress_bar(f"accounting of {name}", len(spans), unit="days") as bar:
        for begin, end in spans:
            when = [f"--starttime={_rfc3339(begin)[:19]}", f"--endtime={_rfc3339(end)[:19] or 'now'}"]
            with _query(transport, when, run) as (answer, sep, clock), stores.transaction(store):
                _write(store, name, read_jobs(answer, sep, UTC), done, left)
                first, last = stores.covered(store, name) or (begin, begin)
                stores.set_covered(store, name, min(first, begin), max(last, min(end or clock, clock)))
            bar(1)
    _reread(store, name, transport, left, done, run)
    ran_since = covered[1] - _OVERLAP_S if covered and covered[0] <= since else since
    run_dirs = list(itertools.islice(fleet_runs(site, _rfc3339(ran_since)), _MAX_RUNS))
    found = [(ledger, rows or ()) for _, ledger, rows in believed_runs(site, run_dirs, lambda *_: None) if ledger]
    with stores.transaction(store):
        stores.set_goodput(store, name, {one.run_id: one.goodput for one, _ in found if one.goodput is not None})
        for one, rows in found:
            submits = [(row.raw_id, rfc3339_to_unix(row.submit)) for row in rows]
            stores.set_run(store, name, one.run_id, one.name, submits)
    return done


def _spans(covered: tuple[int, int] | None, since: int, now: int) -> list[tuple[int, int | None]]:
    """Return the spans to ask for, of a day at most; the end of the last is None, which is now."""
    first, last = covered or (since, since + _OVERLAP_S)
    # Days before what is covered: the newest first, so that what is covered never has a gap.
    spans: list[tuple[int, int | None]] = [(max(since, end - _DAY_S), end) for end in range(first, since, -_DAY_S)]
    begin = min(last, now) - _OVERLAP_S
    days = range(begin, max(now, begin + 1), _DAY_S)
    return [*spans, *((day, day + _DAY_S) for day in days[:-1]), (days[-1], None)]


def _reread(
    store: sqlite3.Connection,
    site: str,
    transport: Transport,
    left: set[tuple[str, int]],
    done: Ingest,
    run: RunFunction,
) -> None:
    """Read the rows again that had not ended, and that no answer had; what Slurm has forgotten ends."""
    ids = sorted({raw_id for raw_id, _ in left if raw_id.isdecimal()})
    for i in range(0, len(ids), _IDS_PER_CALL):
        which = [f"--jobs={','.join(ids[i : i + _IDS_PER_CALL])}"]
        with _query(transport, which, run) as (answer, sep, _), stores.transaction(store):
            _write(store, site, read_jobs(answer, sep, UTC), done, left)
    if left and not done.bad:
        with stores.transaction(store):
            stores.close_forgotten(store, site, left)


def _write(
    store: sqlite3.Connection,
    site: str,
    records: Iterable[JobRow | BadRecord],
    done: Ingest,
    left: set[tuple[str, int]],
) -> None:
    def rows() -> Iterator[tuple[object, ...]]:
        for record in records:
            if isinstance(record, BadRecord):
                done.bad += 1
                if len(done.problems) < _SHOWN_PROBLEMS:
                    done.problems.append(f"line {record.line}: {record.problem}")
                continue
            done.rows += 1
            left.discard((record.raw_id, record.submit))
            yield (site, *record)

    before = store.total_changes
    store.executemany(stores.UPSERT, rows())
    done.changed += store.total_changes - before


@contextlib.contextmanager
def _query(transport: Transport, which: Sequence[str], run: RunFunction) -> Iterator[tuple[BinaryIO, str, int]]:
    """Run sacct for every start of all jobs; yield a file of its output, the separator in it, and the cluster's time.

    This machine's clock may be wrong; Slurm's own do not work unless the cluster's agree.
    """
    sep = new_separator()
    command = ["sacct", "-a", "-X", "-D", "--noconvert", *which, "-P", f"--delimiter={sep}", "-o", ",".join(COLUMNS)]
    with tempfile.TemporaryFile() as answer:
        timed = ["sh", "-c", 'date +%s && exec "$@"', "sh", *command]
        done = run_command(transport, timed, env=QUERY_ENV, stdout=answer, run=run)
        stdout_or_raise(transport, done._replace(argv=("sacct",)))
        answer.seek(0)
        line = answer.readline()
        while transport.host and line and not line.endswith(LOGIN_OUTPUT_END.encode()):
            line = answer.readline()
        clock = answer.readline() if transport.host else line
        if not clock.strip().isdigit():
            raise parse_error("date", "not a time", clock.decode(errors="replace"))
        yield answer, sep, int(clock)


def _rfc3339(unix_s: int | None) -> str:
    return "" if unix_s is None else unix_to_rfc3339(unix_s)
