"""The collector of jobs: one squeue, and what its rows say of queues, waits, cost and placement."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from itertools import accumulate
from statistics import median
from typing import NamedTuple

from pitools.core import hostlist
from pitools.monitor.export.metrics import OTHER
from pitools.monitor.export.samples import Samples
from pitools.site.schema import Site, hourly_price
from pitools.slurm import states
from pitools.slurm.fields import count_gpus, none_to_empty, parse_count, parse_error, parse_gpus, parse_tres, split_rows

SEVERAL = "several"
_COLUMNS = (
    "JobArrayID",
    "State",
    "Partition",
    "QOS",
    "NumNodes",
    "NodeList",
    "EligibleTime",
    "SubmitTime",
    "StartTime",
    "EndTime",
    "tres-alloc",
    "tres-per-node",
    "Reason",
    "JobID",
)
_NOT_WAITING = (states.PendingReason.HELD, states.PendingReason.BEGIN_TIME, states.PendingReason.BAD_CONSTRAINTS)
_BY_USER = ("Dependency", "JobArrayTaskLimit")  # the second: `%2` of an array
_NAME = re.compile(r"[A-Za-z]+")
_FOLDED = re.compile(r"([\w.-]*?)\[([\d,-]+)\]")
_SPAN = re.compile(r"(\d+)(?:-(\d+))?(?::(\d+))?")


class JobRow(NamedTuple):
    """A row of squeue. tasks: of a pending array; else 1. Times are Unix times, 0 for none. gpus: of one task."""

    raw_id: str
    state: str
    partition: str
    qos: str
    tasks: int
    nodes: int
    node_list: str
    eligible_s: float
    start_s: float
    end_s: float
    gpus: int
    reason: str


def squeue_command(sep: str) -> list[str]:
    """Return the command; jobs that ended minutes ago are included, for their waits and cost."""
    return ["squeue", "-h", "-t", "all", "-O", ",".join(f"{name}:{sep}" for name in _COLUMNS)]


def parse_rows(text: str, sep: str) -> list[JobRow]:
    """Parse the output of the command, in which the separator also ends a row. Raises ClusterError."""
    rows = split_rows(text.replace(f"{sep}\n", "\n"), sep, len(_COLUMNS), "squeue")
    return [_parse_row(row, sep) for row in rows]


def _parse_row(row: Sequence[str], sep: str) -> JobRow:
    job_id, state, partition, qos, nodes, node_list, eligible, submit, start, end, tres, per_node, reason, raw_id = map(
        none_to_empty, row
    )
    n_nodes = parse_count(nodes) or 0
    return JobRow(
        raw_id=raw_id,
        state=states.parse_job_state(state),
        partition=partition,
        qos=qos,
        tasks=_count_tasks(job_id, sep.join(row)),
        nodes=n_nodes,
        node_list=node_list,
        eligible_s=_unix_time(eligible) or _unix_time(submit),
        start_s=_unix_time(start),
        end_s=_unix_time(end),
        gpus=_count_gpus(tres, per_node, n_nodes),
        reason=reason,
    )


def job_gauges(rows: Iterable[JobRow], now_s: float, site: Site, leaves: tuple[str, ...] | None) -> Samples:
    """Return the gauges of jobs. now_s: the cluster's time. leaves: the host list of each leaf switch."""
    gauges, ratios, oldest = Samples(), [], dict[str, float]()
    for row in rows:
        if states.is_final(row.state):
            continue
        partition = SEVERAL if "," in row.partition else row.partition
        gauges.add("pit_jobs", row.tasks, partition, row.state.lower())
        if row.state == "PENDING":
            gauges.add("pit_pending_reason_jobs", row.tasks, _reason_name(row.reason))
            gauges.add("pit_pending_gpus", row.tasks * row.gpus, partition)
            if _is_waiting(row):
                tier = tier_of(site, row.qos)
                oldest[tier] = min(oldest.get(tier, now_s), row.eligible_s or now_s)
        elif row.nodes > 1 and leaves and (ratio := _leaf_ratio(row.node_list, leaves)):
            ratios.append(ratio)
    for tier, since_s in oldest.items():
        gauges.add("pit_queue_age_seconds", now_s - since_s, tier)
    if leaves is not None:
        gauges.add("pit_job_leaf_spread_jobs", len(ratios))
    if ratios:
        ratios.sort()
        p90 = ratios[min(len(ratios) - 1, int(0.9 * len(ratios)))]
        for statistic, value in (("median", median(ratios)), ("p90", p90), ("max", ratios[-1])):
            gauges.add("pit_job_leaf_spread_ratio", value, statistic)
    return gauges


