"""Waits and node failures of all users' jobs at a site in the last two weeks, from its accounting; queried once a day.

After a failed query, the next query is later and covers half as many days.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec

from pitools.core.record import Record
from pitools.place.clusters import cache, snapshot
from pitools.site.schema import Site
from pitools.slurm.fields import (
    new_separator,
    parse_count,
    parse_error,
    parse_slurm_duration,
    parse_slurm_time,
    split_rows,
)
from pitools.slurm.multi_query import run_queries, stdout_or_raise

DAYS = 14
_DAY_S = 86400.0
_RETRY_FAILED_S = 600.0
_MAX_JOBS = 50_000
_MIN_WAITS = 10  # quantiles of fewer waits mean nothing
_PRIOR_DAYS = 100.0  # weight of the site file's failure rate, in node-days
_COLUMNS = "JobIDRaw,Partition,NNodes,TimelimitRaw,Submit,Eligible,Start,State,ElapsedRaw"


class PastWait(msgspec.Struct, frozen=True, array_like=True):
    """A job that started. limit_s: the requested time. eligible_s: when it could have started, Unix time. wait_s: from
    then on.
    """

    partition: str
    nodes: int
    limit_s: int
    eligible_s: float
    wait_s: float


class AccountingHistory(Record, frozen=True, kw_only=True, tag="pit.accounting-history/1"):
    """The accounting of a site. jobs: those that started, oldest first. failures_by_partition: partition → (node-days,
    nodes failed).
    """

    jobs: tuple[PastWait, ...]
    failures_by_partition: dict[str, tuple[float, int]] = {}


def read_history(site: Site, timeout_s: float) -> AccountingHistory:
    """Return the waits of a site's jobs, cached for a day. One call. Raises Unreachable, or ClusterError without
    accounting.
    """
    key = snapshot.cache_key(site, "waits")
    return cache.get_or_query(
        key,
        AccountingHistory,
        lambda left_s: query_history(site, left_s, max(1, DAYS >> cache.failure_count(key))),
        max_age_s=_DAY_S,
        timeout_s=timeout_s,
        failure_s=_RETRY_FAILED_S,
    )


def peek_history(site: Site) -> AccountingHistory | None:
    """Return the cached history of a site without a query; None if there is none."""
    return cache.peek(snapshot.cache_key(site, "waits"), AccountingHistory, max_age_s=DAYS * _DAY_S)


def query_history(site: Site, timeout_s: float, last_days: int = DAYS) -> AccountingHistory:
    """Query the site's accounting for the last days. Raises Unreachable, or ClusterError without accounting."""
    sep = new_separator()
    transport = snapshot.make_transport(site, timeout_s)
    # -D lists every attempt of a requeued job: an attempt that lost its node is never the last one.
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
    (output,) = run_queries(transport, [command])
    waits: list[PastWait] = []
    failures: dict[str, tuple[float, int]] = {}
    for row in split_rows(stdout_or_raise(transport, output), sep, len(_COLUMNS.split(",")), "sacct"):
        if wait := _parse_wait(row):
            waits.append(wait)
            node_days, failed_nodes = failures.get(wait.partition, (0.0, 0))
            node_days += wait.nodes * (parse_count(row[-1]) or 0) / _DAY_S
            failures[wait.partition] = node_days, failed_nodes + (row[-2] == "NODE_FAIL")
    return AccountingHistory(
        jobs=tuple(sorted(waits, key=lambda wait: wait.eligible_s)[-_MAX_JOBS:]), failures_by_partition=failures
    )


def _parse_wait(row: Sequence[str]) -> PastWait | None:
    """Parse a row of sacct; None for a job that has not started."""
    _, partition, nodes, limit, submit, eligible, start, state, elapsed = row
    start_s, eligible_s = _parse_unix_s(start), _parse_unix_s(eligible) or _parse_unix_s(submit)
    # For a job that was cancelled while pending, Slurm reports the time of the cancellation as its start.
    if not start_s or not eligible_s or (state.startswith("CANCELLED") and not parse_count(elapsed)):
        return None
    limit_s = parse_slurm_duration(limit, unit_s=60) or 0
    return PastWait(partition, parse_count(nodes) or 1, limit_s, eligible_s, max(0.0, start_s - eligible_s))


def _parse_unix_s(text: str) -> float:
    try:
        time = parse_slurm_time(text, UTC)
        return datetime.fromisoformat(time).timestamp() if time else 0.0
    except ValueError as error:
        raise parse_error("sacct", "not a time", text) from error


def node_failure_rate(history: AccountingHistory | None, partition: str, site_rate: float) -> float:
    """Return the node failures per node and day: the mean of the site file's rate and accounting's, weighted by
    node-days.
    """
    node_days, failed_nodes = history.failures_by_partition.get(partition, (0.0, 0)) if history else (0.0, 0)
    return (_PRIOR_DAYS * site_rate + failed_nodes) / (_PRIOR_DAYS + node_days)


def wait_quantiles(history: AccountingHistory, partition: str, nodes: int) -> tuple[float, float, float] | None:
    """Return the 10th, 50th and 90th percentile of the waits of similar jobs, in seconds; None with too few waits.

    Jobs that started within a second do not count. Similar: of the partition, with half to twice the nodes, or with any
    number of nodes if there are too few of those.
    """
    partition_waits = [wait for wait in history.jobs if wait.partition == partition and wait.wait_s >= 1]
    similar = [wait for wait in partition_waits if nodes <= 2 * wait.nodes and wait.nodes <= 2 * nodes]
    waits_s = sorted(wait.wait_s for wait in (similar if len(similar) >= _MIN_WAITS else partition_waits))
    if len(waits_s) < _MIN_WAITS:
        return None
    low, middle, high = (waits_s[round(share * (len(waits_s) - 1))] for share in (0.1, 0.5, 0.9))
    return low, middle, high
