"""Rank order: depth first over the fabric, so that neighbouring ranks are near each other.

Every subtree's nodes are consecutive in a depth-first order, so a ring over the ranks crosses each switch's uplink
once in and once out, which no other order can beat.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from pitools.core.record import Record
from pitools.topology.fabric_model import Fabric, natural_sort_key
from pitools.topology.torus_order import torus_order


class NodeSlot(Record, frozen=True, kw_only=True, tag="pit.node-slot/1"):
    """A node's place in the order. leaf: its switch or block, "" when the fabric does not know the node."""

    position: int
    node: str
    leaf: str
    path: tuple[str, ...] = ()


_Branch = tuple[tuple[str, ...], list[str]]  # a leaf's path, and those of its nodes that are wanted


def rank_order(nodes: Iterable[str], fabric: Fabric, group: int = 1) -> list[NodeSlot]:
    """The nodes in rank order, each once; nodes the fabric does not know come last, by name.

    Of the switches below one, those that hold whole groups of `group` nodes come first, then those with more nodes, so
    that few groups span switches. Blocks stay in Slurm's own order, in which neighbours are near. A torus is
    walked from neighbour to neighbour.
    """
    wanted = set(nodes)
    placed: list[tuple[str, tuple[str, ...]]] = []
    if fabric.torus:
        placed = [(node, ()) for node in torus_order(wanted, fabric.torus)]
    else:
        branches = [
            (leaf.path, sorted(here, key=natural_sort_key))
            for leaf in fabric.leaves
            if (here := wanted.intersection(leaf.nodes))
        ]
        placed = list(_walk(branches, 0, group, fabric.kind == "block"))
    wanted.difference_update(node for node, _ in placed)
    placed.extend((node, ()) for node in sorted(wanted, key=natural_sort_key))
    return [
        NodeSlot(position=position, node=node, leaf=path[-1] if path else "", path=path)
        for position, (node, path) in enumerate(placed)
    ]


def _walk(branches: Sequence[_Branch], depth: int, group: int, as_given: bool) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Nodes with their leaves' paths; all branches share the first `depth` names of their paths."""
    below: dict[str, list[_Branch]] = {}
    for path, here in branches:
        if len(path) == depth:
            yield from ((node, path) for node in here)
        else:
            below.setdefault(path[depth], []).append((path, here))
    sizes = {name: sum(len(here) for _, here in held) for name, held in below.items()}
    names = list(below) if as_given else sorted(below, key=lambda name: (sizes[name] % group != 0, -sizes[name]))
    for name in names:
        yield from _walk(below[name], depth + 1, group, as_given)
