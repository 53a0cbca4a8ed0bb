"""The store of accounting rows: one SQLite file, its owner's alone, of one site or of several."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from pitools.core import trust
from pitools.core.errors import ConfigError, DataError, PitError, TryLater
from pitools.core.fs import from_os_error
from pitools.core.user_dirs import ensure_private_dir, xdg_dir
from pitools.monitor.usage.sacct_text import JobRow

_VERSION = 1
_LOCK_S = 30.0
_CACHE_KIB = 128 << 10  # a million jobs in any order, without writing a page twice

# A row is a row of slurmdbd's job table, whose key is the job's number and the time of its submission: a requeued job
# has several. goodput has the runs whose ledger is known. covered: from when to when a site's rows were read.
_SCHEMA = f"""
CREATE TABLE job (
    site TEXT NOT NULL, raw_id TEXT NOT NULL, submit INTEGER NOT NULL, job_id TEXT NOT NULL, user TEXT NOT NULL,
    account TEXT NOT NULL, qos TEXT NOT NULL, partition TEXT NOT NULL, state TEXT NOT NULL, run TEXT NOT NULL,
    tag TEXT NOT NULL, eligible INTEGER, start INTEGER, end INTEGER, elapsed_s INTEGER NOT NULL,
    nodes INTEGER NOT NULL, cpus INTEGER NOT NULL, gpus INTEGER NOT NULL, gpu_util REAL,
    PRIMARY KEY (site, raw_id, submit)
) WITHOUT ROWID;
CREATE INDEX job_unfinished ON job (site) WHERE end IS NULL;
CREATE TABLE goodput (site TEXT NOT NULL, run TEXT NOT NULL, goodput REAL NOT NULL, PRIMARY KEY (site, run));
CREATE TABLE covered (site TEXT PRIMARY KEY, since INTEGER NOT NULL, until INTEGER NOT NULL);
PRAGMA user_version = {_VERSION};
"""
_VALUES = tuple(name for name in JobRow._fields if name not in ("raw_id", "submit"))
# A row that has ended does not run again: an older answer than the last one changes nothing.
UPSERT = """
INSERT INTO job (site, {fields}) VALUES (?{marks})
ON CONFLICT (site, raw_id, submit) DO UPDATE SET ({values}) = ({excluded})
WHERE ({values}) IS NOT ({excluded})
AND (excluded.end IS NOT NULL OR job.state = 'UNKNOWN' OR job.end IS NULL AND excluded.elapsed_s >= job.elapsed_s)
""".format(
    fields=", ".join(JobRow._fields),
    marks=", ?" * len(JobRow._fields),
    values=", ".join(_VALUES),
    excluded=", ".join(
        f"coalesce(nullif(excluded.{name}, ''), job.{name})" if name in ("run", "tag") else f"excluded.{name}"
        for name in _VALUES
    ),
)


def default_path() -> Path:
    """Return the path of the user's own store, in their folder of state. Raises ClusterError if others can write it."""
    return ensure_private_dir(xdg_dir("XDG_STATE_HOME", ".local/state") / "pitools") / "usage.sqlite"


@contextlib.contextmanager
def open_store(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a store, or create it for this user alone. What was not committed is rolled back at the end.

    Raises ConfigError if others can write it, DataError for another file, TryLater while another process writes.
    """
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600))
        untrusted = trust.find_untrusted(path, trust.trusted_users())
    except OSError as error:
        raise from_os_error(error, path) from error
    if untrusted:
        problem = f"others can change the store of usage {path} (expected only you and root)"
        raise ConfigError(problem, where=str(untrusted.path), hint="chmod go-w it, or use another with --store")
    connection = sqlite3.connect(path, timeout=_LOCK_S, isolation_level=None)
    try:
        connection.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
        connection.execute("BEGIN IMMEDIATE")
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version not in (0, _VERSION):
            raise DataError(
                f"a store of version {version} (expected {_VERSION})", where=str(path), hint="use another with --store"
            )
        if version == 0:
            create_tables(connection)
        connection.execute("COMMIT")
        yield connection
    except sqlite3.Error as error:
        raise _store_error(error, path) from error
    finally:
        connection.close()


def create_tables(store: sqlite3.Connection) -> None:
    """Create the tables of an empty store."""
    for statement in _SCHEMA.split(";\n"):
        store.execute(statement)


def _store_error(error: sqlite3.Error, path: Path) -> PitError:
    if isinstance(error, sqlite3.OperationalError) and "locked" in str(error):
        return TryLater(f"another process writes it, for more than {_LOCK_S:g} s", where=str(path))
    if isinstance(error, sqlite3.OperationalError):
        return TryLater(str(error), where=str(path), hint=f"is there space? df {path.parent}")
    hint = f"move it away, and read the accounting again: mv {path} {path}.damaged"
    return DataError(f"not a store of usage: {error}", where=str(path), hint=hint)


@contextlib.contextmanager
def transaction(store: sqlite3.Connection) -> Iterator[None]:
    """Commit at the end of the block, or roll back if it raises."""
    store.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        store.execute("ROLLBACK")
        raise
    store.execute("COMMIT")


def covered(store: sqlite3.Connection, site: str) -> tuple[int, int] | None:
    """Return from when to when a site's accounting was read, in Unix time; None if it never was."""
    row = store.execute("SELECT since, until FROM covered WHERE site = ?", (site,)).fetchone()
    return (row[0], row[1]) if row else None


def set_covered(store: sqlite3.Connection, site: str, since: int, until: int) -> None:
    """Record from when to when a site's accounting was read."""
    store.execute("INSERT OR REPLACE INTO covered VALUES (?, ?, ?)", (site, since, until))


def unfinished(store: sqlite3.Connection, site: str) -> set[tuple[str, int]]:
    """Return the keys (number, submission) of the rows that had not ended when they were last read."""
    return set(store.execute("SELECT raw_id, submit FROM job WHERE site = ? AND end IS NULL", (site,)))


def close_forgotten(store: sqlite3.Connection, site: str, keys: set[tuple[str, int]]) -> None:
    """End rows that Slurm does not list any more, at the time until which they are known to have run."""
    store.executemany(
        "UPDATE job SET state = 'UNKNOWN', end = coalesce(start + elapsed_s, submit)"
        " WHERE site = ? AND raw_id = ? AND submit = ? AND end IS NULL",
        [(site, *key) for key in sorted(keys)],
    )


def set_goodput(store: sqlite3.Connection, site: str, goodput: dict[str, float]) -> None:
    """Record the goodput of runs, from their ledgers."""
    store.executemany("INSERT OR REPLACE INTO goodput VALUES (?, ?, ?)", [(site, *item) for item in goodput.items()])


def set_run(store: sqlite3.Connection, site: str, run: str, tag: str, keys: list[tuple[str, float | None]]) -> None:
    """Record the run, and its tag, of jobs (number, submission) that have another name: tasks of an array of runs."""
    update = "UPDATE job SET run = ?, tag = coalesce(nullif(tag, ''), ?) WHERE run = '' AND (site, raw_id, submit) = "
    store.executemany(f"{update}(?, ?, ?)", [(run, tag, site, *key) for key in keys])
