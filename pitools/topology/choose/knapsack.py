"""The exact choice on a tree: best[m] of a switch is the min-plus convolution of those of what is below it.

With costs that are sums over links and leaves, how the m units below a switch are dealt out matters to nothing else,
so O(nodes · k) decides over all choices there are.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pitools.topology.choose.leaf_batch import LeafBatches
from pitools.topology.choose.problem import Problem
from pitools.topology.choose.tree_arrays import Floats, Ints

_ROWS = 32  # of a convolution at a time: its scratch stays in the processor's cache

Steps = list[tuple[int, Floats, Floats]]
"""The parts of a switch in turn: which, what it adds, and best[m] of those before it."""


def solve(problem: Problem, among: list[int]) -> Ints:
    """Nodes of each leaf in the best choice below one of the vertices `among`, each of which has room enough."""
    bundles = LeafBatches(problem)
    tables, steps = _tables(problem, bundles, among)
    roots = sorted(among, key=lambda v: (_total(problem, tables, v), problem.room[v], v))
    counts = np.zeros(problem.index.leaf_count, np.int64)
    for leaf, units in _distribution(bundles, steps, roots[0], problem.units):
        counts[leaf] = units * problem.unit
    return counts


def node_costs(problem: Problem, among: list[int]) -> Floats:
    """The least cost for each number of units up to the problem's; inf where there are not so many."""
    tables, _ = _tables(problem, LeafBatches(problem), among)
    least = np.full(problem.units + 1, np.inf)
    for vertex in among:
        table = tables[vertex] if vertex in tables else problem.inside_of(vertex)
        height = problem.top * int(problem.index.height[vertex])
        np.minimum(least[: len(table)], table + height, out=least[: len(table)])
    return least


def min_plus(left: Floats, right: Floats, max_units: int) -> Floats:
    """Min-plus convolution: at m, the least one[i] + other[m - i]; for m up to `max_units`."""
    if len(right) > len(left):
        left, right = right, left
    length = min(len(left) + len(right) - 1, max_units + 1)
    ahead = len(right) - 1
    padded = np.full(ahead + max(length, len(left)), np.inf)
    padded[ahead : ahead + len(left)] = left
    step = padded.itemsize
    found: Floats | None = None
    for row in range(0, len(right), _ROWS):
        rows = min(_ROWS, len(right) - row)
        # Row j of `shifted` is `one`, moved j places to the right.
        shifted = np.ndarray((rows, length), np.float64, padded, (ahead - row) * step, (-step, step))
        least = np.add(shifted, right[row : row + rows, None]).min(axis=0)
        found = least if found is None else np.minimum(found, least, out=found)
    assert found is not None
    return found


def subtree_switches(problem: Problem, among: list[int]) -> list[int]:
    """The switches at and below these vertices, children first."""
    index = problem.index
    needed = np.zeros(len(index.parent), bool)
    needed[among] = True
    for number in range(len(index.parent) - 1, index.leaf_count - 1, -1):
        if needed[number]:
            needed[list(index.children[number - index.leaf_count])] = True
    return [int(number) for number in np.flatnonzero(needed) if number >= index.leaf_count]


def _tables(problem: Problem, bundles: LeafBatches, among: list[int]) -> tuple[dict[int, Floats], dict[int, Steps]]:
    index = problem.index
    tables: dict[int, Floats] = {}
    steps: dict[int, Steps] = {}
    units = np.arange(problem.units + 1)
    for switch in subtree_switches(problem, among):
        best = np.zeros(1)
        done: Steps = []
        for part in index.parts[switch - index.leaf_count]:
            if part < 0:
                adds = bundles.table(-1 - part)
            elif part in tables:
                adds = tables[part] + problem.crossing(part, units[: len(tables[part])])
            else:
                adds = problem.added_by(part)
            if len(adds) > 1:
                done.append((part, adds, best))
                best = min_plus(best, adds, problem.units)
        tables[switch], steps[switch] = best, done
    return tables, steps


def _total(problem: Problem, tables: dict[int, Floats], vertex: int) -> float:
    table = tables[vertex] if vertex in tables else problem.inside_of(vertex)
    return float(table[problem.units]) + problem.top * int(problem.index.height[vertex])


def _distribution(bundles: LeafBatches, steps: dict[int, Steps], vertex: int, m: int) -> Iterator[tuple[int, int]]:
    """How the best choice of m units below a vertex, or of a bundle, is dealt out to the leaves."""
    if vertex < 0:
        yield from bundles.distribution(-1 - vertex, m)
        return
    if vertex not in steps:
        yield vertex, m
        return
    for part, adds, best in reversed(steps[vertex]):
        low, high = max(0, m - len(best) + 1), min(m, len(adds) - 1)
        mine = low + int(np.argmin(adds[low : high + 1] + best[m - high : m - low + 1][::-1]))
        if mine:
            yield from _distribution(bundles, steps, part, mine)
        m -= mine
        if not m:
            return
