"""Every partition of every site that a request could go to, and what speaks against the others."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
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
from pitools.slurm.records import Node
from pitools.slurm.records import Partition as Seen
from pitools.slurm.states import is_schedulable

_ALL_OF = re.compile(r"[\w.:-]+(&[\w.:-]+)*")  # other constraints are left to Slurm, which reads them best
# A reservation for maintenance ends, and a cloud's node that is put to sleep is woken: Slurm says when.
_PASSING_STATES = frozenset({"maintenance", "power_down", "powering_down"})
_MEMORY = re.compile(r"(\d+)([KMGT]?)B?")
_MIB = {"K": 1 / 1024, "": 1, "M": 1, "G": 1024, "T": 1024**2}


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One partition of one site, for one request.

    plan: what `pit launch run -` would do; None where there can be no such plan. reasons: what speaks against it; ()
    where it fits; never: those of them that no waiting changes. units: GPUs that it would hold, or nodes where there
    are none. able_nodes, suited_nodes: how many of the partition's nodes could serve the request, and how many there
    are; unhealthy: that are down, drained or the like.
    """

    site: Site
    partition: str
    plan: Plan | None = None
    reasons: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    units: int = 0
    able_nodes: int = 0
    suited_nodes: int = 0
    unhealthy_nodes: int = 0
    node_names: frozenset[str] = frozenset()

    @property
    def pool(self) -> str:
        """Its name among all pools."""
        return pools.pool_name(self.site.name, self.partition)

    @property
    def fits(self) -> bool:
        """Whether the request could run there."""
        return self.plan is not None and not self.reasons

    @property
    def site_partition(self) -> SitePartition:
        """The partition in the site file."""
        return self.site.partitions[self.partition]


def candidates(
    request: Request, site: Site, snapshot: Snapshot, where: str = "request", text: str = ""
) -> list[Candidate]:
    """Each partition of the site file, or the one that the request names, with a plan or reasons against it.

    where: the request's file, for errors; text: what stands in it, for the run's folder.
    """
    names = [request.partition] if request.partition else list(site.partitions)
    bare = [_candidate(msgspec.structs.replace(request, data={}), site, name, snapshot, where, text) for name in names]
    if not request.data or not any(one.plan for one in bare):
        return bare
    # Reading the manifests of large datasets takes its time, and is the same for every partition.
    chosen = next(one.plan.partition for one in bare if one.plan)
    try:
        data = planning.make_plan(with_time_for_speed(request, site, chosen), site, where).data
    except PitError as error:
        return [msgspec.structs.replace(one, plan=None, reasons=(*one.reasons, str(error))) for one in bare]
    return [_with_data(one, request, data) for one in bare]


def _candidate(request: Request, site: Site, name: str, snapshot: Snapshot, where: str, text: str) -> Candidate:
    there = next((one for one in snapshot.partitions if one.partition == name), None)
    if there is None or name not in site.partitions:
        whose = "cluster" if name in site.partitions else "site file"
        reason = f"the {whose} has no such partition"
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
    names = frozenset(_expand(there.node_list))
    nodes = [node for node in snapshot.nodes if node.node in names]
    healthy = [node for node in nodes if _is_usable(node)]
    suited = [node for node in nodes if _meets_request(request, site, name, node)]
    able = [node for node in suited if _is_usable(node)]
    if plan:
        reasons += [
            *_node_reasons(request, nodes, suited, able),
            *slurm_limits.refusal_reasons(plan.job, there, snapshot),
        ]
        reasons += _quota_reasons(plan, site, snapshot)
        # Which features a node has may change; how large it is does not.
        bare = msgspec.structs.replace(request, constraint="")
        never += _of_size(request, nodes, [node for node in nodes if _meets_request(bare, site, name, node)])
    return Candidate(
        site=site,
        partition=name,
        plan=plan,
        reasons=tuple(dict.fromkeys(reasons)),
        never=tuple(never),
        units=_capacity_units(request, site, there, nodes),
        able_nodes=len(able),
        suited_nodes=len(nodes),
        unhealthy_nodes=len(nodes) - len(healthy),
        node_names=names,
    )


def with_time_for_speed(request: Request, site: Site, partition: str) -> Request:
    """The request for one partition: on nodes slower than others it is given more time, in whole minutes."""
    speed = site.partitions[partition].speed
    time = request.time or site.defaults.time
    if speed < 1:
        time = units.to_slurm_time(math.ceil(units.parse_duration(time) / speed / 60) * 60)
    return msgspec.structs.replace(request, partition=partition, time=time)


