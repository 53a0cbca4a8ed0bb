"""Report what jobs used between two times, from the store: hours, cost, efficiency, waste by cause, and waits.

A job's seconds are those of its allocation inside the window, as `sreport` counts them: each start of a requeued job,
running jobs until they were last read. Seconds of a suspension are left out, spread evenly over the job's time.
"""

from __future__ import annotations

import math
import sqlite3
from array import array
from collections.abc import Sequence

from pitools.core.record import Record
from pitools.core.timestamps import unix_to_rfc3339
from pitools.site.schema import Site, SitePartition, hourly_price

KEYS = ("user", "account", "qos", "partition", "site", "tag")

# State of a row → why its time is counted as wasted. All other states: not wasted.
CAUSES = {
    "FAILED": "failed",
    "BOOT_FAIL": "failed",
    "LAUNCH_FAILED": "failed",
    "OUT_OF_MEMORY": "out_of_memory",
    "CANCELLED": "cancelled",
    "REVOKED": "cancelled",  # a federated job that another cluster started
    "TIMEOUT": "timeout",
    "DEADLINE": "timeout",
    "NODE_FAIL": "node_fail",
    "PREEMPTED": "preempted",
    "REQUEUED": "requeued",
    "REQUEUE_FED": "requeued",
    "REQUEUE_HOLD": "requeued",
    "SPECIAL_EXIT": "requeued",
    "UNKNOWN": "unknown",
}
_UNPRICED = SitePartition()
_OVERHEAD = "overhead"  # of a run with a ledger that ended well, or runs: all that is not productive


class UsageRow(Record, frozen=True, kw_only=True, tag="pit.usage/1"):
    """What jobs used between since and until, of one group.

    by, group: the columns and their values, each joined by commas; "" for all jobs. jobs, starts: a requeued job starts
    several times. resource: gpu, or node for a group without GPUs: hours of it are what useful_hours and waste_hours
    (cause → hours) divide. useful_hours: of jobs that completed or run, times the goodput of runs whose ledger is
    known. cost: by the site files' price_per_node_hour; a node's price is shared among its GPUs; None without a cost.
    cost_per_hour, cost_per_useful_hour: of resource. efficiency: mean of goodput, or else of the GPU utilization that
    jobstats recorded, 0 to 1, over the share efficiency_known of the hours; None if that is 0. wait_p50_s, wait_p95_s:
    of the starts between since and until, from the time when the job could have started; None without any.
    """

    by: str
    group: str
    since: str
    until: str
    jobs: int
    starts: int
    gpu_hours: float
    cpu_hours: float
    node_hours: float
    resource: str
    useful_hours: float
    waste_hours: dict[str, float]
    cost: float | None
    currency: str
    cost_per_hour: float | None
    cost_per_useful_hour: float | None
    efficiency: float | None
    efficiency_known: float
    wait_p50_s: int | None
    wait_p95_s: int | None


# The starts of jobs in the window, with their seconds in it; a job's starts follow each other. When a job was suspended
# is not recorded, only for how long.
_STARTS = """
WITH spans AS (
    SELECT *, coalesce(end, start + elapsed_s) AS stop FROM job WHERE site IN ({sites})
), inside AS (
    SELECT *, max(0, min(stop, :until) - max(start, :since)) AS s FROM spans
    WHERE start < :until AND (stop > :since OR start >= :since)
)
SELECT {key}, site, raw_id, partition, state,
CASE WHEN elapsed_s < stop - start THEN s * elapsed_s * 1.0 / (stop - start) ELSE s END, gpus, nodes, cpus,
goodput, coalesce(goodput, gpu_util), CASE WHEN start >= :since THEN max(0, start - eligible) END
FROM inside LEFT JOIN goodput USING (site, run) ORDER BY site, raw_id
"""


class _Hours:
    """Seconds of one resource: all, lost by cause, of known efficiency, and those times their efficiency."""

    def __init__(self) -> None:
        self.all_s = self.known_s = self.efficient_s = 0.0
        self.lost_s: dict[str, float] = {}


class _Group:
    """The sums of one group."""

    def __init__(self) -> None:
        self.jobs = self.starts = 0
        self.last_job: list[str] = []
        self.cpu_s = self.cost = 0.0
        self.gpu, self.node = _Hours(), _Hours()
        self.waits_s = array("q")


