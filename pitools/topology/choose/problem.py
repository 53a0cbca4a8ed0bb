"""A node selection as arrays: the cost of x units of each leaf, and of m units below a switch on the switch's uplink.

A unit is a node, or a segment of nodes. Every objective is a sum over leaves and links, so the knapsack of
`knapsack.py` is exact.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pitools.core.errors import UsageError
from pitools.topology.choose.tree_arrays import Floats, Ints, TreeArrays
from pitools.topology.choose.types import CostWeights, Objective

FreeInput = Mapping[str, float] | Collection[str]

_MAX_COST = 1e100  # keeps sums of costs finite
_TIE_WEIGHT = 0.49  # largest sum of all tie-breaking costs where other costs are integers
_NEAR_TIES = 1e-6  # the same for fractional costs, as a share of the shortest link


@dataclass(frozen=True, eq=False, kw_only=True)
class FreeNodes:
    """The free nodes: positions by leaf, cheapest first within a leaf; count per leaf; costs and prefix sums."""

    nodes: Ints
    count: Ints
    prefix_count: Ints
    costs: Floats
    prefix_cost: Floats


def make_free_nodes(tree: TreeArrays, free: FreeInput) -> FreeNodes:
    """Return the free nodes that are in the fabric. Raises UsageError for a negative cost and for NaN."""
    nodes = tree.positions(free)
    if isinstance(free, Mapping):
        costs = np.fromiter(free.values(), np.float64, len(free))
        require_valid_costs(free, costs)
        is_usable = (nodes >= 0) & np.isfinite(costs)
        nodes, costs = nodes[is_usable], costs[is_usable]
        order = np.lexsort((nodes, costs, tree.leaf_of[nodes]))
        nodes, costs = nodes[order], costs[order]
    else:
        nodes = np.unique(nodes[nodes >= 0])
        costs = np.zeros(len(nodes))
    return _free_nodes(tree, nodes, costs)


def take_cheapest(tree: TreeArrays, free: FreeNodes, counts: Ints) -> FreeNodes:
    """Return the `counts` cheapest nodes of each leaf."""
    rank = np.arange(len(free.nodes)) - free.prefix_count[tree.leaf_of[free.nodes]]
    is_kept = rank < counts[tree.leaf_of[free.nodes]]
    return _free_nodes(tree, free.nodes[is_kept], free.costs[is_kept])


def _free_nodes(tree: TreeArrays, nodes: Ints, costs: Floats) -> FreeNodes:
    count = np.bincount(tree.leaf_of[nodes], minlength=tree.leaf_count)
    return FreeNodes(
        nodes=nodes,
        count=count,
        prefix_count=np.cumsum(count) - count,
        costs=costs,
        prefix_cost=np.concatenate(([0.0], np.cumsum(costs))),
    )


def require_valid_weights(weights: CostWeights) -> None:
    """Raise UsageError for a negative, infinite or NaN weight."""
    if not (0 <= weights.node_cost < np.inf and 0 <= weights.broken_leaf < np.inf):
        raise UsageError(
            f"{weights.node_cost:g} for a node, {weights.broken_leaf:g} for a broken leaf",
            where="terms",
            hint="0 or more",
        )


def require_valid_costs(free: Mapping[str, float], costs: Floats) -> None:
    """Raise UsageError for a negative, NaN or too large cost; an infinite cost excludes the node."""
    invalid = np.flatnonzero(~((costs >= 0) & ((costs <= _MAX_COST) | (costs == np.inf))))
    if len(invalid):
        name = list(free)[int(invalid[0])]
        raise UsageError(f'cost of node "{name}" is {free[name]:g}', where="costs", hint="0 to 1e100; inf for never")


@dataclass(frozen=True, eq=False, kw_only=True)
class Problem:
    """The selection of `units` units, of `unit_nodes` nodes each, at the least cost.

    leaf_costs, added_costs: cost of 0, 1, … units of each leaf, without and with the leaf's uplink. offset: index of
    each leaf's first element in both. link: cost of each vertex's uplink: its length (pair, ring) or the weight of its
    level (level, leaf). top: weight of the height of the lowest common switch. room: number of free units below each
    vertex. weights: weights of the costs other than links. extra_weight: factor of these costs in the total.
    """

    tree: TreeArrays
    free: FreeNodes
    objective: Objective
    unit_nodes: int
    units: int
    room: Ints
    offset: Ints
    leaf_costs: Floats
    added_costs: Floats
    link: Floats
    top: float
    weights: CostWeights
    extra_weight: float

    def crossing_cost(self, vertex: Any, m: Any) -> Any:
        """Return the cost of m units below a vertex on its uplink; for numbers or arrays."""
        return _crossing_cost(self.objective, self.link[vertex], m * self.unit_nodes, self.units * self.unit_nodes)

    def leaf_cost(self, leaf: int) -> Floats:
        """Return the cost of 0, 1, … units of a leaf."""
        return self.leaf_costs[self.offset[leaf] : self.offset[leaf + 1]]

    def added_cost(self, leaf: int) -> Floats:
        """Return the cost of 0, 1, … units of a leaf, with its uplink."""
        return self.added_costs[self.offset[leaf] : self.offset[leaf + 1]]


def make_problem(
    tree: TreeArrays,
    free: FreeNodes,
    k: int,
    *,
    objective: Objective,
    unit_nodes: int = 1,
    weights: CostWeights,
    break_ties: bool = True,
) -> Problem:
    """Return the problem for k nodes.

    break_ties: of selections with the same cost, prefer leaves used completely, then the fewest nodes left over.
    """
    units = k // unit_nodes
    room = np.minimum(free.count // unit_nodes, units)
    offset = np.concatenate(([0], np.cumsum(room + 1)))
    leaf = np.repeat(np.arange(tree.leaf_count), room + 1)
    used = (np.arange(offset[-1]) - offset[leaf]) * unit_nodes
    unused = free.count[leaf] - used
    is_split = (used > 0) & (unused > 0)
    link, top = _link_weights(tree, objective)
    leaf_costs = np.zeros(len(leaf))
    extra_weight, tie_scale = 1.0, _TIE_WEIGHT
    weighted_costs = free.costs[free.costs > 0] * weights.node_cost
    least_extra = min(float(weighted_costs[weighted_costs > 0].min(initial=np.inf)), weights.broken_leaf or np.inf)
    has_extra = least_extra < np.inf
    if has_extra:
        leaf_costs += weights.node_cost * (
            free.prefix_cost[free.prefix_count[leaf] + used] - free.prefix_cost[free.prefix_count[leaf]]
        )
        leaf_costs += weights.broken_leaf * (is_split & (free.count[leaf] == tree.size[leaf]))
    if objective in ("level", "leaf") and has_extra:
        extra_weight = 0.25 / (_max_cost(free.costs, k) * weights.node_cost + weights.broken_leaf * tree.leaf_count)
        leaf_costs *= extra_weight
    if has_extra or (link % 1).any():
        tie_scale = _NEAR_TIES * min(extra_weight * least_extra, float(link[link > 0].min(initial=np.inf)))
    if break_ties:
        most = len(free.nodes) + 1
        leaf_costs += tie_scale / (most * min(tree.leaf_count, k) + most) * np.where(is_split, most + unused, 0)
    return Problem(
        tree=tree,
        free=free,
        objective=objective,
        unit_nodes=unit_nodes,
        units=units,
        room=tree.subtree_sums(free.count // unit_nodes),
        offset=offset,
        leaf_costs=leaf_costs,
        added_costs=leaf_costs + _crossing_cost(objective, link[leaf], used, k),
        link=link,
        top=top,
        weights=weights,
        extra_weight=extra_weight,
    )


def _crossing_cost(objective: Objective, link: Any, n: Any, k: int) -> Any:
    if objective == "pair":
        return link * n * (k - n)
    return link * (2.0 if objective == "ring" else 1.0) * (n > 0)


def _max_cost(costs: Floats, k: int) -> float:
    return float(np.partition(costs, len(costs) - k)[-k:].sum()) if k < len(costs) else float(costs.sum())


def _link_weights(tree: TreeArrays, objective: Objective) -> tuple[Floats, float]:
    """Return the weights of uplinks and of the height: lengths, or powers of ten that outweigh all lower levels."""
    if objective in ("pair", "ring"):
        return tree.length, 0.0
    tens = [10.0 ** len(str(count)) for count in np.bincount(tree.height)]
    if objective == "leaf":
        return np.array([np.prod(tens[height + 1 :]) for height in range(len(tens))])[tree.height], 0.0
    weights = np.array([np.prod(tens[:height]) for height in range(len(tens))])
    return weights[tree.height], float(weights[-1])


def evaluate(problem: Problem, counts: Ints) -> tuple[float, float]:
    """Return the total cost of `counts` nodes per leaf, and the part that is not links, before scaling."""
    tree, free, weights = problem.tree, problem.free, problem.weights
    below = tree.subtree_sums(counts)
    k = int(counts.sum())
    is_crossed = (below > 0) & (below < k)
    if problem.objective == "pair":
        cost = float((problem.link * below * (k - below)).sum())
    elif problem.objective == "ring":
        cost = float(2 * problem.link[is_crossed].sum())
    else:
        cost = float(problem.link[is_crossed].sum()) + problem.top * int(tree.height[below == k].min())
    broken = np.count_nonzero((counts > 0) & (counts < free.count) & (free.count == tree.size))
    extra = (
        weights.node_cost
        * float((free.prefix_cost[free.prefix_count + counts] - free.prefix_cost[free.prefix_count]).sum())
        + weights.broken_leaf * broken
    )
    return float(cost + problem.extra_weight * extra), float(extra)
