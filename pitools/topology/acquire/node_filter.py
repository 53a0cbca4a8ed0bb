"""Which nodes a waiting job could run on, which of them are free, and what keeps it to those that were chosen."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from pitools.core import hostlist
from pitools.slurm.fields import parse_gpus
from pitools.slurm.records import Node, SlurmJob
from pitools.slurm.states import is_schedulable
from pitools.topology.fabric_model import Fabric

if TYPE_CHECKING:
    from pitools.topology.choose import NodeChoice  # numpy comes with it

ConstraintKind = Literal["exclude", "nodelist", "reservation"]

_ALL = re.compile(r"[\w.:-]+(&[\w.:-]+)*")
_ANY = re.compile(r"[\w.:-]+(\|[\w.:-]+)*")
_RESERVED_FLAGS = frozenset({"reserved", "completing"})


class Constraint(NamedTuple):
    """What is asked of Slurm. allowed: the nodes that it leaves; exclude, nodelist: folded; reserved_nodes: nodes to
    reserve."""

    allowed: frozenset[str]
    exclude: str = ""
    nodelist: str = ""
    reserved_nodes: str = ""


def fitting_nodes(nodes: Iterable[Node], job: SlurmJob) -> list[Node]:
    """Nodes of the job's partitions that have its features and GPUs and that it does not exclude itself.

    A feature expression beyond `a&b` or `a|b` is left to Slurm: every node passes.
    """
    partitions = set(job.partition.split(","))
    excluded = _expand_set(job.excluded_nodes)
    kind, count = parse_gpus(job.gres)
    return [
        node
        for node in nodes
        if partitions.intersection(node.partitions)
        and node.node not in excluded
        and node.gpus >= count
        and (not kind or kind in node.gpu_type.split(","))
        and _has_features(node.features, job.features)
    ]


def _expand_set(folded: str) -> set[str]:
    return set(hostlist.expand(folded)) if folded else set()


def _has_features(features: Sequence[str], expression: str) -> bool:
    if _ALL.fullmatch(expression):
        return all(word in features for word in expression.split("&"))
    if _ANY.fullmatch(expression):
        return any(word in features for word in expression.split("|"))
    return True


def free_nodes(nodes: Iterable[Node], k: int) -> list[str]:
    """Idle nodes that nobody has reserved; without those that Slurm plans for another job, if there are k others."""
    idle = [
        node
        for node in nodes
        if node.state == "idle" and is_schedulable(node.state, node.flags) and _RESERVED_FLAGS.isdisjoint(node.flags)
    ]
    open_ = [node.node for node in idle if "planned" not in node.flags]
    return open_ if len(open_) >= k else [node.node for node in idle]


def constrain(
    choice: NodeChoice, fabric: Fabric, nodes: Sequence[Node], job: SlurmJob, by: ConstraintKind, partition: str = ""
) -> Constraint:
    """What keeps a job to its choice. nodes: all there are. partition: the one of the job's that was chosen from.

    exclude: every node of its partitions but those of the chosen leaves, so that a leaf's other nodes stand in for one
    that is lost. nodelist: the chosen nodes and no others. reservation: as exclude, and the chosen nodes kept free.
    """
    chosen = {*choice.nodes, *choice.spares}
    if by == "nodelist":
        return Constraint(frozenset(choice.nodes), job.excluded_nodes, hostlist.fold(choice.nodes))
    in_partition = msgspec.structs.replace(job, partition=partition or job.partition)
    allowed = frozenset(
        nodes_of_leaves(chosen, fabric).intersection(node.node for node in fitting_nodes(nodes, in_partition))
    )
    partitions = set(job.partition.split(","))
    others = {node.node for node in nodes if partitions.intersection(node.partitions)} | _expand_set(job.excluded_nodes)
    return Constraint(
        allowed, hostlist.fold(others - allowed), reserved_nodes=hostlist.fold(chosen) if by == "reservation" else ""
    )


def nodes_of_leaves(chosen: Collection[str], fabric: Fabric) -> set[str]:
    """The chosen nodes and all others of their leaves; on a torus these alone."""
    leaves = [leaf.nodes for leaf in fabric.leaves if not set(chosen).isdisjoint(leaf.nodes)]
    return set(chosen) if fabric.torus else set(chosen).union(*leaves)


def leaf_count(nodes: Iterable[str], fabric: Fabric) -> int:
    """How many leaves nodes are on; one that the fabric does not know counts as a leaf of its own."""
    home = {node: leaf.path for leaf in fabric.leaves for node in leaf.nodes}
    return len({home.get(node, (node,)) for node in nodes})
