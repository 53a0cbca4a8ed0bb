"""How well a job sits: its leaves, pods and ring crossings, against the best there is for as many nodes."""

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
    """One job on a fabric. leaves, pods: switches with its nodes, and those right above them. ring_hops: of its ranks.

    best_*: for as many nodes of the same fabric, were all of them free. reordered_ring_hops: of its own nodes in their
    best order. locality: of the crossings, what the best placement and order would need as well; 1.0 is as good as can
    be. unknown_nodes: nodes that the fabric does not know; they are in no leaf.
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
    """The least that so many nodes can need."""

    leaves: int
    pods: int
    ring_hops: int


def score_job(
    order: Sequence[str], fabric: Fabric, *, among: Collection[str] = (), job_id: str = "", name: str = ""
) -> PlacementScore:
    """The score of nodes in the order of their ranks. among: the nodes that it could have had; all when empty.

    Raises ClusterError on a flat fabric, on which all places are alike.
    """
    if not fabric.leaves and not fabric.torus:
        raise ClusterError(
            "nothing to score: the fabric is flat", where="topology", hint="set topology.file of the site"
        )
    known = set(all_nodes(fabric))
    own = list(dict.fromkeys(order))
    wired = [node for node in own if node in known]
    leaves, pods = spread(wired, fabric)
    found = ring_hops(own, fabric)
    could = best_possible(len(wired), fabric, among)
    return PlacementScore(
        job_id=job_id,
        name=name,
        nodes=len(own),
        leaves=leaves,
        best_leaves=could.leaves,
        pods=pods,
        best_pods=could.pods,
        ring_hops=found,
        reordered_ring_hops=min_ring_hops(own, fabric),
        min_ring_hops=could.ring_hops,
        locality=round(min(1.0, could.ring_hops / found), 4) if found else 1.0,
        unknown_nodes=len(own) - len(wired),
    )


def spread(nodes: Collection[str], fabric: Fabric) -> tuple[int, int]:
    """How many leaves nodes are on, and how many switches are right above these."""
    wanted = set(nodes)
    ways = [
        way for leaf, way in zip(fabric.leaves, leaf_paths(fabric), strict=True) if not wanted.isdisjoint(leaf.nodes)
    ]
    return len(ways), len({way[:-1] for way in ways if len(way) > 1})


def best_possible(k: int, fabric: Fabric, among: Collection[str] = ()) -> BestPossible:
    """The fewest leaves, pods and crossings that k nodes of the fabric can have; each by itself, not all at once."""
    from pitools.topology.choose import select_nodes  # numpy, and only wanted here

    room = [node for node in all_nodes(fabric) if not among or node in among]
    if not 0 < k <= len(room):
        return BestPossible(0, 0, 0)
    wanted = frozenset(room)
    leaves: list[int] = []
    pods: Counter[tuple[str, ...]] = Counter()
    for leaf, way in zip(fabric.leaves, leaf_paths(fabric), strict=True):
        leaves.append(len(wanted.intersection(leaf.nodes)))
        pods[way[:-1]] += leaves[-1]
    alone = pods.pop((), 0)  # nodes of leaves that have no switch above them
    by_ring = select_nodes(_with_common_root(fabric), room, k, objective="ring")
    return BestPossible(
        _fewest_of(leaves, k), _fewest_of(pods.values(), k - alone), min_ring_hops(by_ring.nodes, fabric)
    )


def _fewest_of(sizes: Iterable[int], k: int) -> int:
    """How many of these it takes to hold k nodes."""
    held = accumulate(sorted(sizes, reverse=True), initial=0)
    return next((count for count, room in enumerate(held) if room >= k), 0)


def _with_common_root(fabric: Fabric) -> Fabric:
    """With one root over all: a job that was started over unconnected roots has a best place there, too.

    Without lengths, for crossings are counted and not measured.
    """
    leaves = fabric.leaves
    if fabric.kind == "tree" and len({leaf.path[0] for leaf in leaves}) > 1:
        leaves = tuple(Leaf(path=(" ", *leaf.path), nodes=leaf.nodes) for leaf in leaves)
    return msgspec.structs.replace(fabric, leaves=leaves, lengths={})
