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
from pitools.slurm.batch import run_batch, stdout_or_raise
from pitools.slurm.fields import (
    new_separator,
    parse_count,
    parse_error,
    parse_slurm_duration,
    parse_slurm_time,
    split_rows,
)

DAYS = 14
_DAY_S = 86400.0
_REFUSED_RETRY_S = 600.0
_MAX_JOBS = 50_000
_MIN_WAITS = 10  # of fewer, quantiles say nothing
_PRIOR_DAYS = 100.0  # node-days for which what the site file says counts
_COLUMNS = "JobIDRaw,Partition,NNodes,TimelimitRaw,Submit,Eligible,Start,State,ElapsedRaw"


class PastWait(msgspec.Struct, frozen=True, array_like=True):
    """One job that started: what it asked for, when it could have started (Unix time), and how long it then waited."""

    partition: str
    nodes: int
    limit_s: int
    eligible_s: float
    wait_s: float


class AccountingHistory(Record, frozen=True, kw_only=True, tag="pit.accounting-history/1"):
    """The site's own history. jobs: those that started, oldest first. failures_by_partition: partition → (node-days,
    nodes lost)."""

    jobs: tuple[PastWait, ...]
    failures_by_partition: dict[str, tuple[float, int]] = {}


def read_history(site: Site, timeout_s: float) -> AccountingHistory:
    """The waits of a site's jobs, at most a day old. One call. Raises Unreachable, ClusterError without accounting."""
    key = snapshot.cache_key(site, "waits")
    return cache.get_or_query(
        key,
        AccountingHistory,
        lambda left_s: query_history(site, left_s, max(1, DAYS >> cache.failure_count(key))),
        max_age_s=_DAY_S,
        timeout_s=timeout_s,
        failure_s=_REFUSED_RETRY_S,
    )


def peek_history(site: Site) -> AccountingHistory | None:
    """What was last read of a site. Asks nobody."""
    return cache.peek(snapshot.cache_key(site, "waits"), AccountingHistory, max_age_s=DAYS * _DAY_S)


def query_history(site: Site, timeout_s: float, last_days: int = DAYS) -> AccountingHistory:
    """Ask the site's accounting for the last days. Raises as `read`."""
    sep = new_separator()
    transport = snapshot.make_transport(site, timeout_s)
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
    (done,) = run_batch(transport, [command])
    waits: list[PastWait] = []
    failures: dict[str, tuple[float, int]] = {}
    for row in split_rows(stdout_or_raise(transport, done), sep, len(_COLUMNS.split(",")), "sacct"):
        if wait := _wait(row):
            waits.append(wait)
            days, lost = failures.get(wait.partition, (0.0, 0))
            days += wait.nodes * (parse_count(row[-1]) or 0) / _DAY_S
            failures[wait.partition] = days, lost + (row[-2] == "NODE_FAIL")
    return AccountingHistory(
        jobs=tuple(sorted(waits, key=lambda wait: wait.eligible_s)[-_MAX_JOBS:]), failures_by_partition=failures
    )


def _wait(row: Sequence[str]) -> PastWait | None:
    """A row of sacct; None for a job that has not started."""
    _, partition, nodes, limit, submit, eligible, start, state, elapsed = row
    began, able = _unix_s(start), _unix_s(eligible) or _unix_s(submit)
    # Of one that was cancelled while it waited Slurm tells that moment as its start.
    if not began or not able or (state.startswith("CANCELLED") and not parse_count(elapsed)):
        return None
    limit_s = parse_slurm_duration(limit, unit_s=60) or 0
    return PastWait(partition, parse_count(nodes) or 1, limit_s, able, max(0.0, began - able))


def _unix_s(text: str) -> float:
    try:
        said = parse_slurm_time(text, UTC)
        return datetime.fromisoformat(said).timestamp() if said else 0.0
    except ValueError as error:
        raise parse_error("sacct", "not a time", text) from error


def node_failure_rate(history: AccountingHistory | None, partition: str, declared: float) -> float:
    """Nodes lost a node and day: what the site file says, the less so the more node-days accounting tells of."""
    days, lost = history.failures_by_partition.get(partition, (0.0, 0)) if history else (0.0, 0)
    return (_PRIOR_DAYS * declared + lost) / (_PRIOR_DAYS + days)


def wait_quantiles(history: AccountingHistory, partition: str, nodes: int) -> tuple[float, float, float] | None:
    """10, 50 and 90 % of the waits of jobs like this one that had to wait; None where there were too few.

    Like: of the partition, and of half to twice the nodes; of any size where there are few of these.
    """
    waited = [wait for wait in history.jobs if wait.partition == partition and wait.wait_s >= 1]
    similar = [wait for wait in waited if nodes <= 2 * wait.nodes and wait.nodes <= 2 * nodes]
    found = sorted(wait.wait_s for wait in (similar if len(similar) >= _MIN_WAITS else waited))
    if len(found) < _MIN_WAITS:
        return None
    low, middle, high = (found[round(share * (len(found) - 1))] for share in (0.1, 0.5, 0.9))
    return low, middle, high
