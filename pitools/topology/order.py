"""Rank order: depth first over the fabric, so that neighbouring ranks are near each other.

Every subtree's nodes are consecutive in a depth-first order, so a ring over the ranks crosses each switch's uplink
once in and once out, which no other order can beat.
"""

from __future__ import annotations

from collections.abc import Iterable

from pitools.core.record import Record
from pitools.topology.model import Fabric, natural


class Slot(Record, frozen=True, kw_only=True, tag="pit.slot/1"):
    """A node's place in the order. leaf: its switch or block, "" when the fabric does not know the node."""

    position: int
    node: str
    leaf: str
    path: tuple[str, ...] = ()


def order(nodes: Iterable[str], fabric: Fabric) -> list[Slot]:
    """The nodes in rank order; nodes the fabric does not know come last, by name. Each node once."""
    wanted = set(nodes)
    placed: list[tuple[str, tuple[str, ...]]] = []
    for leaf in fabric.leaves:
        here = sorted(wanted.intersection(leaf.nodes), key=natural)
        placed.extend((node, leaf.path) for node in here)
        wanted.difference_update(here)
    placed.extend((node, ()) for node in sorted(wanted, key=natural))
    return [
        Slot(position=position, node=node, leaf=path[-1] if path else "", path=path)
        for position, (node, path) in enumerate(placed)
    ]
