"""The fabric as a forest of switches over nodes, from what Slurm or a file says of it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from math import prod
from typing import Literal

import msgspec

from pitools.core import hostlist
from pitools.core.errors import DataError, UsageError
from pitools.slurm.records import Block, Switch

_MAX_DEPTH = 64
_HINT = "ask the site's administrators"
_ITEM = re.compile(r"(?:[^,\[\]\s]|\[[^\]]*\])+")


class Leaf(msgspec.Struct, frozen=True, kw_only=True):
    """A switch with nodes on it. path: names from the root's down to its own; a name stands for one switch only."""

    path: tuple[str, ...]
    nodes: tuple[str, ...]


class Torus(msgspec.Struct, frozen=True, kw_only=True):
    """A grid whose edges meet. dims: its extents; nodes: `prod(dims)` of them, the last dimension running fastest."""

    dims: tuple[int, ...]
    nodes: tuple[str, ...]


class Fabric(msgspec.Struct, frozen=True, kw_only=True):
    """How nodes are wired. No leaves, no torus: a flat fabric, of which nothing is known.

    leaves: in depth-first order of the tree: those near in the list are near in the fabric. Roots may be several, and
    unconnected. lengths: switch → length of the link above it, 1.0 where not named; what a pair of nodes is apart is
    the sum over the links between them. block_sizes: of a block topology, ascending: nodes of a base block, then of
    each aggregate of adjacent blocks.
    """

    leaves: tuple[Leaf, ...] = ()
    kind: Literal["tree", "block", "torus", "flat"] = "tree"
    lengths: dict[str, float] = {}
    block_sizes: tuple[int, ...] = ()
    torus: Torus | None = None


def natural_sort_key(name: str) -> list[tuple[int, int, str]]:
    """A sort key under which `n2` comes before `n10`; no two names have the same."""
    parts = [part for part in re.split(r"(\d+)", name) if part]
    # A number is compared as its length and digits, for names may hold more digits than int() takes.
    numbers = [(0, len(part.lstrip("0")), part.lstrip("0")) if part.isdecimal() else (1, 0, part) for part in parts]
    return [*numbers, (-1, 0, name)]


def expand_ordered(folded: str) -> list[str]:
    """Names of `b1,n[01-04]` in the order in which they are written, each once. Raises UsageError."""
    if _ITEM.sub("", folded).strip(", \n"):
        raise UsageError(f"{folded[:80]!r} is not a host list", hint="write n01 or n[01-04,07]")
    names: list[str] = []
    items = _ITEM.findall(folded)
    if hostlist.count_hosts(folded) > hostlist.MAX_HOSTS:
        raise UsageError(
            f"{folded[:80]!r} stands for more than {hostlist.MAX_HOSTS} names", hint="write a shorter list"
        )
    for item in items:
        # A switch may be called G6/P10/S14, which no node is.
        head, slash, tail = item.rpartition("/")
        names += [head + slash + name for name in hostlist.expand(tail)] if "[" in tail else [item]
    return list(dict.fromkeys(names))


def nodes_of(fabric: Fabric) -> list[str]:
    """Every node of the fabric, in the order of the fabric."""
    if fabric.torus:
        return list(fabric.torus.nodes)
    return [node for leaf in fabric.leaves for node in leaf.nodes]


def from_switches(switches: Sequence[Switch], origins: Mapping[str, str] = {}) -> Fabric:
    """The fabric of a `topology/tree`. origins: switch → where it was read, for errors.

    A switch that nobody names as a child is a root; there may be several, unconnected. Raises DataError for a cycle, a
    switch below two others, and a node under two leaves or under none of its switch's.
    """
    by_name = {switch.switch: switch for switch in switches}
    below = {name: [child for child in expand_ordered(s.switches) if child in by_name] for name, s in by_name.items()}
    above = _parents(below, origins)
    leaves: list[Leaf] = []
    seen: set[str] = set()

    def walk(name: str, path: tuple[str, ...]) -> set[str]:
        if len(path) >= _MAX_DEPTH:
            raise _fabric_error(f'switch "{name}" is the {len(path) + 1}th below another', name, origins)
        seen.add(name)
        path, own = (*path, name), expand_ordered(by_name[name].node_list)
        if not below[name]:
            leaves.append(Leaf(path=path, nodes=tuple(own)))
            return set(own)
        held = set().union(*(walk(child, path) for child in below[name]))
        if lost := [node for node in own if node not in held]:
            raise _fabric_error(f'node "{lost[0]}" is under "{name}" but under none of its switches', name, origins)
        return held

    for root in by_name:
        if root not in above:
            walk(root, ())
    for name in by_name:
        if name not in seen:  # whoever cannot be reached from a root is on a cycle, or below one
            raise _fabric_error(f'switch "{_on_cycle(name, above)}" is below itself', name, origins)
    return tree_fabric(leaves, origins=origins)


