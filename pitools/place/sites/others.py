"""How long others' jobs waited at a site these last two weeks, as its accounting has it; asked for once a day."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec

from pitools.core.record import Record
from pitools.place.sites import cache, snapshot
from pitools.site.model import Site
from pitools.slurm.answer import count, moment, rows, separator, span_s, unreadable
from pitools.slurm.batch import answer, batch

DAYS = 14
_DAY_S = 86400.0
_REFUSED_S = 600.0
_MOST = 50_000
_FEW = 10  # of fewer, quantiles say nothing
_COLUMNS = "JobIDRaw,Partition,NNodes,TimelimitRaw,Submit,Eligible,Start"


class Wait(msgspec.Struct, frozen=True, array_like=True):
    """One job that started: what it asked for, when it could have started (Unix time), and how long it then waited."""

    partition: str
    nodes: int
    limit_s: int
    eligible_s: float
    wait_s: float


class Waits(Record, frozen=True, kw_only=True, tag="pit.waits/1"):
    """The site's own history, oldest first."""

    jobs: tuple[Wait, ...]


def read(site: Site, timeout_s: float) -> Waits:
    """The waits of a site's jobs, at most a day old. One call. Raises Unreachable, ClusterError without accounting."""
    return cache.get(
        snapshot.key(site, "waits"), Waits, lambda left_s: ask(site, left_s),
        max_age_s=_DAY_S, timeout_s=timeout_s, failure_s=_REFUSED_S,
    )  # fmt: skip


def ask(site: Site, timeout_s: float) -> Waits:
    """Ask the site's accounting. Raises as `read`."""
    sep = separator()
    reach = snapshot.reach(site, timeout_s)
    command = ["sacct", "-a", "-X", "-n", "-P", f"--delimiter={sep}", "--noconvert",
               f"--starttime=now-{DAYS}days", "--endtime=now", "-o", _COLUMNS]  # fmt: skip
    (done,) = batch(reach, [command])
    found = [wait for row in rows(answer(reach, done), sep, len(_COLUMNS.split(",")), "sacct") if (wait := _wait(row))]
    return Waits(jobs=tuple(sorted(found, key=lambda wait: wait.eligible_s)[-_MOST:]))


def _wait(row: Sequence[str]) -> Wait | None:
    """A row of sacct; None for a job that has not started."""
    _, partition, nodes, limit, submit, eligible, start = row
    began, able = _unix_s(start), _unix_s(eligible) or _unix_s(submit)
    if not began or not able:
        return None
    limit_s = span_s(limit, unit_s=60) or 0
    return Wait(partition, count(nodes) or 1, limit_s, able, max(0.0, began - able))


def _unix_s(text: str) -> float:
    try:
        said = moment(text, UTC)
        return datetime.fromisoformat(said).timestamp() if said else 0.0
    except ValueError as error:
        raise unreadable("sacct", "not a time", text) from error


def quantiles(waits: Waits, partition: str, nodes: int) -> tuple[float, float, float] | None:
    """10, 50 and 90 % of the waits of jobs like this one that had to wait; None where there were too few.

    Like: of the partition, and of half to twice the nodes; of any size where there are few of these.
    """
    there = [wait for wait in waits.jobs if wait.partition == partition and wait.wait_s >= 1]
    alike = [wait for wait in there if nodes <= 2 * wait.nodes and wait.nodes <= 2 * nodes]
    found = sorted(wait.wait_s for wait in (alike if len(alike) >= _FEW else there))
    if len(found) < _FEW:
        return None
    low, middle, high = (found[round(share * (len(found) - 1))] for share in (0.1, 0.5, 0.9))
    return low, middle, high