def _with_data(candidate: Candidate, request: Request, data: tuple[StagedDataset, ...]) -> Candidate:
    if candidate.plan is None:
        return candidate
    whole = msgspec.structs.replace(candidate.plan.request, data=request.data)
    return msgspec.structs.replace(candidate, plan=msgspec.structs.replace(candidate.plan, request=whole, data=data))


def _capacity_units(request: Request, site: Site, seen: Seen, nodes: list[Node]) -> int:
    """What it would hold, in the units of the partition's pool."""
    per_node = pools.gpus_per_node(site.partitions[seen.partition], nodes)
    if not per_node:
        return request.nodes
    # Who has a node alone has its GPUs as well; and where Slurm does not count GPUs, a node in use is in use.
    is_whole = site.dialect.exclusive or site.dialect.gpus == "none" or seen.over_subscribe == "EXCLUSIVE"
    # What asks for no GPU is not for nothing all the same.
    return request.nodes * (per_node if is_whole else max(1, request.gpus_per_node))


def _is_usable(node: Node) -> bool:
    """Whether it could serve a job, now or later, without anybody's repairing it."""
    return is_schedulable(node.state, set(node.flags) - _PASSING_STATES)


def _meets_request(request: Request, site: Site, partition: str, node: Node) -> bool:
    """Whether the node has what the request asks of each, in use or not."""
    said = site.partitions[partition]
    # Where GPUs are no resource of Slurm's, only the site file knows of them.
    gpus = said.gpus_per_node if site.dialect.gpus == "none" else node.gpus
    if gpus < request.gpus_per_node or node.cpus < request.tasks_per_node * request.cpus_per_task:
        return False
    memory = _MEMORY.fullmatch(request.memory.upper())
    if memory and site.dialect.memory == "ask" and int(memory[1]) * _MIB[memory[2]] > node.memory_mib:
        return False
    if _ALL_OF.fullmatch(request.constraint) and not set(request.constraint.split("&")) <= set(node.features):
        return False
    return node.node not in _expand(request.exclude)


def _node_reasons(request: Request, nodes: list[Node], suited: list[Node], able: list[Node]) -> Iterator[str]:
    wanted = set(_expand(request.nodelist))
    if missing := wanted - {node.node for node in able}:
        yield f"{hostlist.fold(missing)} of the node list cannot serve"
    yield from _of_size(request, nodes, suited)
    if len(able) < request.nodes <= len(suited):
        down = [node for node in suited if not _is_usable(node)]
        flags = sorted({word for node in down for word in (node.flags or (node.state,))})
        yield f"{len(able)} of {len(suited)} nodes can serve, the others are {', '.join(flags)}"


def _of_size(request: Request, nodes: list[Node], suited: list[Node]) -> Iterator[str]:
    if len(suited) < request.nodes:
        what = f"{request.gpus_per_node} GPUs, " if request.gpus_per_node else ""
        cpus = request.tasks_per_node * request.cpus_per_task
        yield f"{len(suited)} of its {len(nodes)} nodes have what is asked of each ({what}{cpus} CPUs, …)"


def _quota_reasons(plan: Plan, site: Site, snapshot: Snapshot) -> Iterator[str]:
    quota, gpus = site.place.gpu_hours, plan.job.nodes * plan.job.gpus_per_node
    if not quota or not gpus:
        return
    if snapshot.account is None:
        yield f"there is a quota of {quota:g} GPU hours, and what is left of it is not known"
        return
    used, needed = snapshot.account.gpu_hours, gpus * plan.job.time_s / 3600
    if used + needed > quota:
        yield f"quota: {used:.0f} of {quota:g} GPU hours used in {QUOTA_DAYS} days, and this may use {needed:.0f}"


@lru_cache(maxsize=1024)
def _expand(folded: str) -> frozenset[str]:
    """The names of a list that a person or Slurm wrote; what is no list is left to Slurm to refuse."""
    try:
        return frozenset(hostlist.expand(folded)) if folded else frozenset()
    except UsageError:
        return frozenset()


def never(request: Request, seen: Sequence[tuple[Site, Snapshot]]) -> list[str]:
    """Why no partition of these sites can ever take the request, one sentence each; [] where one may."""
    bare = msgspec.structs.replace(request, data={})
    found = [one for site, said in seen for one in candidates(bare, site, said)]
    return [f"{one.pool}: {one.never[0]}" for one in found if one.never] if all(one.never for one in found) else []


def same_nodes(left: Candidate, right: Candidate) -> bool:
    """Whether two partitions are two names for the same nodes."""
    return left.site.name == right.site.name and left.node_names == right.node_names
