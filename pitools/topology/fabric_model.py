"""The fabric: a forest of switches over nodes, or a torus. Built from Slurm's records or a file, and validated."""

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
_ADMIN_HINT = "ask the site's administrators"
_LIST_ITEM = re.compile(r"(?:[^,\[\]\s]|\[[^\]]*\])+")


class Leaf(msgspec.Struct, frozen=True, kw_only=True):
    """A switch with nodes attached. path: switch names from the root to the leaf; names are unique."""

    path: tuple[str, ...]
    nodes: tuple[str, ...]


class Torus(msgspec.Struct, frozen=True, kw_only=True):
    """A torus. dims: its extents; nodes: `prod(dims)` of them, in row-major order."""

    dims: tuple[int, ...]
    nodes: tuple[str, ...]


class Fabric(msgspec.Struct, frozen=True, kw_only=True):
    """How nodes are wired. A fabric without leaves and torus is flat: its wiring is unknown.

    leaves: in depth-first order of the tree, so neighbours in the list are close. Several unconnected roots may exist.
    lengths: switch → length of its uplink, 1.0 by default; the distance of two nodes is the sum over the links between.
    block_sizes: of a block topology, ascending: nodes of a base block, then of each aggregate of adjacent blocks.
    """

    leaves: tuple[Leaf, ...] = ()
    kind: Literal["tree", "block", "torus", "flat"] = "tree"
    lengths: dict[str, float] = {}
    block_sizes: tuple[int, ...] = ()
    torus: Torus | None = None


def natural_sort_key(name: str) -> list[tuple[int, int, str]]:
    """Return a sort key that puts `n2` before `n10`; unique for each name."""
    parts = [part for part in re.split(r"(\d+)", name) if part]
    # A number is compared as its length and digits: names may have more digits than int() accepts.
    numbers = [(0, len(part.lstrip("0")), part.lstrip("0")) if part.isdecimal() else (1, 0, part) for part in parts]
    return [*numbers, (-1, 0, name)]


def expand_ordered(folded: str) -> list[str]:
    """Return the names in `b1,n[01-04]` as ordered in the list, without duplicates. Raises UsageError."""
    if _LIST_ITEM.sub("", folded).strip(", \n"):
        raise UsageError(f"{folded[:80]!r} is not a host list", hint="write n01 or n[01-04,07]")
    names: list[str] = []
    items = _LIST_ITEM.findall(folded)
    if hostlist.count_hosts(folded) > hostlist.MAX_HOSTS:
        raise UsageError(
            f"{folded[:80]!r} expands to more than {hostlist.MAX_HOSTS} names", hint="write a shorter list"
        )
    for item in items:
        # Switch names, unlike node names, may contain slashes: G6/P10/S14.
        head, slash, tail = item.rpartition("/")
        names += [head + slash + name for name in hostlist.expand(tail)] if "[" in tail else [item]
    return list(dict.fromkeys(names))


def nodes_of(fabric: Fabric) -> list[str]:
    """Return all nodes, in the order of the fabric."""
    if fabric.torus:
        return list(fabric.torus.nodes)
    return [node for leaf in fabric.leaves for node in leaf.nodes]


def from_switches(switches: Sequence[Switch], origins: Mapping[str, str] = {}) -> Fabric:
    """Return the fabric of `topology/tree`. origins: switch → file and line, for errors.

    A switch that is no other's child is a root; several unconnected roots are allowed. Raises DataError for a cycle, a
    switch with two parents, a node under two leaves, and a node of a switch that is under none of its children.
    """
    by_name = {switch.switch: switch for switch in switches}
    children = {
        name: [child for child in expand_ordered(s.switches) if child in by_name] for name, s in by_name.items()
    }
    parents = _parents(children, origins)
    leaves: list[Leaf] = []
    visited: set[str] = set()

    def walk(name: str, path: tuple[str, ...]) -> set[str]:
        if len(path) >= _MAX_DEPTH:
            raise _fabric_error(f'switch "{name}" is more than {_MAX_DEPTH} levels deep', name, origins)
        visited.add(name)
        path, own = (*path, name), expand_ordered(by_name[name].node_list)
        if not children[name]:
            leaves.append(Leaf(path=path, nodes=tuple(own)))
            return set(own)
        below = set().union(*(walk(child, path) for child in children[name]))
        if missing := [node for node in own if node not in below]:
            raise _fabric_error(f'node "{missing[0]}" is under "{name}" but under none of its switches', name, origins)
        return below

    for root in by_name:
        if root not in parents:
            walk(root, ())
    for name in by_name:
        if name not in visited:  # a switch that no root reaches is on a cycle, or below one
            raise _fabric_error(f'switch "{_find_cycle(name, parents)}" is below itself', name, origins)
    return tree_fabric(leaves, origins=origins)


