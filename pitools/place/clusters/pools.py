"""A site's partitions as pools: free units, running jobs, and others' pending jobs, in GPUs or nodes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from datetime import datetime
from functools import lru_cache
from itertools import pairwise

import msgspec

from pitools.core import hostlist
from pitools.place.clusters.snapshot import Snapshot
from pitools.place.types import PoolState
from pitools.site.schema import Site, SitePartition
from pitools.slurm.fields import parse_gpus
from pitools.slurm.records import Node, SlurmJob
from pitools.slurm.states import PendingReason, is_schedulable, pending_reason

NO_END_S = 365 * 86400.0  # assumed rest of a job without a time limit
_HOLDING_STATES = frozenset({"RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT"})
_HELD_STATES = frozenset({"blocked", "reserved"})  # idle nodes held for others; blocked: by a job with --exclusive=topo
_TEMPORARY_STATES = frozenset({"maintenance"})  # node states that end without an operator
# With these reasons a pending job waits for nodes. With others (held, dependent, at a limit) it needs none yet.
_COMPETING_REASONS = frozenset({PendingReason.RESOURCES, PendingReason.PRIORITY, PendingReason.NONE})


class JobShare(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a pool that a job holds. gpus: None if Slurm does not report the number."""

    job: SlurmJob
    nodes: int
    gpus: int | None


def pool_name(site: str, partition: str) -> str:
    """Return the name of a partition's pool: `alpha/train`."""
    return f"{site}/{partition}"


def pool_states(snapshot: Snapshot, own_jobs: Collection[str], site: Site) -> list[PoolState]:
    """Return a pool for each partition of the site file that is up in the cluster and has nodes.

    own_jobs: names or ids of our own jobs, which do not count as others'.
    Partitions may share nodes: each of them then counts the same free nodes and the same running jobs.
    """
    own_jobs = frozenset(own_jobs)
    nodes = {node.node: node for node in snapshot.nodes}
    pools = []
    for partition in snapshot.partitions:
        if partition.partition in site.partitions and partition.state == "up":
            site_partition = site.partitions[partition.partition]
            partition_nodes = [nodes[node] for node in _expand(partition.node_list)]
            if partition_nodes:
                pools.append(_make_pool(snapshot, own_jobs, site, partition.partition, site_partition, partition_nodes))
    return pools


def _make_pool(
    snapshot: Snapshot,
    own_jobs: frozenset[str],
    site: Site,
    partition: str,
    site_partition: SitePartition,
    nodes: list[Node],
) -> PoolState:
    per_node = gpus_per_node(site_partition, nodes)
    schedulable = [node for node in nodes if is_schedulable(node.state, node.flags)]
    names = {node.node for node in schedulable}  # the end of a job on a draining node frees nothing
    running = [_job_share(job, names) for job in snapshot.jobs if job.state in _HOLDING_STATES]
    running = [share for share in running if share.nodes]
    units = _held_units(running, schedulable, per_node)
    ends = [_end_s(share.job, snapshot) for share in running]
    competing = [job for job in snapshot.jobs if _is_competing(job, partition, own_jobs)]
    unreported = max(1, unreported_gpus(snapshot.jobs, per_node))  # a job without GPUs is not free
    requested = [_requested_units(job, unreported if per_node else 0) for job in competing]
    pending = sum(requested)
    idle = sum(_idle_units(node, per_node) for node in schedulable if node.state != "allocated")
    return PoolState(
        pool=pool_name(site.name, partition),
        units=sum(_node_units(node, per_node) for node in schedulable),
        free=max(0, idle - pending),
        running=sorted(zip(ends, units, strict=True)),
        others_pending=pending,
        others_pending_s=sum(n * (job.time_limit_s or NO_END_S) for n, job in zip(requested, competing, strict=True)),
        max_pending=site.place.max_queued_jobs,
        speed=site_partition.speed,
        maintenance_windows=_maintenance_windows(
            snapshot, [node for node in nodes if is_schedulable(node.state, {*node.flags} - _TEMPORARY_STATES)], site
        ),
    )


