"""The second best: what a choice with other counts per leaf would cost at least."""

from __future__ import annotations

import numpy as np

from pitools.topology.choose.knapsack import min_plus, subtree_switches
from pitools.topology.choose.problem import Problem
from pitools.topology.choose.tree_arrays import Floats, Ints


def runner_up(problem: Problem, among: list[int], counts: Ints) -> float | None:
    """The least cost below one of the vertices `among` with other counts than these; None when there are no others.

    Beside the best of all, each switch keeps the best that differs somewhere below it. What does not differ is one
    way only, so to go on from it is a shift.
    """
    index = problem.index
    given = index.sums(counts) // problem.unit
    tables: dict[int, tuple[Floats, Floats]] = {}
    units = np.arange(problem.units + 1)

    def both(vertex: int) -> tuple[Floats, Floats]:
        if vertex in tables:
            return tables[vertex]
        every = problem.inside_of(vertex)
        others = every.copy()
        if given[vertex] < len(others):
            others[given[vertex]] = np.inf
        return every, others

    same: dict[int, float] = {}
    for switch in subtree_switches(problem, among):
        every, others, m, cost = np.zeros(1), np.full(1, np.inf), 0, 0.0
        for child in index.children[switch - index.leaf_count]:
            if not problem.room[child]:
                continue
            table, differing = both(child)
            link = problem.crossing(child, units[: len(table)])
            step, mine = int(given[child]), same.get(child)
            mine = (problem.inside_of(child)[step] if mine is None else mine) + problem.crossing(child, step)
            later = min_plus(every, differing + link, problem.units)
            # Only those before it differ: the child is as given.
            shifted = others[: max(0, len(later) - step)] + mine
            later[step : step + len(shifted)] = np.minimum(later[step : step + len(shifted)], shifted)
            every, others = min_plus(every, table + link, problem.units), later
            m, cost = m + step, cost + mine
        tables[switch], same[switch] = (every, others), cost
    least = min(float(both(vertex)[1][problem.units]) + problem.top * int(index.height[vertex]) for vertex in among)
    return least if least < np.inf else None
