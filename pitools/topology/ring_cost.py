"""Ring crossings: how often a ring over the ranks goes through the links of a fabric, and how rarely it could."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pitools.topology.fabric_model import Fabric, torus_coordinates


def ring_hops(order: Sequence[str], fabric: Fabric) -> int:
    """Uplinks of switches that the ring over the nodes in this order goes through, last to first included.

    A link counts each time; those of aggregated blocks count too. Between unconnected roots the ring goes over both
    roots' uplinks; a node that the fabric does not know hangs above every root. On a torus: the hops between neighbours
    of the ring.
    """
    if fabric.torus:
        at = torus_coordinates(fabric.torus)
        return sum(_hops(at[a], at[b], fabric.torus.dims) for a, b in _ring_edges(order) if a in at and b in at)
    ways = {node: way for leaf, way in zip(fabric.leaves, leaf_paths(fabric), strict=True) for node in leaf.nodes}
    return sum(_links(ways.get(a, ()), ways.get(b, ())) for a, b in _ring_edges(order))


def min_ring_hops(nodes: Collection[str], fabric: Fabric) -> int:
    """The crossings of the best order of these nodes: each switch with some of them below it, not all, twice.

    No order has fewer, and a depth-first one has no more. On a torus a bound that need not be reached: a hop a node,
    less one for each that the torus does not have, where the ring is open.
    """
    wanted = frozenset(nodes)
    if fabric.torus:
        known = len(wanted.intersection(fabric.torus.nodes))
        return max(0, 2 * known - len(wanted)) if len(wanted) > 1 else 0
    below: dict[tuple[str, ...], int] = {}
    for leaf, way in zip(fabric.leaves, leaf_paths(fabric), strict=True):
        here = len(wanted.intersection(leaf.nodes))
        for depth in range(len(way) if here else 0):
            below[way[: depth + 1]] = below.get(way[: depth + 1], 0) + here
    return 2 * sum(count < len(wanted) for count in below.values())


def leaf_paths(fabric: Fabric) -> list[tuple[str, ...]]:
    """Each leaf's way down from its root; a block's from the one root of all, through its aggregates."""
    if fabric.kind != "block":
        return [leaf.path for leaf in fabric.leaves]
    base, *sizes = fabric.block_sizes or (1,)
    over = [
        tuple(f"{size}/{number // (size // base)}" for size in reversed(sizes)) for number in range(len(fabric.leaves))
    ]
    return [("/", *above, *leaf.path) for above, leaf in zip(over, fabric.leaves, strict=True)]


def _ring_edges(order: Sequence[str]) -> list[tuple[str, str]]:
    return list(zip(order, [*order[1:], *order[:1]], strict=True))


def _links(one: tuple[str, ...], other: tuple[str, ...]) -> int:
    shared = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        shared += 1
    return len(one) + len(other) - 2 * shared


def _hops(one: tuple[int, ...], other: tuple[int, ...], dims: tuple[int, ...]) -> int:
    return sum(min((a - b) % size, (b - a) % size) for a, b, size in zip(one, other, dims, strict=True))
