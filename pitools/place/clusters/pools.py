"""A site's partitions as pools: what is free, what runs until when, and what others wait for, in GPUs or nodes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from datetime import datetime
from functools import lru_cache
from itertools import pairwise

import msgspec

from pitools.core import hostlist
from pitools.place.clusters.snapshot import Snapshot
from pitools.place.types import PoolState
from pitools.site.load import load_site
from pitools.site.schema import Site, SitePartition
from pitools.slurm.fields import parse_gpus
from pitools.slurm.records import Node, SlurmJob
from pitools.slurm.states import PendingReason, is_schedulable, pending_reason

NO_END_S = 365 * 86400.0  # of a job without a time limit
_HOLDING_STATES = frozenset({"RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT"})
_PASSING_STATES = frozenset({"maintenance"})  # of a node, by itself
# Of these reasons only does a job wait for nodes; the others (held, dependent, at a limit) take none from anybody.
_COMPETING_REASONS = frozenset({PendingReason.RESOURCES, PendingReason.PRIORITY, PendingReason.NONE})


class JobShare(msgspec.Struct, frozen=True, kw_only=True):
    """What a job has, or asks for, of a pool. gpus: None where Slurm does not say how many."""

    job: SlurmJob
    nodes: int
    gpus: int | None


def pool_name(site: str, partition: str) -> str:
    """What a pool is called everywhere: `alpha/train`."""
    return f"{site}/{partition}"


def pool_states(snapshot: Snapshot, own_jobs: Collection[str], site: Site | None = None) -> list[PoolState]:
    """Each partition of the site file (the loaded one, if none is given) that the cluster has, up and with nodes.

    own_jobs: names or ids of our own jobs, which do not count as others'. Partitions may share nodes: then each of them
    is as free as the nodes are, and holds whatever runs on them.
    """
    site = site or load_site(snapshot.site)
    own_jobs = frozenset(own_jobs)
    nodes = {node.node: node for node in snapshot.nodes}
    found = []
    for partition in snapshot.partitions:
        if partition.partition in site.partitions and partition.state == "up":
            site_partition = site.partitions[partition.partition]
            partition_nodes = [nodes[node] for node in _expand(partition.node_list)]
            if partition_nodes:
                found.append(_pool(snapshot, own_jobs, site, partition.partition, site_partition, partition_nodes))
    return found


def _pool(
    snapshot: Snapshot,
    ours: frozenset[str],
    site: Site,
    partition: str,
    site_partition: SitePartition,
    nodes: list[Node],
) -> PoolState:
    per_node = gpus_per_node(site_partition, nodes)
    able = [node for node in nodes if is_schedulable(node.state, node.flags)]
    names = {node.node for node in nodes}
    running = [_job_share(job, names) for job in snapshot.jobs if job.state in _HOLDING_STATES]
    running = [held for held in running if held.nodes]
    units = _units(running, nodes, per_node)
    ends = [_end_s(held.job, snapshot) for held in running]
    wanted = sum(_requested_units(job, per_node) for job in snapshot.jobs if _is_competing(job, partition, ours))
    idle = sum(_idle(node, per_node) for node in able if node.state != "allocated")
    return PoolState(
        pool=pool_name(site.name, partition),
        units=sum(_size(node, per_node) for node in able),
        free=max(0, idle - wanted),
        running=sorted(zip(ends, units, strict=True)),
        others_pending=wanted,
        max_pending=site.place.max_queued_jobs,
        maintenance_windows=_maintenance_windows(
            snapshot, [node for node in nodes if is_schedulable(node.state, {*node.flags} - _PASSING_STATES)], site
        ),
    )


def _maintenance_windows(snapshot: Snapshot, nodes: list[Node], site: Site) -> list[tuple[float, float]]:
    """The windows (from, to), on our clock, in which reservations keep all these nodes from our jobs.

    One that is MAGNETIC draws them in, one that the site's own flags name is ours, and one of some cores leaves others.
    """
    ours = {flag.removeprefix("--reservation=") for flag in site.dialect.extra if flag.startswith("--reservation=")}
    ours = {name for names in ours for name in names.split(",")}
    cpus, names = {node.node: node.cpus for node in snapshot.nodes}, {node.node for node in nodes}
    kept: list[tuple[float, float, set[str]]] = []
    for one in snapshot.reservations:
        mine = names.intersection(every := _expand(one.node_list))
        is_whole = not one.cpus or one.cpus >= sum(cpus.get(node, 0) for node in every)
        is_others = "magnetic" not in one.flags and one.reservation not in ours
        if mine and is_whole and is_others and one.start and one.end:
            kept.append((_to_local_time(one.start, snapshot), _to_local_time(one.end, snapshot), mine))
    if not kept or set().union(*(mine for _, _, mine in kept)) != names:
        return []
    edges = sorted({edge for from_s, to_s, _ in kept for edge in (from_s, to_s)})
    windows: list[tuple[float, float]] = []
    for from_s, to_s in pairwise(edges):
        if set().union(*(mine for first, last, mine in kept if first <= from_s and to_s <= last)) == names:
            if windows and windows[-1][1] == from_s:
                from_s, _ = windows.pop()
            windows.append((from_s, to_s))
    return [window for window in windows if window[1] > snapshot.seen_s]


def _to_local_time(moment: str, snapshot: Snapshot) -> float:
    """Unix time, on our clock, of a moment on the cluster's."""
    return datetime.fromisoformat(moment).timestamp() - snapshot.skew_s


