"""A fabric as arrays: made once for each Fabric, so that a choice costs only its own arithmetic."""

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
_SMALL, _BUNDLE = 32, 128  # nodes of a leaf that goes into a bundle, and of a bundle
_OWN = ""  # stands for the nodes that a switch has beside the switches below it


@dataclass(frozen=True, eq=False, kw_only=True)
class TreeArrays:
    """The switch tree as numbers: vertices 0…L-1 are the leaves, in the fabric's order; a switch follows those below.

    names, leaf_of: the nodes, leaf by leaf, and within a leaf by name. position: a node's place in names. size: nodes
    of each leaf. parent: -1 at a root. length: of the link above. children: of each switch, in the fabric's order.
    bundles: small leaves of one switch, a row each, filled up with L. parts: the children of each switch, its bundles
    instead of their leaves: -1 is the first bundle, -2 the next.
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
    bundles: Ints
    parts: tuple[tuple[int, ...], ...]

    @property
    def leaf_count(self) -> int:
        """L."""
        return len(self.leaves)

    def sums(self, of_leaves: Any) -> Ints:
        """For every vertex, the sum over the leaves below it."""
        sums = np.zeros(len(self.parent), np.int64)
        sums[: self.leaf_count] = of_leaves
        for switch, below in enumerate(self.children, self.leaf_count):
            sums[switch] = sums[list(below)].sum()
        return sums

    def positions(self, nodes: Any) -> Ints:
        """Where these nodes stand; -1 for one that the fabric does not know."""
        return np.fromiter(map(self.position.get, nodes, repeat(-1)), np.int64, len(nodes))


def tree_arrays(fabric: Fabric) -> TreeArrays:
    """The fabric's index, kept for the fabrics used last."""
    kept = _cache.get(id(fabric))
    if kept is None:
        while len(_cache) >= _MAX_CACHED:
            del _cache[next(iter(_cache))]
        kept = _cache[id(fabric)] = (
            fabric,
            _make_arrays(fabric),
        )  # holding the fabric keeps its id from being given again
    return kept[1]


def _make_arrays(fabric: Fabric) -> TreeArrays:
    paths = _paths(fabric)
    first: dict[tuple[str, ...], int] = {}  # the first leaf below each vertex: where it stands among its siblings
    for number, path in enumerate(paths):
        for depth in range(1, len(path) + 1):
            first.setdefault(path[:depth], number)
    switches = sorted(first.keys() - set(paths), key=lambda path: (-len(path), first[path]))  # those below come before
    vertices = [*paths, *switches]
    numbers = {path: number for number, path in enumerate(vertices)}
    children: dict[int, list[int]] = {numbers[path]: [] for path in switches}
    for path in sorted(vertices, key=first.__getitem__):
        if len(path) > 1:
            children[numbers[path[:-1]]].append(numbers[path])
    height = np.zeros(len(vertices), np.int64)
    for number, below in children.items():
        height[number] = 1 + height[below].max()
    bundles, parts = _batch_leaves(children.values(), [len(leaf.nodes) for leaf in fabric.leaves])
    nodes = [sorted(leaf.nodes, key=natural_sort_key) for leaf in fabric.leaves]
    names = tuple(name for held in nodes for name in held)
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
        bundles=bundles,
        parts=parts,
    )


def _batch_leaves(children: Iterable[Sequence[int]], size: Sequence[int]) -> tuple[Ints, tuple[tuple[int, ...], ...]]:
    """Bundles of neighbouring small leaves of up to _BUNDLE nodes, and each switch's children in terms of them."""
    bundles: list[list[int]] = []
    parts: list[tuple[int, ...]] = []
    for below in children:
        small = [child for child in below if child < len(size) and size[child] <= _SMALL]
        large = [child for child in below if child >= len(size) or size[child] > _SMALL]
        first, room = len(bundles), 0
        for leaf in small:
            if size[leaf] > room:
                bundles.append([])
                room = _BUNDLE
            bundles[-1].append(leaf)
            room -= size[leaf]
        parts.append((*(-1 - number for number in range(first, len(bundles))), *large))
    members = np.full((len(bundles), max(map(len, bundles), default=0)), len(size), np.int64)
    for row, bundle in zip(members, bundles, strict=True):
        row[: len(bundle)] = bundle
    return members, tuple(parts)


def _paths(fabric: Fabric) -> list[tuple[str, ...]]:
    """Each leaf's way down from its root, unlike any other's."""
    paths = leaf_paths(fabric)
    inner = {path[:depth] for path in paths for depth in range(1, len(path))}
    return [(*path, _OWN) if path in inner else path for path in paths]
