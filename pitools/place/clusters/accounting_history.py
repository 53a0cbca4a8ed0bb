"""What became of everybody's jobs at a site these last two weeks, as its accounting has it; asked for once a day.

How long they waited, and how often a node failed under them. A database that does not answer is asked for half as many
days the next time, and later.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec

from pitools.core.record import Record
from pitools.place.clusters import cache, snapshot
from pitools.site.schema import Site
from pitools.slurm.batch import answer, batch
from pitools.slurm.fields import count, moment, rows, separator, span_s, unreadable

DAYS = 14
_DAY_S = 86400.0
_REFUSED_S = 600.0
_MOST = 50_000
_FEW = 10  # of fewer, quantiles say nothing
_PRIOR_DAYS = 100.0  # node-days for which what the site file says counts
_COLUMNS = "JobIDRaw,Partition,NNodes,TimelimitRaw,Submit,Eligible,Start,State,ElapsedRaw"


class Wait(msgspec.Struct, frozen=True, array_like=True):
    """One job that started: what it asked for, when it could have started (Unix time), and how long it then waited."""

    partition: str
    nodes: int
    limit_s: int
    eligible_s: float
    wait_s: float


class Waits(Record, frozen=True, kw_only=True, tag="pit.waits/1"):
    """The site's own history. jobs: those that started, oldest first. ran: partition → (node-days, nodes lost)."""

    jobs: tuple[Wait, ...]
    ran: dict[str, tuple[float, int]] = {}


def read(site: Site, timeout_s: float) -> Waits:
    """The waits of a site's jobs, at most a day old. One call. Raises Unreachable, ClusterError without accounting."""
    key = snapshot.key(site, "waits")
    return cache.get(
        key,
        Waits,
        lambda left_s: ask(site, left_s, max(1, DAYS >> cache.failures(key))),
        max_age_s=_DAY_S,
        timeout_s=timeout_s,
        failure_s=_REFUSED_S,
    )


def kept(site: Site) -> Waits | None:
    """What was last read of a site. Asks nobody."""
    return cache.kept(snapshot.key(site, "waits"), Waits, max_age_s=DAYS * _DAY_S)


def ask(site: Site, timeout_s: float, last_days: int = DAYS) -> Waits:
    """Ask the site's accounting for the last days. Raises as `read`."""
    sep = separator()
    reach = snapshot.reach(site, timeout_s)
    # -D: of a job that was requeued each attempt; the one that lost its node is none of the last.
    command = [
        "sacct",
        "-a",
        "-X",
        "-D",
        "-n",
        "-P",
        f"--delimiter={sep}",
        "--noconvert",
        f"--starttime=now-{last_days}days",
        "--endtime=now",
        "-o",
        _COLUMNS,
    ]
    (done,) = batch(reach, [command])
    waits: list[Wait] = []
    ran: dict[str, tuple[float, int]] = {}
    for row in rows(answer(reach, done), sep, len(_COLUMNS.split(",")), "sacct"):
        if wait := _wait(row):
            waits.append(wait)
            days, lost = ran.get(wait.partition, (0.0, 0))
            days += wait.nodes * (count(row[-1]) or 0) / _DAY_S
            ran[wait.partition] = days, lost + (row[-2] == "NODE_FAIL")
    return Waits(jobs=tuple(sorted(waits, key=lambda wait: wait.eligible_s)[-_MOST:]), ran=ran)


def _wait(row: Sequence[str]) -> Wait | None:
    """A row of sacct; None for a job that has not started."""
    _, partition, nodes, limit, submit, eligible, start, state, elapsed = row
    began, able = _unix_s(start), _unix_s(eligible) or _unix_s(submit)
    # Of one that was cancelled while it waited Slurm tells that moment as its start.
    if not began or not able or (state.startswith("CANCELLED") and not count(elapsed)):
        return None
    limit_s = span_s(limit, unit_s=60) or 0
    return Wait(partition, count(nodes) or 1, limit_s, able, max(0.0, began - able))


def _unix_s(text: str) -> float:
    try:
        said = moment(text, UTC)
        return datetime.fromisoformat(said).timestamp() if said else 0.0
    except ValueError as error:
        raise unreadable("sacct", "not a time", text) from error


def failures(past: Waits | None, partition: str, said: float) -> float:
    """Nodes lost a node and day: what the site file says, the less so the more node-days accounting tells of."""
    days, lost = past.ran.get(partition, (0.0, 0)) if past else (0.0, 0)
    return (_PRIOR_DAYS * said + lost) / (_PRIOR_DAYS + days)


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