def _maintenance_windows(snapshot: Snapshot, nodes: list[Node], site: Site) -> list[tuple[float, float]]:
    """Return the windows (from, to), on our clock, in which reservations exclude our jobs from all these nodes.

    Not counted: a MAGNETIC reservation (it attracts our jobs), one that the site file's flags name, and one of only
    some cores.
    """
    flags = [flag for flag in site.dialect.extra if flag.startswith("--reservation=")]
    own_names = {name for flag in flags for name in flag.removeprefix("--reservation=").split(",")}
    cpus, names = {node.node: node.cpus for node in snapshot.nodes}, {node.node for node in nodes}
    reserved: list[tuple[float, float, set[str]]] = []
    for row in snapshot.reservations:
        covered = names.intersection(every := _expand(row.node_list))
        takes_whole_nodes = not row.cpus or row.cpus >= sum(cpus.get(node, 0) for node in every)
        excludes_us = "magnetic" not in row.flags and row.reservation not in own_names
        if covered and takes_whole_nodes and excludes_us and row.start and row.end:
            reserved.append((_to_local_time(row.start, snapshot), _to_local_time(row.end, snapshot), covered))
    if not reserved or set().union(*(covered for _, _, covered in reserved)) != names:
        return []
    edges = sorted({edge for from_s, to_s, _ in reserved for edge in (from_s, to_s)})
    windows: list[tuple[float, float]] = []
    for from_s, to_s in pairwise(edges):
        if set().union(*(covered for first, last, covered in reserved if first <= from_s and to_s <= last)) == names:
            if windows and windows[-1][1] == from_s:
                from_s, _ = windows.pop()
            windows.append((from_s, to_s))
    return [window for window in windows if window[1] > snapshot.seen_s]


def _to_local_time(time: str, snapshot: Snapshot) -> float:
    """Convert a time of the cluster's clock to Unix time of our clock."""
    return datetime.fromisoformat(time).timestamp() - snapshot.skew_s


def gpus_per_node(site_partition: SitePartition, nodes: Iterable[Node]) -> int:
    """Return the GPUs of a node from the site file, else from the cluster; 0 if units are nodes."""
    return site_partition.gpus_per_node or max((node.gpus for node in nodes), default=0)


def _is_competing(job: SlurmJob, partition: str, own_jobs: frozenset[str]) -> bool:
    """Return whether this job, which is not of our queue, waits for nodes of the partition."""
    if job.state != "PENDING" or partition not in job.partition.split(","):
        return False
    if pending_reason(job.reason) not in _COMPETING_REASONS:
        return False
    return own_jobs.isdisjoint((job.name, job.raw_id, job.job_id))


def _job_share(job: SlurmJob, names: Collection[str]) -> JobShare:
    """Return the share of these nodes that a running job holds, submitted to this or another partition."""
    shared_nodes = [node for node in _expand(job.node_list) if node in names]
    _, node_gpus = parse_gpus(job.gres)
    return JobShare(job=job, nodes=len(shared_nodes), gpus=node_gpus * len(shared_nodes) if node_gpus else None)


def _held_units(running: list[JobShare], nodes: list[Node], per_node: int) -> list[int]:
    """Return the units that each job holds. GPUs in use that no job reports are divided among jobs that report none."""
    if not per_node:
        return [share.nodes for share in running]
    reported = sum(share.gpus or 0 for share in running)
    used_gpus = sum(_used_units(node, per_node) for node in nodes)
    uncounted = sum(share.nodes for share in running if share.gpus is None)
    guess = min(per_node, max(0.0, used_gpus - reported) / uncounted) if uncounted else 0.0
    return [share.gpus if share.gpus is not None else round(guess * share.nodes) for share in running]


def _used_units(node: Node, per_node: int) -> int:
    if node.gpus and node.gpus_allocated is not None:
        return node.gpus_allocated
    return _node_units(node, per_node) if node.state in ("allocated", "mixed") else 0


def _node_units(node: Node, per_node: int) -> int:
    """Return the units of a node: its GPUs, or 1 in a pool without GPUs."""
    return (node.gpus or per_node) if per_node else 1


