"""List every partition of a site as a candidate for a request, with the reasons against those that do not fit."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from functools import lru_cache

import msgspec

from pitools.core import hostlist, units
from pitools.core.errors import ConfigError, PitError, UsageError
from pitools.launch import plan as planning
from pitools.launch.plan import Plan, StagedDataset
from pitools.launch.request import Request
from pitools.place.clusters import pools
from pitools.place.clusters.account_limits import QUOTA_DAYS
from pitools.place.clusters.snapshot import Snapshot
from pitools.place.estimate import slurm_limits
from pitools.site.schema import Site, SitePartition
from pitools.slurm.fields import has_features, parse_gpus, parse_mib
from pitools.slurm.records import Node, Partition
from pitools.slurm.states import is_schedulable

# Maintenance ends, and Slurm powers a cloud node up again when a job needs it.
_TEMPORARY_STATES = frozenset({"maintenance", "power_down", "powering_down"})


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One partition of one site, for one request.

    plan: that of `pit launch run -`; None if it cannot be made. reasons: why it does not fit, () if it does. never:
    those reasons that no waiting changes. units: GPUs that the job would hold, or nodes in a pool without GPUs.
    able_nodes: nodes that can run the job, now or later. total_nodes: of the partition. unhealthy_nodes:
    down, drained or the like.
    """

    site: Site
    partition: str
    plan: Plan | None = None
    reasons: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    units: int = 0
    able_nodes: int = 0
    total_nodes: int = 0
    unhealthy_nodes: int = 0
    node_names: frozenset[str] = frozenset()

    @property
    def pool(self) -> str:
        """Return the name of the pool."""
        return pools.pool_name(self.site.name, self.partition)

    @property
    def fits(self) -> bool:
        """Return whether the request could run there."""
        return self.plan is not None and not self.reasons

    @property
    def site_partition(self) -> SitePartition:
        """Return the partition of the site file."""
        return self.site.partitions[self.partition]


def candidates(
    request: Request, site: Site, snapshot: Snapshot, where: str = "request", text: str = ""
) -> list[Candidate]:
    """Return each partition of the site file, or the requested one, with a plan or with reasons against it.

    where: the request's file, for errors. text: its content, for the run folder.
    """
    names = [request.partition] if request.partition else list(site.partitions)
    no_data = msgspec.structs.replace(request, data={})
    without_data = [_make_candidate(no_data, site, name, snapshot, where, text) for name in names]
    if not request.data or not any(c.plan for c in without_data):
        return without_data
    # Reading the manifests of large datasets is slow, and the result is the same for every partition.
    partition = next(c.plan.partition for c in without_data if c.plan)
    try:
        data = planning.make_plan(with_time_for_speed(request, site, partition), site, where).data
    except PitError as error:
        return [msgspec.structs.replace(c, plan=None, reasons=(*c.reasons, str(error))) for c in without_data]
    return [_with_data(c, request, data) for c in without_data]


def _make_candidate(request: Request, site: Site, name: str, snapshot: Snapshot, where: str, text: str) -> Candidate:
    partition = next((row for row in snapshot.partitions if row.partition == name), None)
    if partition is None or name not in site.partitions:
        source = "cluster" if name in site.partitions else "site file"
        reason = f"the {source} has no partition of this name"
        return Candidate(site=site, partition=name, reasons=(reason,), never=(reason,))
    reasons: list[str] = []
    never: list[str] = []
    plan: Plan | None = None
    try:
        plan = planning.make_plan(with_time_for_speed(request, site, name), site, where, request_text=text)
        planning.require_workdir(plan, site)
    except PitError as error:
        plan = None
        reasons.append(error.message)
        never += [error.message] if isinstance(error, ConfigError) else []
    names = frozenset(_expand(partition.node_list))
    nodes = [node for node in snapshot.nodes if node.node in names]
    healthy = [node for node in nodes if _is_usable(node)]
    suited = [node for node in nodes if _meets_request(request, site, name, node)]
    able = [node for node in suited if _is_usable(node)]
    if plan:
        reasons += [
            *_node_reasons(request, nodes, suited, able),
            *slurm_limits.refusal_reasons(plan.job, site, snapshot),
        ]
        reasons += _quota_reasons(plan, site, snapshot)
        # The features of a node may change; its size does not.
        unconstrained = msgspec.structs.replace(request, constraint="")
        never += _size_reasons(
            request, nodes, [node for node in nodes if _meets_request(unconstrained, site, name, node)]
        )
    return Candidate(
        site=site,
        partition=name,
        plan=plan,
        reasons=tuple(dict.fromkeys(reasons)),
        never=tuple(never),
        units=_capacity_units(request, site, partition, nodes),
        able_nodes=len(able),
        total_nodes=len(nodes),
        unhealthy_nodes=len(nodes) - len(healthy),
        node_names=names,
    )


def with_time_for_speed(request: Request, site: Site, partition: str) -> Request:
    """Return the request for one partition; a slower partition gets a longer time limit, in whole minutes."""
    speed = site.partitions[partition].speed
    time = request.time or site.defaults.time
    if speed < 1:
        time = units.to_slurm_time(math.ceil(units.parse_duration(time) / speed / 60) * 60)
    return msgspec.structs.replace(request, partition=partition, time=time)


