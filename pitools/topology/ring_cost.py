"""Ring hops: how many links of the fabric a ring over the ranks crosses, and the minimum for the same nodes."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pitools.topology.fabric_model import Fabric, torus_coordinates


def ring_hops(order: Sequence[str], fabric: Fabric) -> int:
    """Return the switch uplinks that the ring over the nodes crosses, from the last node to the first included.

    Each crossing counts, also those of aggregated blocks. Between unconnected roots the ring crosses both roots'
    uplinks; a node outside the fabric is attached above all roots. On a torus: the hops between consecutive nodes.
    """
    if fabric.torus:
        coordinates = torus_coordinates(fabric.torus)
        return sum(
            _hop_count(coordinates[a], coordinates[b], fabric.torus.dims)
            for a, b in _ring_edges(order)
            if a in coordinates and b in coordinates
        )
    path_by_node = {
        node: path for leaf, path in zip(fabric.leaves, leaf_paths(fabric), strict=True) for node in leaf.nodes
    }
    return sum(_link_count(path_by_node.get(a, ()), path_by_node.get(b, ())) for a, b in _ring_edges(order))


def min_ring_hops(nodes: Collection[str], fabric: Fabric) -> int:
    """Return the fewest crossings of any order: two for each switch with some, but not all, of the nodes below it.

    A depth-first order reaches the minimum. On a torus it is a lower bound: one hop per node, less one for each node
    outside the torus, where the ring is open.
    """
    selected = frozenset(nodes)
    if fabric.torus:
        inside = len(selected.intersection(fabric.torus.nodes))
        return max(0, 2 * inside - len(selected)) if len(selected) > 1 else 0
    count_below: dict[tuple[str, ...], int] = {}
    for leaf, path in zip(fabric.leaves, leaf_paths(fabric), strict=True):
        count_in_leaf = len(selected.intersection(leaf.nodes))
        for depth in range(len(path) if count_in_leaf else 0):
            count_below[path[: depth + 1]] = count_below.get(path[: depth + 1], 0) + count_in_leaf
    return 2 * sum(count < len(selected) for count in count_below.values())


def leaf_paths(fabric: Fabric) -> list[tuple[str, ...]]:
    """Return each leaf's path from its root; a block's from one common root through its aggregates."""
    if fabric.kind != "block":
        return [leaf.path for leaf in fabric.leaves]
    base, *sizes = fabric.block_sizes or (1,)
    aggregates = [
        tuple(f"{size}/{number // (size // base)}" for size in reversed(sizes)) for number in range(len(fabric.leaves))
    ]
    return [("/", *above, *leaf.path) for above, leaf in zip(aggregates, fabric.leaves, strict=True)]


def _ring_edges(order: Sequence[str]) -> list[tuple[str, str]]:
    return list(zip(order, [*order[1:], *order[:1]], strict=True))


def _link_count(left: tuple[str, ...], right: tuple[str, ...]) -> int:
    shared = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        shared += 1
    return len(left) + len(right) - 2 * shared


def _hop_count(left: tuple[int, ...], right: tuple[int, ...], dims: tuple[int, ...]) -> int:
    return sum(min((a - b) % size, (b - a) % size) for a, b, size in zip(left, right, dims, strict=True))