def from_blocks(blocks: Iterable[Block]) -> Fabric:
    """The fabric of a `topology/block`: base blocks, in Slurm's own order, which is that of their neighbourhood."""
    every = list(blocks)
    base = sorted(
        (b for b in every if not b.is_aggregated), key=lambda block: (block.index, natural_sort_key(block.block))
    )
    leaves = [Leaf(path=(block.block,), nodes=tuple(expand_ordered(block.node_list))) for block in base]
    return block_fabric(leaves, {block.size for block in every if block.size})


def tree_fabric(leaves: Iterable[Leaf], lengths: Mapping[str, float] = {}, origins: Mapping[str, str] = {}) -> Fabric:
    """A checked tree of these leaves, put in depth-first order. Raises DataError for a node under two of them."""
    ordered = sorted(leaves, key=lambda leaf: [natural_sort_key(name) for name in leaf.path])
    return Fabric(leaves=_require_valid(ordered, origins), lengths={k: v for k, v in lengths.items() if v != 1.0})


def block_fabric(leaves: Iterable[Leaf], block_sizes: Collection[int] = (), origins: Mapping[str, str] = {}) -> Fabric:
    """A checked block topology, its blocks in the order given. Raises DataError for a node in two of them."""
    return Fabric(leaves=_require_valid(leaves, origins), kind="block", block_sizes=tuple(sorted(set(block_sizes))))


def torus_fabric(dims: Sequence[int], nodes: Sequence[str], where: str = "topology") -> Fabric:
    """A torus. Raises DataError unless there is one node for each place."""
    if not dims or min(dims) < 1 or prod(dims) != len(nodes) or len(set(nodes)) != len(nodes):
        shape = " by ".join(map(str, dims)) or "no dimensions"
        what = f"{len(set(nodes))} nodes for a torus of {shape}"
        raise DataError(what, where=where, hint="one node for each place, the last dimension running fastest")
    return Fabric(kind="torus", torus=Torus(dims=tuple(dims), nodes=tuple(nodes)))


def torus_coordinates(torus: Torus) -> dict[str, tuple[int, ...]]:
    """Where each node of a torus is."""
    steps = [prod(torus.dims[axis + 1 :]) for axis in range(len(torus.dims))]
    return {
        node: tuple(index // step % size for step, size in zip(steps, torus.dims, strict=True))
        for index, node in enumerate(torus.nodes)
    }


def _parents(below: Mapping[str, Sequence[str]], origins: Mapping[str, str]) -> dict[str, str]:
    above: dict[str, str] = {}
    for name, children in below.items():
        for child in children:
            if above.setdefault(child, name) != name:
                raise _fabric_error(f'switch "{child}" is under "{above[child]}" and "{name}"', name, origins)
    return above


def _on_cycle(name: str, above: Mapping[str, str]) -> str:
    passed: set[str] = set()
    while name not in passed:
        passed.add(name)
        name = above[name]
    return name


def _require_valid(leaves: Iterable[Leaf], origins: Mapping[str, str]) -> tuple[Leaf, ...]:
    home: dict[str, str] = {}
    found = []
    for leaf in leaves:
        name = leaf.path[-1]
        for node in leaf.nodes:
            if home.setdefault(node, name) != name:
                raise _fabric_error(f'node "{node}" is under "{home[node]}" and "{name}"', name, origins)
        if leaf.nodes:
            found.append(Leaf(path=leaf.path, nodes=tuple(sorted(set(leaf.nodes), key=natural_sort_key))))
    return tuple(found)


def _fabric_error(what: str, switch: str, origins: Mapping[str, str]) -> DataError:
    return DataError(what, where=origins.get(switch, "topology"), hint=_HINT)
