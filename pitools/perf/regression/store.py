"""Keep measurements in one SQLite file, which several processes may add to; a point, once added, is not changed.

A series is a measure at one site, on one partition and device. Each point names the software that it was measured
with: a step where the software is the same on both sides is the cluster's, not the code's. What repeated runs showed
of a step is stored, too, so that they are not repeated each night.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Literal, NamedTuple

from pitools.core.errors import ClusterError, DataError, TryLater
from pitools.core.record import Record
from pitools.perf.regression.repeats import Effect

_LOCK_TIMEOUT_S = 30.0
# Rollback journal, SQLite's default: the write-ahead log needs memory that the processes share, so one host.
_SCHEMA = """
CREATE TABLE IF NOT EXISTS points (
  site TEXT NOT NULL, partition TEXT NOT NULL, device TEXT NOT NULL, measure TEXT NOT NULL, t TEXT NOT NULL,
  source TEXT NOT NULL, software TEXT NOT NULL, better TEXT NOT NULL, value REAL NOT NULL,
  PRIMARY KEY (site, partition, device, measure, t, source)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS reruns (
  site TEXT NOT NULL, partition TEXT NOT NULL, device TEXT NOT NULL, measure TEXT NOT NULL, source TEXT NOT NULL,
  effect REAL NOT NULL, low REAL NOT NULL, high REAL NOT NULL,
  PRIMARY KEY (site, partition, device, measure, source)) WITHOUT ROWID;
CREATE TRIGGER IF NOT EXISTS no_replace BEFORE INSERT ON points WHEN EXISTS (SELECT 1 FROM points WHERE
  (site, partition, device, measure, t, source) = (new.site, new.partition, new.device, new.measure, new.t, new.source))
  BEGIN SELECT RAISE(IGNORE); END;
CREATE TRIGGER IF NOT EXISTS no_update BEFORE UPDATE ON points BEGIN SELECT RAISE(ABORT, 'append-only'); END;
CREATE TRIGGER IF NOT EXISTS no_delete BEFORE DELETE ON points BEGIN SELECT RAISE(ABORT, 'append-only'); END;
"""
SeriesKey = tuple[str, str, str, str]  # site, partition, device, measure
_FIELDS = ("site", "partition", "device", "measure", "t", "source", "software", "better", "value")


class Point(Record, frozen=True, kw_only=True, tag="pit.perf-point/1"):
    """One measurement. measure: its name with its unit, such as `bc/step_s`. t: RFC 3339 UTC. source: a run or commit.

    software: digests of code and packages, and the commit, with + between; "" if unknown. better: the direction of an
    improvement.
    """

    measure: str
    value: float
    t: str
    site: str = ""
    partition: str = ""
    device: str = ""
    source: str = ""
    software: str = ""
    better: Literal["lower", "higher"] = "lower"


class Series(NamedTuple):
    """The points of one measure on the same hardware, oldest first."""

    points: tuple[Point, ...]

    @property
    def key(self) -> SeriesKey:
        """Site, partition, device and measure."""
        first = self.points[0]
        return first.site, first.partition, first.device, first.measure


def add_points(path: Path, points: Iterable[Point]) -> int:
    """Add measurements to a store, which is made if missing; return how many were new. Raises as `_opened`."""
    rows = [tuple(getattr(point, name) for name in _FIELDS) for point in points]
    with _opened(path) as store, store:
        before = store.total_changes
        store.executemany(f"INSERT OR IGNORE INTO points VALUES ({', '.join('?' * len(_FIELDS))})", rows)  # noqa: S608
        return store.total_changes - before


def read_series(path: Path) -> list[Series]:
    """Return all series of a store. Raises ClusterError without one, else as `_opened`."""
    if not path.is_file():
        hint = f"pit perf watch {path} --add RUN"
        raise ClusterError("no such store of measurements", where=str(path), hint=hint)
    with _opened(path) as store:
        order = "site, partition, device, measure, t, source"
        rows = store.execute(f"SELECT {', '.join(_FIELDS)} FROM points ORDER BY {order}")  # noqa: S608
        points = [Point(**dict(zip(_FIELDS, row, strict=True))) for row in rows]
    groups = groupby(points, lambda point: (point.site, point.partition, point.device, point.measure))
    return [Series(tuple(group)) for _, group in groups]


def add_rerun(path: Path, key: SeriesKey, source: str, effect: Effect) -> None:
    """Add what repeating runs showed of the step of a series whose first point is of `source`. Raises as `_opened`."""
    with _opened(path) as store, store:
        store.execute("INSERT OR REPLACE INTO reruns VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (*key, source, *effect))


def read_rerun(path: Path, key: SeriesKey, source: str) -> Effect | None:
    """Return what repeating runs showed of a step; None if none were repeated. Raises as `_opened`."""
    query = "SELECT effect, low, high FROM reruns WHERE (site, partition, device, measure, source) = (?, ?, ?, ?, ?)"
    with _opened(path) as store:
        row = store.execute(query, (*key, source)).fetchone()
    return Effect(*row) if row else None


@contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a store. Raises TryLater while another process writes for long, DataError for another kind of file."""
    try:
        store = sqlite3.connect(path, timeout=_LOCK_TIMEOUT_S)
        try:
            store.executescript(_SCHEMA)
            yield store
        finally:
            store.close()
    except sqlite3.OperationalError as error:
        if "locked" in str(error):
            raise TryLater(f"locked by another process for {_LOCK_TIMEOUT_S:.0f} s", where=str(path)) from error
        raise ClusterError(f"store of measurements: {error}", where=str(path)) from error
    except sqlite3.DatabaseError as error:
        hint = "name another file: it is made where there is none"
        raise DataError(f"not a store of measurements: {error}", where=str(path), hint=hint) from error