def _idle_units(node: Node, per_node: int) -> int:
    if not _HELD_STATES.isdisjoint((node.state, *node.flags)):
        return 0
    if not per_node:
        return int(node.state == "idle")
    return max(0, _node_units(node, per_node) - _used_units(node, per_node))


def unreported_gpus(jobs: Iterable[SlurmJob], per_node: int) -> int:
    """Return the GPUs of each node of a job for which Slurm reports none: 0, as it reports those of another of `jobs`.

    Where it reports none at all, it does not count GPUs: then all those of the node, per_node.
    """
    return 0 if any(parse_gpus(job.gres)[1] for job in jobs) else per_node


def _requested_units(job: SlurmJob, unreported: int) -> int:
    """Return the units that a pending job requests; for an array, those of all its tasks.

    unreported: GPUs per node of a job without a number; 0 counts nodes.
    """
    _, node_gpus = parse_gpus(job.gres)
    return task_count(job.job_id) * max(1, job.nodes) * ((node_gpus or unreported) if unreported else 1)


def task_count(job_id: str) -> int:
    """Return the number of jobs in a row of squeue: `6_[3-9,12]` is 8 jobs; with `%2` at the end, at most 2."""
    _, bracket, indices = job_id.partition("[")
    if not bracket:
        return 1
    indices, _, limit = indices.rstrip("]").partition("%")
    total = 0
    for index_range in indices.split(","):
        span, _, step = index_range.partition(":")
        first, dash, last = span.partition("-")
        if first.isdigit() and (last.isdigit() or not dash):
            total += (int(last) - int(first)) // max(1, int(step or 1)) + 1 if dash else 1
    return max(1, min(total, int(limit)) if limit.isdigit() and int(limit) else total)


def _end_s(job: SlurmJob, snapshot: Snapshot) -> float:
    """Return the latest end of a running job, on our clock."""
    if not job.end:
        return snapshot.seen_s + NO_END_S
    return max(snapshot.seen_s, _to_local_time(job.end, snapshot))


def units_by_end(snapshot: Snapshot, per_node: int, is_counted: Callable[[SlurmJob], bool]) -> list[tuple[float, int]]:
    """Return (expected end, units) of the running jobs that `is_counted` selects, ascending.

    per_node: GPUs of a node, where Slurm reports those of no job; 0 counts nodes.
    """
    unreported = unreported_gpus(snapshot.jobs, per_node)
    selected = [job for job in snapshot.jobs if job.state in _HOLDING_STATES and is_counted(job)]
    units = [job.nodes * ((parse_gpus(job.gres)[1] or unreported) if per_node else 1) for job in selected]
    return sorted((_end_s(job, snapshot), n) for job, n in zip(selected, units, strict=True))


def wait_until_free_s(by_end: list[tuple[float, int]], units_needed: int, now_s: float) -> float:
    """Return the seconds until jobs of these (end, units), ascending, have freed the units needed; inf if they never
    do.
    """
    if units_needed <= 0:
        return 0.0
    for end_s, units in by_end:
        units_needed -= units
        if units_needed <= 0:
            return max(0.0, end_s - now_s)
    return float("inf")


def estimate_start_s(pool: PoolState, units: int, limit_s: float, now_s: float) -> float:
    """Return the seconds until a pool can start a job, as slurmctld's job_start_data estimates them; inf if never.

    Running jobs end at their limits, then others' pending jobs delay the start by their units x limit over the pool's
    units. units: of the job, and of our tickets before it.
    """
    wait_s = 0.0
    if units > pool.free:
        by_end = [(now_s, pool.units_held_for_others), *pool.running]
        wait_s = wait_until_free_s(by_end, units - pool.free, now_s) + pool.others_pending_s / max(pool.units, 1)
    return pool.opens_s(now_s + wait_s, limit_s) - now_s


@lru_cache(maxsize=65536)
def _expand(folded: str) -> tuple[str, ...]:
    # Most jobs have one node, and parsing its name as a hostlist takes a hundred times as long.
    return tuple(hostlist.expand(folded)) if "[" in folded or "," in folded else ((folded,) if folded else ())
