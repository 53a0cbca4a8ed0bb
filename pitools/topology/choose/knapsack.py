"""The exact choice on a tree: best[m] of a switch is the min-plus convolution of best[m] of its children.

Costs are sums over links and leaves, so the distribution of m units below a switch affects no cost outside of it, and
the minimum over all choices takes O(nodes · k).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pitools.topology.choose.leaf_batch import LeafBatches
from pitools.topology.choose.problem import Problem
from pitools.topology.choose.tree_arrays import Floats, Ints

_ROWS = 32  # rows of a convolution at a time, so that its scratch array stays in the CPU cache

Steps = list[tuple[int, Floats, Floats]]
"""For each part of a switch, in order: the part, its added cost by units, and best[m] of the parts before it."""


def solve(problem: Problem, candidates: list[int]) -> Ints:
    """Return nodes per leaf of the best choice below one of `candidates`, vertices with enough units."""
    batches = LeafBatches(problem)
    tables, steps = _tables(problem, batches, candidates)
    roots = sorted(candidates, key=lambda v: (_total(problem, tables, v), problem.room[v], v))
    counts = np.zeros(problem.tree.leaf_count, np.int64)
    for leaf, units in _distribution(batches, steps, roots[0], problem.units):
        counts[leaf] = units * problem.unit_nodes
    return counts


def min_plus(left: Floats, right: Floats, max_units: int) -> Floats:
    """Return the min-plus convolution: min over i of left[i] + right[m - i], for m up to `max_units`."""
    if len(right) > len(left):
        left, right = right, left
    length = min(len(left) + len(right) - 1, max_units + 1)
    pad = len(right) - 1
    padded = np.full(pad + max(length, len(left)), np.inf)
    padded[pad : pad + len(left)] = left
    step = padded.itemsize
    result: Floats | None = None
    for row in range(0, len(right), _ROWS):
        rows = min(_ROWS, len(right) - row)
        # Row j of `shifted` is `left`, shifted right by j.
        shifted = np.ndarray((rows, length), np.float64, padded, (pad - row) * step, (-step, step))
        least = np.add(shifted, right[row : row + rows, None]).min(axis=0)
        result = least if result is None else np.minimum(result, least, out=result)
    assert result is not None
    return result


def subtree_switches(problem: Problem, roots: list[int]) -> list[int]:
    """Return the switches at and below the vertices, children first."""
    index = problem.tree
    needed = np.zeros(len(index.parent), bool)
    needed[roots] = True
    for number in range(len(index.parent) - 1, index.leaf_count - 1, -1):
        if needed[number]:
            needed[list(index.children[number - index.leaf_count])] = True
    return [int(number) for number in np.flatnonzero(needed) if number >= index.leaf_count]


def _tables(
    problem: Problem, batches: LeafBatches, candidates: list[int]
) -> tuple[dict[int, Floats], dict[int, Steps]]:
    index = problem.tree
    tables: dict[int, Floats] = {}
    steps: dict[int, Steps] = {}
    units = np.arange(problem.units + 1)
    for switch in subtree_switches(problem, candidates):
        best = np.zeros(1)
        part_steps: Steps = []
        for part in index.parts[switch - index.leaf_count]:
            if part < 0:
                added = batches.table(-1 - part)
            elif part in tables:
                added = tables[part] + problem.crossing_cost(part, units[: len(tables[part])])
            else:
                added = problem.added_cost(part)
            if len(added) > 1:
                part_steps.append((part, added, best))
                best = min_plus(best, added, problem.units)
        tables[switch], steps[switch] = best, part_steps
    return tables, steps


def _total(problem: Problem, tables: dict[int, Floats], vertex: int) -> float:
    table = tables[vertex] if vertex in tables else problem.leaf_cost(vertex)
    return float(table[problem.units]) + problem.top * int(problem.tree.height[vertex])


def _distribution(batches: LeafBatches, steps: dict[int, Steps], vertex: int, units: int) -> Iterator[tuple[int, int]]:
    """Yield leaf and units of the best choice of m units. vertex: a vertex, or -1 - n for batch n of leaves."""
    if vertex < 0:
        yield from batches.distribution(-1 - vertex, units)
        return
    if vertex not in steps:
        yield vertex, units
        return
    for part, added, best in reversed(steps[vertex]):
        low, high = max(0, units - len(best) + 1), min(units, len(added) - 1)
        part_units = low + int(np.argmin(added[low : high + 1] + best[units - high : units - low + 1][::-1]))
        if part_units:
            yield from _distribution(batches, steps, part, part_units)
        units -= part_units
        if not units:
            return