def _with_data(candidate: Candidate, request: Request, data: tuple[StagedDataset, ...]) -> Candidate:
    if candidate.plan is None:
        return candidate
    with_data = msgspec.structs.replace(candidate.plan.request, data=request.data)
    return msgspec.structs.replace(
        candidate, plan=msgspec.structs.replace(candidate.plan, request=with_data, data=data)
    )


def _capacity_units(request: Request, site: Site, partition: Partition, nodes: list[Node]) -> int:
    """Return what the job would hold, in the units of the partition's pool."""
    per_node = pools.gpus_per_node(site.partitions[partition.partition], nodes)
    if not per_node:
        return request.nodes
    # An exclusive job holds all GPUs of its nodes; so does any job if Slurm does not count GPUs.
    is_whole = site.dialect.exclusive or site.dialect.gpus == "none" or partition.over_subscribe == "EXCLUSIVE"
    # A job without GPUs counts as one GPU a node: it is not free.
    return request.nodes * (per_node if is_whole else max(1, request.gpus_per_node))


def _is_usable(node: Node) -> bool:
    """Return whether the node can run jobs, now or later, without a repair."""
    return is_schedulable(node.state, set(node.flags) - _TEMPORARY_STATES)


def _meets_request(request: Request, site: Site, partition: str, node: Node) -> bool:
    """Return whether the node has the resources that the request needs on each node, in use or not."""
    site_partition = site.partitions[partition]
    # If GPUs are not a resource of Slurm, their number is in the site file only.
    gpus = site_partition.gpus_per_node if site.dialect.gpus == "none" else node.gpus
    if gpus < request.gpus_per_node or node.cpus < request.tasks_per_node * request.cpus_per_task:
        return False
    if site.dialect.memory == "ask" and (parse_mib(request.memory) or 0) > node.memory_mib:
        return False
    if request.constraint and not has_features(node.features, request.constraint):
        return False
    return node.node not in _expand(request.exclude)


def _node_reasons(request: Request, nodes: list[Node], suited: list[Node], able: list[Node]) -> Iterator[str]:
    required = set(_expand(request.nodelist))
    if missing := required - {node.node for node in able}:
        yield f"{hostlist.fold(missing)} of the node list cannot run the job"
    yield from _size_reasons(request, nodes, suited)
    if len(able) < request.nodes <= len(suited):
        down = [node for node in suited if not _is_usable(node)]
        flags = sorted({flag for node in down for flag in (node.flags or (node.state,))})
        yield f"{len(able)} of {len(suited)} nodes can run the job, the others are {', '.join(flags)}"


def _size_reasons(request: Request, nodes: list[Node], suited: list[Node]) -> Iterator[str]:
    if len(suited) < request.nodes:
        gpus = f"{request.gpus_per_node} GPUs, " if request.gpus_per_node else ""
        cpus = request.tasks_per_node * request.cpus_per_task
        yield f"{len(suited)} of its {len(nodes)} nodes have the requested resources ({gpus}{cpus} CPUs, …)"


def _quota_reasons(plan: Plan, site: Site, snapshot: Snapshot) -> Iterator[str]:
    quota, gpus = site.place.max_gpu_hours, plan.job.nodes * plan.job.gpus_per_node
    if not quota or not gpus:
        return
    if snapshot.account is None:
        yield f"quota of {quota:g} GPU hours: usage unknown, accounting does not answer"
        return
    used, needed = snapshot.account.used_gpu_hours, gpus * plan.job.time_s / 3600
    committed = _committed_gpu_hours(site, snapshot, snapshot.account.user)
    if used + committed + needed > quota:
        others = f", {committed:.0f} left to other jobs" if committed else ""
        message = f"quota: {used:.0f} of {quota:g} GPU hours used in {QUOTA_DAYS} days{others}"
        yield f"{message}, this job may need {needed:.0f}"


def _committed_gpu_hours(site: Site, snapshot: Snapshot, user: str) -> float:
    """Return the GPU hours that the user's running and pending jobs may still use until their time limits."""
    hours = 0.0
    unreported = {
        name: pools.unreported_gpus(snapshot.jobs, partition.gpus_per_node)
        for name, partition in site.partitions.items()
    }
    for job in (job for job in snapshot.jobs if job.user == user):
        gpus = job.nodes * (parse_gpus(job.gres)[1] or unreported.get(job.partition, 0))
        left_s = float(job.time_limit_s or 0)
        if job.state != "PENDING" and job.end:
            left_s = datetime.fromisoformat(job.end).timestamp() - snapshot.skew_s - time.time()
        hours += pools.task_count(job.job_id) * gpus * max(0.0, left_s) / 3600
    return hours


@lru_cache(maxsize=1024)
def _expand(folded: str) -> frozenset[str]:
    """Expand a host list; an invalid list gives none, and Slurm reports its error."""
    try:
        return frozenset(hostlist.expand(folded)) if folded else frozenset()
    except UsageError:
        return frozenset()


def never_reasons(request: Request, snapshots: Sequence[tuple[Site, Snapshot]]) -> list[str]:
    """Return why no partition of these sites can ever run the request, a reason for each; [] if one may."""
    no_data = msgspec.structs.replace(request, data={})
    all_candidates = [c for site, state in snapshots for c in candidates(no_data, site, state)]
    return (
        [f"{c.pool}: {c.never[0]}" for c in all_candidates if c.never] if all(c.never for c in all_candidates) else []
    )


def has_same_nodes(a: Candidate, b: Candidate) -> bool:
    """Return whether two partitions of a site consist of the same nodes."""
    return a.site.name == b.site.name and a.node_names == b.node_names