def from_blocks(blocks: Iterable[Block]) -> Fabric:
    """Return the fabric of `topology/block`: its base blocks in Slurm's order, in which adjacent blocks are close."""
    ordered = list(blocks)
    base = sorted(
        (b for b in ordered if not b.is_aggregated), key=lambda block: (block.index, natural_sort_key(block.block))
    )
    leaves = [Leaf(path=(block.block,), nodes=tuple(expand_ordered(block.node_list))) for block in base]
    return block_fabric(leaves, {block.size for block in ordered if block.size})


def tree_fabric(leaves: Iterable[Leaf], lengths: Mapping[str, float] = {}, origins: Mapping[str, str] = {}) -> Fabric:
    """Return a validated tree of the leaves, in depth-first order. Raises DataError for a node under two leaves."""
    ordered = sorted(leaves, key=lambda leaf: [natural_sort_key(name) for name in leaf.path])
    return Fabric(leaves=_require_valid(ordered, origins), lengths={k: v for k, v in lengths.items() if v != 1.0})


def block_fabric(leaves: Iterable[Leaf], block_sizes: Collection[int] = (), origins: Mapping[str, str] = {}) -> Fabric:
    """Return a validated block topology, in the order given. Raises DataError for a node in two blocks."""
    return Fabric(leaves=_require_valid(leaves, origins), kind="block", block_sizes=tuple(sorted(set(block_sizes))))


def torus_fabric(dims: Sequence[int], nodes: Sequence[str], where: str = "topology") -> Fabric:
    """Return a validated torus. Raises DataError unless each position has exactly one node."""
    if not dims or min(dims) < 1 or prod(dims) != len(nodes) or len(set(nodes)) != len(nodes):
        shape = " by ".join(map(str, dims)) or "no dimensions"
        problem = f"{len(set(nodes))} nodes for a torus of {shape}"
        raise DataError(problem, where=where, hint="list one node per position, in row-major order")
    return Fabric(kind="torus", torus=Torus(dims=tuple(dims), nodes=tuple(nodes)))


def torus_coordinates(torus: Torus) -> dict[str, tuple[int, ...]]:
    """Return node → coordinates."""
    steps = [prod(torus.dims[axis + 1 :]) for axis in range(len(torus.dims))]
    return {
        node: tuple(index // step % size for step, size in zip(steps, torus.dims, strict=True))
        for index, node in enumerate(torus.nodes)
    }


def _parents(children: Mapping[str, Sequence[str]], origins: Mapping[str, str]) -> dict[str, str]:
    parents: dict[str, str] = {}
    for name, child_names in children.items():
        for child in child_names:
            if parents.setdefault(child, name) != name:
                raise _fabric_error(f'switch "{child}" is under "{parents[child]}" and "{name}"', name, origins)
    return parents


def _find_cycle(name: str, parents: Mapping[str, str]) -> str:
    visited: set[str] = set()
    while name not in visited:
        visited.add(name)
        name = parents[name]
    return name


def _require_valid(leaves: Iterable[Leaf], origins: Mapping[str, str]) -> tuple[Leaf, ...]:
    leaf_by_node: dict[str, str] = {}
    valid = []
    for leaf in leaves:
        name = leaf.path[-1]
        for node in leaf.nodes:
            if leaf_by_node.setdefault(node, name) != name:
                raise _fabric_error(f'node "{node}" is under "{leaf_by_node[node]}" and "{name}"', name, origins)
        if leaf.nodes:
            valid.append(Leaf(path=leaf.path, nodes=tuple(sorted(set(leaf.nodes), key=natural_sort_key))))
    return tuple(valid)


def _fabric_error(problem: str, switch: str, origins: Mapping[str, str]) -> DataError:
    return DataError(problem, where=origins.get(switch, "topology"), hint=_ADMIN_HINT)