def gpus_per_node(site_partition: SitePartition, nodes: Iterable[Node]) -> int:
    """GPUs of a node of the partition, as its site file says, or the cluster; 0 where a unit is a node."""
    return site_partition.gpus_per_node or max((node.gpus for node in nodes), default=0)


def _is_competing(job: SlurmJob, partition: str, ours: frozenset[str]) -> bool:
    """Whether this is somebody else's job that waits for nodes of the partition."""
    if job.state != "PENDING" or partition not in job.partition.split(","):
        return False
    if pending_reason(job.reason) not in _COMPETING_REASONS:
        return False
    return ours.isdisjoint((job.name, job.raw_id, job.job_id))


def _job_share(job: SlurmJob, names: Collection[str]) -> JobShare:
    """What a running job has of the nodes of these names, whichever partition it came by."""
    on = [node for node in _expand(job.node_list) if node in names]
    _, each = parse_gpus(job.gres)
    return JobShare(job=job, nodes=len(on), gpus=each * len(on) if each else None)


def _units(running: list[JobShare], nodes: list[Node], per_node: int) -> list[int]:
    """What each of these jobs holds. GPUs that are in use and nobody's are shared by those that do not say."""
    if not per_node:
        return [held.nodes for held in running]
    known = sum(held.gpus or 0 for held in running)
    in_use = sum(_in_use(node, per_node) for node in nodes)
    silent = sum(held.nodes for held in running if held.gpus is None)
    each = min(per_node, max(0.0, in_use - known) / silent) if silent else 0.0
    return [held.gpus if held.gpus is not None else round(each * held.nodes) for held in running]


def _in_use(node: Node, per_node: int) -> int:
    if node.gpus and node.gpus_allocated is not None:
        return node.gpus_allocated
    return _size(node, per_node) if node.state in ("allocated", "mixed") else 0


def _size(node: Node, per_node: int) -> int:
    """Units of a node: its GPUs, where it has any to count, or itself."""
    return (node.gpus or per_node) if per_node else 1


def _idle(node: Node, per_node: int) -> int:
    if "reserved" in (node.state, *node.flags):
        return 0
    if not per_node:
        return int(node.state == "idle")
    return max(0, _size(node, per_node) - _in_use(node, per_node))


def _requested_units(job: SlurmJob, per_node: int) -> int:
    """What a pending job asks for: of an array, all its tasks."""
    _, each = parse_gpus(job.gres)
    return task_count(job.job_id) * max(1, job.nodes) * ((each or per_node) if per_node else 1)


def task_count(job_id: str) -> int:
    """How many jobs a line of squeue stands for: `6_[3-9,12%2]` is 8, of which 2 run at once."""
    _, bracket, inside = job_id.partition("[")
    if not bracket:
        return 1
    inside, _, at_once = inside.rstrip("]").partition("%")
    total = 0
    for part in inside.split(","):
        span, _, step = part.partition(":")
        first, dash, last = span.partition("-")
        if first.isdigit() and (last.isdigit() or not dash):
            total += (int(last) - int(first)) // max(1, int(step or 1)) + 1 if dash else 1
    return max(1, min(total, int(at_once)) if at_once.isdigit() and int(at_once) else total)


def _end_s(job: SlurmJob, snapshot: Snapshot) -> float:
    """When a running job ends at the latest, on our clock."""
    if not job.end:
        return snapshot.seen_s + NO_END_S
    return max(snapshot.seen_s, _to_local_time(job.end, snapshot))


def held_until(snapshot: Snapshot, per_node: int, holds: Callable[[SlurmJob], bool]) -> list[tuple[float, int]]:
    """(expected end, units) of what runs of some jobs, ascending.

    per_node: GPUs of a node, for a job that does not say how many it has; 0 counts nodes.
    """
    ours = [job for job in snapshot.jobs if job.state in _HOLDING_STATES and holds(job)]
    units = [job.nodes * ((parse_gpus(job.gres)[1] or per_node) if per_node else 1) for job in ours]
    return sorted((_end_s(job, snapshot), n) for job, n in zip(ours, units, strict=True))


def wait_until_free_s(held_until: list[tuple[float, int]], need: int, now_s: float) -> float:
    """Seconds until so many units have been given back by these (end, units), ascending; inf if they never are."""
    if need <= 0:
        return 0.0
    for end_s, units in held_until:
        need -= units
        if need <= 0:
            return max(0.0, end_s - now_s)
    return float("inf")


@lru_cache(maxsize=65536)
def _expand(folded: str) -> tuple[str, ...]:
    # Most jobs are on one node, and reading a name as a list of one costs a hundred times as much.
    return tuple(hostlist.expand(folded)) if "[" in folded or "," in folded else ((folded,) if folded else ())