def usage_rows(
    store: sqlite3.Connection, sites: Sequence[Site], since: int, until: int, by: str = ""
) -> list[UsageRow]:
    """Return what the jobs of sites used between two Unix times, dearest first.

    by: of KEYS, joined by commas, for a row of each of their values; "" for one row of all jobs.
    """
    groups: dict[tuple[str, str], _Group] = {}
    by_name = {site.name: site for site in sites}
    priced = {site.currency for site in sites if any(part.price_per_node_hour for part in site.partitions.values())}
    # A Slurm that does not track gres/gpu reports no GPUs of any job: whole nodes are counted.
    has_gpus = "SELECT EXISTS (SELECT 1 FROM job WHERE site = ? AND gpus > 0 AND start < ?)"
    tracked = {name: store.execute(has_gpus, (name, until)).fetchone()[0] for name in by_name}
    query = _STARTS.format(
        key=" || ',' || ".join(key for key in by.split(",") if key in KEYS) or "''",
        sites=", ".join(f":site{i}" for i in range(len(by_name))),
    )
    values = {"since": since, "until": until, **{f"site{i}": name for i, name in enumerate(by_name)}}
    for name, *job, partition, state, s, gpus, nodes, cpus, goodput, efficiency, wait_s in store.execute(query, values):
        site = by_name[job[0]]
        part = site.partitions.get(partition, _UNPRICED)
        if not tracked[site.name]:
            gpus = nodes * part.gpus_per_node
        currency = site.currency if len(priced) != 1 else min(priced)
        group = groups.get((name, currency)) or groups.setdefault((name, currency), _Group())
        group.starts += 1
        group.jobs += job != group.last_job
        group.last_job = job
        group.cpu_s += s * cpus
        group.cost += s / 3600 * hourly_price(part, nodes, gpus)
        if wait_s is not None:
            group.waits_s.append(wait_s)
        cause = CAUSES.get(state, _OVERHEAD)
        lost = 1 - goodput if goodput is not None else cause != _OVERHEAD
        for hours, resource_s in ((group.gpu, s * gpus), (group.node, s * nodes)):
            hours.all_s += resource_s
            if lost:
                hours.lost_s[cause] = hours.lost_s.get(cause, 0.0) + resource_s * lost
            if efficiency is not None:
                hours.known_s += resource_s
                hours.efficient_s += resource_s * efficiency
    window = unix_to_rfc3339(since), unix_to_rfc3339(until)
    rows = [_make_row(by, name, window, currency, group) for (name, currency), group in groups.items()]
    return sorted(rows, key=lambda row: (-(row.cost or 0), -row.gpu_hours, -row.node_hours, row.group))


def _make_row(by: str, name: str, window: tuple[str, str], currency: str, group: _Group) -> UsageRow:
    hours = group.gpu if group.gpu.all_s else group.node
    waste = sorted(((lost, cause) for cause, lost in hours.lost_s.items() if lost > 0), reverse=True)
    useful_h = max(0.0, hours.all_s - math.fsum(lost for lost, _ in waste)) / 3600
    waits_s = sorted(group.waits_s)
    return UsageRow(
        by=by,
        group=name,
        since=window[0],
        until=window[1],
        jobs=group.jobs,
        starts=group.starts,
        gpu_hours=group.gpu.all_s / 3600,
        cpu_hours=group.cpu_s / 3600,
        node_hours=group.node.all_s / 3600,
        resource="gpu" if group.gpu.all_s else "node",
        useful_hours=useful_h,
        waste_hours={cause: lost / 3600 for lost, cause in waste},
        cost=group.cost or None,
        currency=currency if group.cost else "",
        cost_per_hour=group.cost / hours.all_s * 3600 if group.cost else None,
        cost_per_useful_hour=group.cost / useful_h if group.cost and useful_h else None,
        efficiency=hours.efficient_s / hours.known_s if hours.known_s else None,
        efficiency_known=hours.known_s / hours.all_s if hours.all_s else 0.0,
        wait_p50_s=_percentile(waits_s, 0.5),
        wait_p95_s=_percentile(waits_s, 0.95),
    )


def _percentile(ordered: Sequence[int], share: float) -> int | None:
    """Return the smallest value that at least this share of values does not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None
