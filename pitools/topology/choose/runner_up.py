"""The runner-up: the least cost of a choice with other counts per leaf."""

from __future__ import annotations

import numpy as np

from pitools.topology.choose.knapsack import min_plus, subtree_switches
from pitools.topology.choose.problem import Problem
from pitools.topology.choose.tree_arrays import Floats, Ints


def runner_up(problem: Problem, candidates: list[int], counts: Ints) -> float | None:
    """Return the least cost of a choice below one of `candidates` with counts other than `counts`, or None.

    Each switch keeps best[m] of all choices, and of those that differ from `counts` below it. The choice that does not
    differ is unique, so adding it is a shift of the table.
    """
    tree = problem.tree
    given = tree.subtree_sums(counts) // problem.unit_nodes
    tables: dict[int, tuple[Floats, Floats]] = {}
    units = np.arange(problem.units + 1)

    def both(vertex: int) -> tuple[Floats, Floats]:
        if vertex in tables:
            return tables[vertex]
        best = problem.leaf_cost(vertex)
        best_other = best.copy()
        if given[vertex] < len(best_other):
            best_other[given[vertex]] = np.inf
        return best, best_other

    cost_as_given: dict[int, float] = {}
    for switch in subtree_switches(problem, candidates):
        every, others, given_units, cost = np.zeros(1), np.full(1, np.inf), 0, 0.0
        for child in tree.children[switch - tree.leaf_count]:
            if not problem.room[child]:
                continue
            table, differing = both(child)
            link = problem.crossing_cost(child, units[: len(table)])
            step, child_cost = int(given[child]), cost_as_given.get(child)
            child_cost = (problem.leaf_cost(child)[step] if child_cost is None else child_cost) + problem.crossing_cost(
                child, step
            )
            later = min_plus(every, differing + link, problem.units)
            # Only earlier children differ; this child has the given count.
            shifted = others[: max(0, len(later) - step)] + child_cost
            later[step : step + len(shifted)] = np.minimum(later[step : step + len(shifted)], shifted)
            every, others = min_plus(every, table + link, problem.units), later
            given_units, cost = given_units + step, cost + child_cost
        tables[switch], cost_as_given[switch] = (every, others), cost
    least = min(float(both(vertex)[1][problem.units]) + problem.top * int(tree.height[vertex]) for vertex in candidates)
    return least if least < np.inf else None
