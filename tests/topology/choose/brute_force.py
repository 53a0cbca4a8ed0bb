"""Every choice there is, one by one: what the exact ones are measured against. Slow, and written another way."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations, product

from pitools.topology.fabric_model import Fabric, Leaf

Cost = tuple[float, ...]


def forest(rng: random.Random, *, roots: int = 1, most_nodes: int = 11) -> Fabric:
    """A small random forest: leaves at any depth, links of any length, names that say nothing."""
    leaves: list[Leaf] = []
    lengths: dict[str, float] = {}
    names = [f"n{number}" for number in rng.sample(range(100), 60)]
    number = 0

    def grow(path: tuple[str, ...], depth: int) -> None:
        nonlocal number
        number += 1
        name = f"s{number}"
        if rng.random() < 0.7:
            lengths[name] = rng.choice((0.5, 1.0, 2.0, 3.0, rng.random()))
        here = (*path, name)
        if depth == 0 or rng.random() < 0.2:
            size = rng.randint(1, 4)
            if sum(len(leaf.nodes) for leaf in leaves) + size <= most_nodes:
                leaves.append(Leaf(path=here, nodes=tuple(names.pop() for _ in range(size))))
            return
        for _ in range(rng.randint(1, 3)):
            grow(here, depth - 1)

    while not leaves:
        for _ in range(roots):
            grow((), rng.randint(0, 3))
    return Fabric(leaves=tuple(leaves), lengths=lengths)


class Brute:
    """Costs of sets of nodes of a fabric, from the paths of the nodes alone."""

    def __init__(self, fabric: Fabric, costs: dict[str, float], *, paths: dict[str, tuple[str, ...]] | None = None):
        self.path = paths or {node: leaf.path for leaf in fabric.leaves for node in leaf.nodes}
        self.leaf = {node: leaf.path[-1] for leaf in fabric.leaves for node in leaf.nodes}
        self.size = Counter(self.leaf.values())
        self.length = fabric.lengths
        self.costs = costs
        self.height: dict[tuple[str, ...], int] = {}
        for path in self.path.values():
            for depth in range(1, len(path) + 1):
                key = path[:depth]
                self.height[key] = max(self.height.get(key, 0), len(path) - depth)
        self.free_at = Counter(self.leaf[node] for node in costs)

    def cost(self, nodes: Sequence[str], objective: str, broken: float = 0.0) -> Cost | None:
        """None when the nodes are not connected; by level, more than one number."""
        paths = [self.path[node] for node in nodes]
        if len({path[0] for path in paths}) > 1:
            return None
        counts = Counter(self.leaf[node] for node in nodes)
        cut = [leaf for leaf, x in counts.items() if x < self.free_at[leaf] == self.size[leaf]]
        terms = sum(self.costs[node] for node in nodes) + broken * len(cut)
        if objective == "pair":
            return (sum(self._apart(a, b) for a, b in combinations(paths, 2)) + terms,)
        if objective == "ring":
            tour = sorted(paths)
            return (sum(self._apart(a, b) for a, b in zip(tour, tour[1:] + tour[:1], strict=True)) + terms,)
        common = self._shared(paths)
        below = {path[:depth] for path in paths for depth in range(len(common) + 1, len(path) + 1)}
        used = Counter(self.height[key] for key in below)
        levels = range(max(self.height.values()) + 1)
        if objective == "leaf":
            return (*(used[level] for level in levels), terms)
        return (self.height[common], *(used[level] for level in reversed(levels)), terms)

    def counts(self, nodes: Sequence[str]) -> tuple[tuple[str, int], ...]:
        return tuple(sorted(Counter(self.leaf[node] for node in nodes).items()))

    def choices(self, k: int, segment: int = 1) -> Iterator[tuple[str, ...]]:
        for nodes in combinations(self.costs, k):
            if all(x % segment == 0 for _, x in self.counts(nodes)):
                yield nodes

    def best_two(self, k: int, objective: str, broken: float = 0.0, segment: int = 1) -> list[Cost]:
        """The least cost, and the least with other counts per leaf; fewer where there are not two."""
        least: dict[tuple[tuple[str, int], ...], Cost] = {}
        for nodes in self.choices(k, segment):
            cost = self.cost(nodes, objective, broken)
            if cost is not None:
                key = self.counts(nodes)
                least[key] = min(least.get(key, cost), cost)
        return sorted(least.values())[:2]

    def _apart(self, one: tuple[str, ...], other: tuple[str, ...]) -> float:
        shared = len(self._shared([one, other]))
        return sum(self.length.get(name, 1.0) for path in (one, other) for name in path[shared:])

    @staticmethod
    def _shared(paths: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
        first, last = min(paths), max(paths)
        depth = 0
        while depth < min(len(first), len(last)) and first[depth] == last[depth]:
            depth += 1
        return first[:depth]


def plainly(fabric: Fabric, free: set[str], k: int, objective: str) -> Cost:
    """The least cost on a fabric too large to try every choice, by the same recursion in the plainest words.

    Costs are tuples, compared from the left, as those of Brute are, without terms.
    """
    brute = Brute(fabric, dict.fromkeys(free, 0.0))
    levels = max(brute.height.values()) + 1
    below: dict[tuple[str, ...], set[tuple[str, ...]]] = {}
    for leaf in fabric.leaves:
        for depth in range(1, len(leaf.path)):
            below.setdefault(leaf.path[:depth], set()).add(leaf.path[: depth + 1])
    room = {leaf.path: len(free.intersection(leaf.nodes)) for leaf in fabric.leaves}
    actual: list[Cost] = []

    def link(path: tuple[str, ...], m: int) -> Cost:
        length = fabric.lengths.get(path[-1], 1.0)
        if objective == "pair":
            return (length * m * (k - m),)
        if objective == "ring":
            return (2 * length * (m > 0),)
        used = [float(level == brute.height[path] and m > 0) for level in range(levels)]
        return tuple(used if objective == "leaf" else reversed(used))

    def least(path: tuple[str, ...]) -> list[Cost]:
        zero = link(path, 0)
        table = [zero] * (min(room[path], k) + 1) if path in room else [zero]
        for child in sorted(below.get(path, ())):
            other = [tuple(map(sum, zip(cost, link(child, m), strict=True))) for m, cost in enumerate(least(child))]
            table = [
                min(
                    tuple(map(sum, zip(table[m - j], other[j], strict=True)))
                    for j in range(max(0, m - len(table) + 1), min(m, len(other) - 1) + 1)
                )
                for m in range(min(k, len(table) + len(other) - 2) + 1)
            ]
        if len(table) > k:
            actual.append((*((brute.height[path],) if objective == "level" else ()), *table[k]))
        return table

    for root in {leaf.path[:1] for leaf in fabric.leaves}:
        least(root)
    return min(actual)


def boxes(dims: Sequence[int], free: set[tuple[int, ...]], volume: int) -> dict[frozenset[tuple[int, ...]], float]:
    """Every free box of so many cells, and what it costs: links to cells outside, those to free cells counted twice."""
    actual: dict[frozenset[tuple[int, ...]], float] = {}
    for shape in product(*(range(1, size + 1) for size in dims)):
        cells = 1
        for extent in shape:
            cells *= extent
        if cells != volume:
            continue
        for anchor in product(*map(range, dims)):
            box = frozenset(
                tuple((a + b) % size for a, b, size in zip(anchor, place, dims, strict=True))
                for place in product(*map(range, shape))
            )
            if box <= free:
                cost = 0.0
                for cell in box:
                    for axis, size in enumerate(dims):
                        for step in (1, -1):
                            other = (*cell[:axis], (cell[axis] + step) % size, *cell[axis + 1 :])
                            if other not in box:
                                cost += 1 + (other in free)
                actual[box] = min(cost, actual.get(box, cost))
    return actual
