"""Filter the nodes that a pending job fits and that are free, and build the constraint to the chosen nodes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from pitools.core import hostlist
from pitools.slurm.fields import has_features, parse_gpus
from pitools.slurm.records import Node, SlurmJob
from pitools.slurm.states import is_schedulable
from pitools.topology.fabric_model import Fabric

if TYPE_CHECKING:
    from pitools.topology.choose import NodeChoice  # imports numpy

ConstraintKind = Literal["exclude", "nodelist", "reservation"]

_RESERVED_FLAGS = frozenset({"blocked", "completing", "reserved"})  # blocked: by a job with --exclusive=topo


class Constraint(NamedTuple):
    """A constraint on a job. allowed: the nodes it may use. exclude, nodelist, reserved_nodes: host lists for Slurm."""

    allowed: frozenset[str]
    exclude: str = ""
    nodelist: str = ""
    reserved_nodes: str = ""


def fitting_nodes(nodes: Iterable[Node], job: SlurmJob) -> list[Node]:
    """Return the nodes of the job's partitions with its features and GPUs, except those it excludes.

    Feature expressions other than `a&b` and `a|b` are not evaluated: every node passes.
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
        and has_features(node.features, job.features)
    ]


def _expand_set(folded: str) -> set[str]:
    return set(hostlist.expand(folded)) if folded else set()


def free_nodes(nodes: Iterable[Node], k: int) -> list[str]:
    """Return idle, unreserved nodes; without nodes planned for another job if at least k remain."""
    idle = [
        node
        for node in nodes
        if node.state == "idle" and is_schedulable(node.state, node.flags) and _RESERVED_FLAGS.isdisjoint(node.flags)
    ]
    unplanned = [node.node for node in idle if "planned" not in node.flags]
    return unplanned if len(unplanned) >= k else [node.node for node in idle]


def constrain(
    choice: NodeChoice, fabric: Fabric, nodes: Sequence[Node], job: SlurmJob, by: ConstraintKind, partition: str = ""
) -> Constraint:
    """Return the constraint of a job to its choice. nodes: all nodes. partition: the job's partition chosen from.

    by: `exclude` excludes all nodes of the job's partitions except the chosen leaves, so that other nodes of a leaf can
    replace a lost one; `nodelist` requires exactly the chosen nodes; `reservation` is exclude, and reserves the nodes.
    """
    chosen = set(choice.nodes)
    if by == "nodelist":
        return Constraint(frozenset(choice.nodes), job.excluded_nodes, hostlist.fold(choice.nodes))
    in_partition = msgspec.structs.replace(job, partition=partition or job.partition)
    allowed = frozenset(
        nodes_of_leaves(chosen, fabric).intersection(node.node for node in fitting_nodes(nodes, in_partition))
    )
    partitions = set(job.partition.split(","))
    excluded = {node.node for node in nodes if partitions.intersection(node.partitions)} | _expand_set(
        job.excluded_nodes
    )
    return Constraint(
        allowed, hostlist.fold(excluded - allowed), reserved_nodes=hostlist.fold(chosen) if by == "reservation" else ""
    )


def nodes_of_leaves(chosen: Collection[str], fabric: Fabric) -> set[str]:
    """Return the chosen nodes and all others of their leaves; on a torus only the chosen."""
    leaves = [leaf.nodes for leaf in fabric.leaves if not set(chosen).isdisjoint(leaf.nodes)]
    return set(chosen) if fabric.torus else set(chosen).union(*leaves)


def leaf_count(nodes: Iterable[str], fabric: Fabric) -> int:
    """Return the number of leaves with these nodes; a node outside the fabric counts as a leaf."""
    leaf_by_node = {node: leaf.path for leaf in fabric.leaves for node in leaf.nodes}
    return len({leaf_by_node.get(node, (node,)) for node in nodes})
