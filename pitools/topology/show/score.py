"""Score a job's placement: its leaves, pods and ring hops, against the best possible for its number of nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

import msgspec

from pitools.core.errors import ClusterError
from pitools.core.record import Record
from pitools.topology.fabric_model import Fabric, Leaf
from pitools.topology.fabric_model import nodes_of as all_nodes
from pitools.topology.ring_cost import leaf_paths, min_ring_hops, ring_hops


class PlacementScore(Record, frozen=True, kw_only=True, tag="pit.placement-score/1"):
    """The placement of a job.

    leaves, pods: leaf switches with its nodes, and switches directly above. ring_hops: of its ranks, in order.
    best_*, min_ring_hops: the best possible for as many nodes if all were free. reordered_ring_hops: of the job's nodes
    in their best order. locality: min_ring_hops / ring_hops; 1.0 is optimal. unknown_nodes: nodes outside the fabric,
    which count in no leaf.
    """

    job_id: str
    name: str = ""
    nodes: int = 0
    leaves: int = 0
    best_leaves: int = 0
    pods: int = 0
    best_pods: int = 0
    ring_hops: int = 0
    reordered_ring_hops: int = 0
    min_ring_hops: int = 0
    locality: float = 1.0
    unknown_nodes: int = 0


class BestPossible(NamedTuple):
    """The minimum of each measure for a number of nodes."""

    leaves: int
    pods: int
    ring_hops: int


def score_job(order: Sequence[str], fabric: Fabric, *, job_id: str = "", name: str = "") -> PlacementScore:
    """Score nodes, in rank order, against the best of all nodes.

    Raises ClusterError for a flat fabric, on which all placements are equal.
    """
    if not fabric.leaves and not fabric.torus:
        raise ClusterError(
            "the fabric is flat: placements cannot be scored", where="topology", hint="set topology.file of the site"
        )
    fabric_nodes = set(all_nodes(fabric))
    nodes = list(dict.fromkeys(order))
    nodes_in_fabric = [node for node in nodes if node in fabric_nodes]
    leaves, pods = count_leaves_and_pods(nodes_in_fabric, fabric)
    hops = ring_hops(nodes, fabric)
    best = best_possible(len(nodes_in_fabric), fabric)
    return PlacementScore(
        job_id=job_id,
        name=name,
        nodes=len(nodes),
        leaves=leaves,
        best_leaves=best.leaves,
        pods=pods,
        best_pods=best.pods,
        ring_hops=hops,
        reordered_ring_hops=min_ring_hops(nodes, fabric),
        min_ring_hops=best.ring_hops,
        locality=round(min(1.0, best.ring_hops / hops), 4) if hops else 1.0,
        unknown_nodes=len(nodes) - len(nodes_in_fabric),
    )


def count_leaves_and_pods(nodes: Collection[str], fabric: Fabric) -> tuple[int, int]:
    """Return the numbers of leaves with these nodes, and of switches directly above those leaves."""
    selected = set(nodes)
    paths = [
        path
        for leaf, path in zip(fabric.leaves, leaf_paths(fabric), strict=True)
        if not selected.isdisjoint(leaf.nodes)
    ]
    return len(paths), len({way[:-1] for way in paths if len(way) > 1})


def best_possible(k: int, fabric: Fabric) -> BestPossible:
    """Return the fewest leaves, pods and ring hops of k nodes; each minimum on its own, not all at once."""
    from pitools.topology.choose import select_nodes  # imports numpy

    candidates = list(all_nodes(fabric))
    if not 0 < k <= len(candidates):
        return BestPossible(0, 0, 0)
    leaves: list[int] = []
    pods: Counter[tuple[str, ...]] = Counter()
    for leaf, path in zip(fabric.leaves, leaf_paths(fabric), strict=True):
        leaves.append(len(leaf.nodes))
        pods[path[:-1]] += leaves[-1]
    nodes_without_pod = pods.pop((), 0)  # nodes of leaves without a parent switch
    by_ring = select_nodes(_with_common_root(fabric), candidates, k, objective="ring")
    return BestPossible(
        _fewest_for(leaves, k), _fewest_for(pods.values(), k - nodes_without_pod), min_ring_hops(by_ring.nodes, fabric)
    )


def _fewest_for(sizes: Iterable[int], k: int) -> int:
    """Return how many of the sizes are needed for k nodes, largest first."""
    capacities = accumulate(sorted(sizes, reverse=True), initial=0)
    return next((count for count, room in enumerate(capacities) if room >= k), 0)


def _with_common_root(fabric: Fabric) -> Fabric:
    """Return the fabric below one common root, so that jobs across unconnected roots have a best placement, too.

    Lengths are removed, as hops are counted.
    """
    leaves = fabric.leaves
    if fabric.kind == "tree" and len({leaf.path[0] for leaf in leaves}) > 1:
        leaves = tuple(Leaf(path=(" ", *leaf.path), nodes=leaf.nodes) for leaf in leaves)
    return msgspec.structs.replace(fabric, leaves=leaves, lengths={})