def job_counts(rows: Sequence[JobRow], since_s: float, now_s: float, site: Site) -> Samples:
    """Return the increments of counters since the query before, which is 0 if there was none: nothing is counted then.

    A job that started and was forgotten by slurmctld between the queries (MinJobAge, 5 min by default) is not counted.
    """
    counts = Samples()
    for tier in (*site.tiers, *(tier_of(site, row.qos) for row in rows)):
        counts.touch("pit_queue_wait_seconds", tier)
    for row in rows if since_s else ():
        if row.state == "PENDING" or not row.nodes or not row.start_s:
            continue
        # slurmctld may start further jobs in the second of a query: that second belongs to the next one.
        if since_s <= row.start_s < now_s and row.eligible_s:
            counts.observe("pit_queue_wait_seconds", max(0.0, row.start_s - row.eligible_s), tier_of(site, row.qos))
        end_s = min(row.end_s, now_s) if states.is_final(row.state) else now_s
        partition = site.partitions.get(row.partition)
        hours = (end_s - max(since_s, row.start_s)) / 3600
        if partition and partition.price_per_node_hour and hours > 0 and row.state != "SUSPENDED":
            cost = hours * hourly_price(partition, row.nodes, row.gpus)
            counts.add("pit_cost_total", cost, row.partition, site.currency)
    return counts


def tier_of(site: Site, qos: str) -> str:
    """Return the tier of a QOS by the site file; for another one its own name."""
    return next((tier for tier, name in site.tiers.items() if name == qos), qos or OTHER)


def _is_waiting(row: JobRow) -> bool:
    return states.pending_reason(row.reason) not in _NOT_WAITING and not row.reason.startswith(_BY_USER)


def _reason_name(reason: str) -> str:
    """Return the name with which a reason begins: nodes and numbers may follow. One of Slurm's is a sentence."""
    if reason.startswith("Nodes required"):
        return "NodesNotAvailable"
    match = _NAME.match(reason)
    return match[0] if match else "None"


def _count_tasks(job_id: str, line: str) -> int:
    """Return the number of tasks in `6_[0-3,7%2]`; 1 for another job."""
    _, bracket, tasks = job_id.partition("[")
    if not bracket:
        return 1
    count = 0
    for span in tasks.rstrip("]").partition("%")[0].split(","):
        match = _SPAN.fullmatch(span)
        if not match:
            raise parse_error("squeue", "not the tasks of an array", line)
        first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
        count += max(0, last - first) // max(1, step) + 1
    return count


@lru_cache(maxsize=20000)
def _count_gpus(tres: str, per_node: str, nodes: int) -> int:
    """Return the GPUs of a job. Its TRES have none where the site does not track them."""
    return count_gpus(parse_tres(tres)) or parse_gpus(per_node)[1] * nodes


@lru_cache(maxsize=20000)
def _unix_time(text: str) -> float:
    """Return Slurm's time, which QUERY_ENV has in UTC, as Unix time; 0 for none."""
    try:
        return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp() if text else 0.0
    except ValueError as error:
        raise parse_error("squeue", "not a time", text) from error


@lru_cache(maxsize=20000)
def _leaf_ratio(node_list: str, leaves: tuple[str, ...]) -> float:
    """Return the leaves with these nodes over the fewest that hold as many; 0 if a node is in none."""
    index, capacities = _leaf_index(leaves)
    nodes = _expand(node_list)
    used = {index.get(node, -1) for node in nodes}
    if -1 in used or not nodes:
        return 0.0
    return len(used) / (bisect_left(capacities, len(nodes)) + 1)


@lru_cache(maxsize=16)
def _leaf_index(leaves: tuple[str, ...]) -> tuple[dict[str, int], list[int]]:
    """Return node → number of its leaf, and the most nodes that 1, 2, 3, … leaves hold."""
    nodes_by_leaf = [hostlist.expand(leaf) for leaf in leaves]
    index = {node: number for number, nodes in enumerate(nodes_by_leaf) for node in nodes}
    return index, list(accumulate(sorted(map(len, nodes_by_leaf), reverse=True)))


def _expand(node_list: str) -> list[str]:
    """Expand a host list. `n[01-04,07]` is what most jobs have, and ClusterShell takes 100 µs for it."""
    match = _FOLDED.fullmatch(node_list)
    if not match:
        return hostlist.expand(node_list)
    names = []
    for span in match[2].split(","):
        first, _, last = span.partition("-")
        names += [f"{match[1]}{number:0{len(first)}d}" for number in range(int(first), int(last or first) + 1)]
    return names
