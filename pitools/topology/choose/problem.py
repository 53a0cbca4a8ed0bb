"""One question as numbers: what x units of each leaf cost, and what m units below a switch cost on the link above it.

A unit is a node, or a segment of nodes. Everything that is asked for is a sum over leaves and links, which is what
makes the knapsack of `knapsack.py` exact.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pitools.core.errors import UsageError
from pitools.topology.choose.tree_arrays import Floats, Ints, TreeArrays
from pitools.topology.choose.types import CostWeights, Objective

Free = Mapping[str, float] | Collection[str]

_MAX_COST = 1e100  # of a cost, so that sums of them are numbers
_TIE_WEIGHT = 0.49  # what all preferences between equals may add up to, where costs are whole numbers
_NEAR_TIES = 1e-6  # and, in the shortest link's length, where they are not


@dataclass(frozen=True, eq=False, kw_only=True)
class FreeNodes:
    """The free nodes: positions leaf by leaf, of a leaf the cheapest first; count by leaf; costs and their sums."""

    nodes: Ints
    count: Ints
    prefix_count: Ints
    costs: Floats
    prefix_cost: Floats


def make_free_nodes(index: TreeArrays, free: Free) -> FreeNodes:
    """The free nodes that the fabric knows. Raises UsageError for a cost that is negative or no number."""
    nodes = index.positions(free)
    if isinstance(free, Mapping):
        costs = np.fromiter(free.values(), np.float64, len(free))
        require_valid_costs(free, costs)
        known = (nodes >= 0) & np.isfinite(costs)
        nodes, costs = nodes[known], costs[known]
        order = np.lexsort((nodes, costs, index.leaf_of[nodes]))
        nodes, costs = nodes[order], costs[order]
    else:
        nodes = np.unique(nodes[nodes >= 0])
        costs = np.zeros(len(nodes))
    return _supply(index, nodes, costs)


def take_cheapest(index: TreeArrays, have: FreeNodes, counts: Ints) -> FreeNodes:
    """So many nodes of each leaf, the cheapest."""
    place = np.arange(len(have.nodes)) - have.prefix_count[index.leaf_of[have.nodes]]
    kept = place < counts[index.leaf_of[have.nodes]]
    return _supply(index, have.nodes[kept], have.costs[kept])


def _supply(index: TreeArrays, nodes: Ints, costs: Floats) -> FreeNodes:
    count = np.bincount(index.leaf_of[nodes], minlength=index.leaf_count)
    return FreeNodes(
        nodes=nodes,
        count=count,
        prefix_count=np.cumsum(count) - count,
        costs=costs,
        prefix_cost=np.concatenate(([0.0], np.cumsum(costs))),
    )


def require_valid_weights(terms: CostWeights) -> None:
    """Raises UsageError for a weight that is negative or no number."""
    if not (0 <= terms.node_cost < np.inf and 0 <= terms.broken_leaf < np.inf):
        raise UsageError(
            f"{terms.node_cost:g} for a node, {terms.broken_leaf:g} for a broken leaf", where="terms", hint="0 or more"
        )


def require_valid_costs(free: Mapping[str, float], costs: Floats) -> None:
    """Raises UsageError for a cost that is negative, no number, or not to be added; an infinite one means never."""
    bad = np.flatnonzero(~((costs >= 0) & ((costs <= _MAX_COST) | (costs == np.inf))))
    if len(bad):
        name = list(free)[int(bad[0])]
        raise UsageError(f'cost of node "{name}" is {free[name]:g}', where="costs", hint="0 to 1e100; inf for never")


@dataclass(frozen=True, eq=False, kw_only=True)
class Problem:
    """Find units, `unit` nodes each.

    offset: where a leaf's entries 0, 1… its units begin in `leaf_costs`, what they cost, and in `adds`, with its
    uplink.

    link: of each vertex, what its uplink costs: the length (pair, ring) or the weight of its level (level, leaf).
    top: weight of the height of the lowest common switch. room: units below each vertex. terms_weight: a term's unit
    in that of the whole.
    """

    index: TreeArrays
    supply: FreeNodes
    objective: Objective
    unit: int
    units: int
    room: Ints
    offset: Ints
    leaf_costs: Floats
    adds: Floats
    link: Floats
    top: float
    weights: CostWeights
    terms_weight: float

    def crossing(self, vertex: Any, m: Any) -> Any:
        """What m units below a vertex cost on its uplink; numbers or arrays."""
        return _crossing(self.objective, self.link[vertex], m * self.unit, self.units * self.unit)

    def inside_of(self, leaf: int) -> Floats:
        """What 0, 1… units of a leaf cost."""
        return self.leaf_costs[self.offset[leaf] : self.offset[leaf + 1]]

    def added_by(self, leaf: int) -> Floats:
        """The same, and its uplink."""
        return self.adds[self.offset[leaf] : self.offset[leaf + 1]]


def make_problem(
    index: TreeArrays,
    have: FreeNodes,
    k: int,
    *,
    objective: Objective,
    unit: int = 1,
    terms: CostWeights,
    ties: bool = True,
) -> Problem:
    """The question for k nodes. ties: prefer leaves that are used up, then those of which little is left over."""
    units = k // unit
    room = np.minimum(have.count // unit, units)
    offset = np.concatenate(([0], np.cumsum(room + 1)))
    leaf = np.repeat(np.arange(index.leaf_count), room + 1)
    taken = (np.arange(offset[-1]) - offset[leaf]) * unit
    left = have.count[leaf] - taken
    cut = (taken > 0) & (left > 0)
    link, top = _links(index, objective)
    inside = np.zeros(len(leaf))
    weight, scale = 1.0, _TIE_WEIGHT
    dearer = have.costs[have.costs > 0] * terms.node_cost
    least = min(float(dearer[dearer > 0].min(initial=np.inf)), terms.broken_leaf or np.inf)
    with_terms = least < np.inf
    if with_terms:
        inside += terms.node_cost * (
            have.prefix_cost[have.prefix_count[leaf] + taken] - have.prefix_cost[have.prefix_count[leaf]]
        )
        inside += terms.broken_leaf * (cut & (have.count[leaf] == index.size[leaf]))
    if objective in ("level", "leaf") and with_terms:
        weight = 0.25 / (_max_cost(have.costs, k) * terms.node_cost + terms.broken_leaf * index.leaf_count)
        inside *= weight
    if with_terms or (link % 1).any():
        scale = _NEAR_TIES * min(weight * least, float(link[link > 0].min(initial=np.inf)))
    if ties:
        most = len(have.nodes) + 1
        inside += scale / (most * min(index.leaf_count, k) + most) * np.where(cut, most + left, 0)
    return Problem(
        index=index,
        supply=have,
        objective=objective,
        unit=unit,
        units=units,
        room=index.sums(have.count // unit),
        offset=offset,
        leaf_costs=inside,
        adds=inside + _crossing(objective, link[leaf], taken, k),
        link=link,
        top=top,
        weights=terms,
        terms_weight=weight,
    )


def _crossing(objective: Objective, link: Any, n: Any, k: int) -> Any:
    if objective == "pair":
        return link * n * (k - n)
    return link * (2.0 if objective == "ring" else 1.0) * (n > 0)


def _max_cost(costs: Floats, k: int) -> float:
    return float(np.partition(costs, len(costs) - k)[-k:].sum()) if k < len(costs) else float(costs.sum())


def _links(index: TreeArrays, objective: Objective) -> tuple[Floats, float]:
    """What each uplink counts, and the height: the length, or a power of ten that all lesser ones cannot outweigh."""
    if objective in ("pair", "ring"):
        return index.length, 0.0
    tens = [10.0 ** len(str(count)) for count in np.bincount(index.height)]
    if objective == "leaf":
        return np.array([np.prod(tens[height + 1 :]) for height in range(len(tens))])[index.height], 0.0
    weights = np.array([np.prod(tens[:height]) for height in range(len(tens))])
    return weights[index.height], float(weights[-1])


def evaluate(problem: Problem, counts: Ints) -> tuple[float, float]:
    """What so many nodes of each leaf cost, terms included, and the terms alone, in their own unit."""
    index, have, terms = problem.index, problem.supply, problem.weights
    below = index.sums(counts)
    k = int(counts.sum())
    partly = (below > 0) & (below < k)
    if problem.objective == "pair":
        cost = float((problem.link * below * (k - below)).sum())
    elif problem.objective == "ring":
        cost = float(2 * problem.link[partly].sum())
    else:
        cost = float(problem.link[partly].sum()) + problem.top * int(index.height[below == k].min())
    broken = np.count_nonzero((counts > 0) & (counts < have.count) & (have.count == index.size))
    extra = (
        terms.node_cost
        * float((have.prefix_cost[have.prefix_count + counts] - have.prefix_cost[have.prefix_count]).sum())
        + terms.broken_leaf * broken
    )
    return float(cost + problem.terms_weight * extra), float(extra)
