"""A fabric as arrays, built once per Fabric and cached."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pitools.topology.fabric_model import Fabric, natural_sort_key
from pitools.topology.ring_cost import leaf_paths

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_cache: dict[int, tuple[Fabric, TreeArrays]] = {}
_MAX_CACHED = 8
_SMALL, _BATCH = 32, 128  # most nodes of a leaf that is batched, and of a batch
_OWN = ""  # pseudo-leaf for nodes attached directly to a switch that also has child switches


@dataclass(frozen=True, eq=False, kw_only=True)
class TreeArrays:
    """The switch tree as arrays. Vertices 0…L-1 are the leaves, in the fabric's order; switches follow their children.

    names, leaf_of: the nodes, by leaf, then by name. position: node → index in names. size: nodes per leaf.
    parent: -1 for a root. height: 0 for a leaf. length: of the uplink. children: of each switch, in the fabric's order.
    leaf_batches: small leaves of one switch, a row per batch, padded with L. parts: children of each switch with
    batches in place of their leaves: -1 is the first batch, -2 the second.
    """

    names: tuple[str, ...]
    leaf_of: Ints
    position: dict[str, int]
    leaves: tuple[str, ...]
    size: Ints
    parent: Ints
    height: Ints
    length: Floats
    children: tuple[tuple[int, ...], ...]
    leaf_batches: Ints
    parts: tuple[tuple[int, ...], ...]

    @property
    def leaf_count(self) -> int:
        """The number of leaves, L."""
        return len(self.leaves)

    def subtree_sums(self, of_leaves: Any) -> Ints:
        """Return, for each vertex, the sum over the leaves below it."""
        sums = np.zeros(len(self.parent), np.int64)
        sums[: self.leaf_count] = of_leaves
        for switch, below in enumerate(self.children, self.leaf_count):
            sums[switch] = sums[list(below)].sum()
        return sums

    def positions(self, nodes: Any) -> Ints:
        """Return the nodes' indexes in `names`; -1 for a node outside the fabric."""
        return np.fromiter(map(self.position.get, nodes, repeat(-1)), np.int64, len(nodes))


def tree_arrays(fabric: Fabric) -> TreeArrays:
    """Return the arrays of a fabric, from the cache if used lately."""
    cached = _cache.get(id(fabric))
    if cached is None:
        while len(_cache) >= _MAX_CACHED:
            del _cache[next(iter(_cache))]
        # The reference to the fabric prevents reuse of its id.
        cached = _cache[id(fabric)] = fabric, _make_arrays(fabric)
    return cached[1]


def _make_arrays(fabric: Fabric) -> TreeArrays:
    paths = _paths(fabric)
    first_leaf: dict[tuple[str, ...], int] = {}  # vertex path → its first leaf, which orders siblings
    for number, path in enumerate(paths):
        for depth in range(1, len(path) + 1):
            first_leaf.setdefault(path[:depth], number)
    switches = sorted(first_leaf.keys() - set(paths), key=lambda path: (-len(path), first_leaf[path]))  # children first
    vertices = [*paths, *switches]
    numbers = {path: number for number, path in enumerate(vertices)}
    children: dict[int, list[int]] = {numbers[path]: [] for path in switches}
    for path in sorted(vertices, key=first_leaf.__getitem__):
        if len(path) > 1:
            children[numbers[path[:-1]]].append(numbers[path])
    height = np.zeros(len(vertices), np.int64)
    for number, below in children.items():
        height[number] = 1 + height[below].max()
    leaf_batches, parts = _batch_leaves(children.values(), [len(leaf.nodes) for leaf in fabric.leaves])
    nodes = [sorted(leaf.nodes, key=natural_sort_key) for leaf in fabric.leaves]
    names = tuple(name for leaf_nodes in nodes for name in leaf_nodes)
    size = np.array([len(held) for held in nodes], np.int64)
    return TreeArrays(
        names=names,
        leaf_of=np.repeat(np.arange(len(nodes)), size),
        size=size,
        height=height,
        position={name: place for place, name in enumerate(names)},
        leaves=tuple(leaf.path[-1] for leaf in fabric.leaves),
        parent=np.array([numbers.get(path[:-1], -1) for path in vertices], np.int64),
        length=np.array([0.0 if path[-1] == _OWN else fabric.lengths.get(path[-1], 1.0) for path in vertices]),
        children=tuple(map(tuple, children.values())),
        leaf_batches=leaf_batches,
        parts=parts,
    )


def _batch_leaves(children: Iterable[Sequence[int]], size: Sequence[int]) -> tuple[Ints, tuple[tuple[int, ...], ...]]:
    """Return batches of adjacent small leaves, up to _BATCH nodes each, and each switch's parts."""
    batches: list[list[int]] = []
    parts: list[tuple[int, ...]] = []
    for below in children:
        small = [child for child in below if child < len(size) and size[child] <= _SMALL]
        large = [child for child in below if child >= len(size) or size[child] > _SMALL]
        first, room = len(batches), 0
        for leaf in small:
            if size[leaf] > room:
                batches.append([])
                room = _BATCH
            batches[-1].append(leaf)
            room -= size[leaf]
        parts.append((*(-1 - number for number in range(first, len(batches))), *large))
    members = np.full((len(batches), max(map(len, batches), default=0)), len(size), np.int64)
    for row, bundle in zip(members, batches, strict=True):
        row[: len(bundle)] = bundle
    return members, tuple(parts)


def _paths(fabric: Fabric) -> list[tuple[str, ...]]:
    """Return each leaf's unique path from its root."""
    paths = leaf_paths(fabric)
    inner = {path[:depth] for path in paths for depth in range(1, len(path))}
    return [(*path, _OWN) if path in inner else path for path in paths]
