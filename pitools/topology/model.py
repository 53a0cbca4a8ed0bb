"""The fabric as a forest of switches over nodes, from what Slurm says of it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import msgspec

from pitools.core import hosts
from pitools.core.errors import DataError
from pitools.slurm.records import Block, Switch


class Leaf(msgspec.Struct, frozen=True, kw_only=True):
    """A switch with nodes on it. path: names from the root's down to its own."""

    path: tuple[str, ...]
    nodes: tuple[str, ...]


class Fabric(msgspec.Struct, frozen=True, kw_only=True):
    """All leaves, in depth-first order of the tree: leaves that are near in the list are near in the fabric."""

    leaves: tuple[Leaf, ...]


def natural(name: str) -> list[tuple[int, int | str]]:
    """A sort key under which `n2` comes before `n10`."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name) if part]


def from_switches(switches: Sequence[Switch]) -> Fabric:
    """The fabric of a `topology/tree`. Raises DataError for a cycle or a node under two leaves.

    A switch that nobody names as a child is a root; there may be several, unconnected.
    """
    by_name = {switch.switch: switch for switch in switches}
    children = {switch.switch: _names(switch.switches) for switch in switches}
    named = {child for group in children.values() for child in group}
    leaves: list[Leaf] = []

    def walk(name: str, above: tuple[str, ...]) -> None:
        if name in above:
            raise DataError(f'switch "{name}" is below itself', where="topology", hint="ask the site's administrators")
        path = (*above, name)
        below = [child for child in children.get(name, ()) if child in by_name]
        for child in sorted(below, key=natural):
            walk(child, path)
        if not below and name in by_name:
            leaves.append(Leaf(path=path, nodes=tuple(_names(by_name[name].node_list))))

    roots = [name for name in by_name if name not in named]
    if by_name and not roots:
        walk(next(iter(by_name)), ())  # every switch is below another: this finds the cycle
    for root in sorted(roots, key=natural):
        walk(root, ())
    return _checked(leaves)


def from_blocks(blocks: Iterable[Block]) -> Fabric:
    """The fabric of a `topology/block`: base blocks, in Slurm's own order, which is that of their neighbourhood."""
    base = [block for block in blocks if not block.is_aggregated]
    ordered = sorted(base, key=lambda block: (block.index, natural(block.block)))
    return _checked([Leaf(path=(block.block,), nodes=tuple(_names(block.node_list))) for block in ordered])


def _names(folded: str) -> list[str]:
    return hosts.expand(folded) if folded else []


def _checked(leaves: list[Leaf]) -> Fabric:
    home: dict[str, str] = {}
    for leaf in leaves:
        for node in leaf.nodes:
            if home.setdefault(node, leaf.path[-1]) != leaf.path[-1]:
                what = f'node "{node}" is under "{home[node]}" and "{leaf.path[-1]}"'
                raise DataError(what, where="topology", hint="ask the site's administrators")
    return Fabric(leaves=tuple(leaves))
