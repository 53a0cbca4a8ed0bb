"""Order nodes depth first over the fabric, so that neighbouring ranks are close.

In a depth-first order the nodes of each subtree are consecutive: a ring over the ranks crosses each switch's uplink
once in each direction, which is the minimum.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from pitools.core.record import Record
from pitools.topology.fabric_model import Fabric, natural_sort_key
from pitools.topology.torus_order import torus_order


class NodeSlot(Record, frozen=True, kw_only=True, tag="pit.node-slot/1"):
    """A node's position in the order. leaf: its switch or block, "" for a node outside the fabric."""

    position: int
    node: str
    leaf: str
    path: tuple[str, ...] = ()


_Branch = tuple[tuple[str, ...], list[str]]  # a leaf's path, and its selected nodes


def rank_order(nodes: Iterable[str], fabric: Fabric, group: int = 1) -> list[NodeSlot]:
    """Return the nodes in rank order, without duplicates; nodes outside the fabric are last, by name.

    Below each switch, children with a whole number of groups of `group` nodes are first, then children with more nodes,
    so that few groups span switches. Blocks keep Slurm's order, in which adjacent blocks are close. On a torus,
    consecutive nodes are neighbours.
    """
    remaining = set(nodes)
    placed: list[tuple[str, tuple[str, ...]]] = []
    if fabric.torus:
        placed = [(node, ()) for node in torus_order(remaining, fabric.torus)]
    else:
        branches = [
            (leaf.path, sorted(leaf_nodes, key=natural_sort_key))
            for leaf in fabric.leaves
            if (leaf_nodes := remaining.intersection(leaf.nodes))
        ]
        placed = list(_walk(branches, 0, group, fabric.kind == "block"))
    remaining.difference_update(node for node, _ in placed)
    placed.extend((node, ()) for node in sorted(remaining, key=natural_sort_key))
    return [
        NodeSlot(position=position, node=node, leaf=path[-1] if path else "", path=path)
        for position, (node, path) in enumerate(placed)
    ]


def _walk(branches: Sequence[_Branch], depth: int, group: int, as_given: bool) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield nodes with their leaves' paths. depth: length of the path prefix that all branches share."""
    children: dict[str, list[_Branch]] = {}
    for path, selected in branches:
        if len(path) == depth:
            yield from ((node, path) for node in selected)
        else:
            children.setdefault(path[depth], []).append((path, selected))
    sizes = {name: sum(len(part_nodes) for _, part_nodes in parts) for name, parts in children.items()}
    names = list(children) if as_given else sorted(children, key=lambda name: (sizes[name] % group != 0, -sizes[name]))
    for name in names:
        yield from _walk(children[name], depth + 1, group, as_given)
