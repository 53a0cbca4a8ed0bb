"""Select the best k of the free nodes, on any kind of fabric."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

import numpy as np

from pitools.core.errors import ClusterError, UsageError
from pitools.topology.choose import torus
from pitools.topology.choose.knapsack import solve
from pitools.topology.choose.problem import (
    FreeInput,
    FreeNodes,
    Problem,
    evaluate,
    make_free_nodes,
    make_problem,
    require_valid_costs,
    require_valid_weights,
    take_cheapest,
)
from pitools.topology.choose.runner_up import runner_up
from pitools.topology.choose.tree_arrays import Ints, tree_arrays
from pitools.topology.choose.types import DEFAULT_WEIGHTS, CostWeights, NodeChoice, Objective
from pitools.topology.fabric_model import Fabric, natural_sort_key
from pitools.topology.ring_cost import min_ring_hops

_MAX_EXACT = 1e14  # largest float that differs from itself + 0.01


def select_nodes(
    fabric: Fabric,
    free: FreeInput,
    k: int,
    *,
    objective: Objective = "level",
    spares: int = 0,
    segment: int = 0,
    weights: CostWeights = DEFAULT_WEIGHTS,
    slurms_subtree: bool = False,
) -> NodeChoice:
    """Return the k + spares nodes of `free` with the least cost; `nodes` is the best k of them, in rank order.

    free: the available nodes; a mapping also gives costs (health risk, missing bytes, preemption): 0 or more, inf
    excludes. objective: `pair`: links between all pairs; `ring`: links that a ring over the nodes crosses; `level`: the
    lowest common switch, then fewest switches below it, leaves last; `leaf`: fewest leaves, then fewest switches above.
    A torus has its own: the box with the least surface that isolates the fewest free neighbours. segment: allocate
    leaves in multiples of this. slurms_subtree: only below the switch that Slurm would select, the fullest of the
    lowest ones with enough nodes. `runner_up_cost` fills the field of that name.

    Raises ClusterError for too few free nodes, UsageError for a segment that does not divide k and spares.
    """
    _require_valid_request(k, objective, spares, segment)
    require_valid_weights(weights)
    if fabric.torus is not None:
        if segment:
            raise UsageError("segments are not supported on a torus", where="segment", hint="omit it")
        return torus.select_box(fabric, fabric.torus, free, k, spares=spares, weights=weights)
    if not fabric.leaves:
        return _select_on_flat(free, k, spares, segment, weights)
    tree = tree_arrays(fabric)
    available = make_free_nodes(tree, free)
    problem = make_problem(tree, available, k + spares, objective=objective, unit_nodes=segment or 1, weights=weights)
    chosen = take_cheapest(
        tree,
        available,
        solve(problem, _lowest_level(problem, _fitting_vertices(problem, len(free), slurms_subtree))),
    )
    active = chosen
    if spares:
        inner_problem = make_problem(tree, chosen, k, objective=objective, unit_nodes=segment or 1, weights=weights)
        active = take_cheapest(
            tree,
            chosen,
            solve(inner_problem, _lowest_level(inner_problem, _fitting_vertices(inner_problem, k, like_slurm=False))),
        )
    return _make_choice(fabric, problem, chosen, active, len(free))


def runner_up_cost(
    fabric: Fabric,
    free: FreeInput,
    choice: NodeChoice,
    *,
    weights: CostWeights = DEFAULT_WEIGHTS,
    slurms_subtree: bool = False,
) -> float | None:
    """Return the cost of the best choice with other counts per leaf, by the same objective; None if there is none."""
    if fabric.torus is not None or not fabric.leaves:
        return choice.runner_up_cost
    tree = tree_arrays(fabric)
    chosen = (*choice.nodes, *choice.spares)
    problem = make_problem(
        tree,
        make_free_nodes(tree, free),
        len(chosen),
        objective=_parse_objective(choice.objective),
        unit_nodes=choice.segment or 1,
        weights=weights,
        break_ties=False,
    )
    counts = np.bincount(tree.leaf_of[tree.positions(chosen)], minlength=tree.leaf_count)
    return runner_up(problem, _fitting_vertices(problem, len(free), slurms_subtree), counts)


def _parse_objective(objective: str) -> Objective:
    for choice in get_args(Objective):
        if objective == choice:
            return choice  # type: ignore[no-any-return]
    raise UsageError(f'unknown objective "{objective}"', where="objective", hint=" | ".join(get_args(Objective)))


def _require_valid_request(k: int, objective: str, spares: int, segment: int) -> None:
    _parse_objective(objective)
    if k < 1 or spares < 0 or segment < 0:
        raise UsageError(f"{k} nodes, {spares} spares, segments of {segment}", hint="give at least 1, 0 and 0")
    for option, number in (("nodes", k), ("spares", spares)):
        if segment and number % segment:
            low, high = number - number % segment, number - number % segment + segment
            hint = f"{low} or {high}" if low else f"{high}"
            raise UsageError(f"{number} {option} are not a multiple of the segment {segment}", where=option, hint=hint)


def _fitting_vertices(problem: Problem, free: int, like_slurm: bool) -> list[int]:
    """Return the vertices with enough units below them. Raises ClusterError if there is none."""
    fits = np.flatnonzero(problem.room >= problem.units)
    if not len(fits):
        raise _too_few_error(problem, free)
    if like_slurm:
        lowest = fits[problem.tree.height[fits] == problem.tree.height[fits].min()]
        fits = lowest[[problem.room[lowest].argmin()]]
    return [int(vertex) for vertex in fits]


def _lowest_level(problem: Problem, vertices: list[int]) -> list[int]:
    """Return the vertices of the lowest level: with objective `level`, a higher switch is never better."""
    if problem.objective != "level":
        return vertices
    height = problem.tree.height
    least = min(height[vertex] for vertex in vertices)
    return [vertex for vertex in vertices if height[vertex] == least]


def _too_few_error(problem: Problem, free: int) -> ClusterError:
    usable, k = len(problem.free.nodes), problem.units * problem.unit_nodes
    message = f"{k} nodes requested, {usable} free"
    if usable < free:
        message += f" on this fabric ({free - usable} more are outside of it or excluded by their cost)"
    if usable >= k and problem.unit_nodes > 1:
        message += f", {int(problem.room.max()) * problem.unit_nodes} in whole segments"
    elif usable >= k:
        message += f", at most {int(problem.room.max())} of them connected"
    return ClusterError(message, where="nodes", hint="request fewer nodes, or retry later")


def _make_choice(fabric: Fabric, problem: Problem, chosen: FreeNodes, active: FreeNodes, free: int) -> NodeChoice:
    tree = problem.tree
    cost, extra = evaluate(problem, chosen.count)
    below = tree.subtree_sums(chosen.count)
    used = np.flatnonzero(chosen.count)
    nodes, spares = _names_at(tree.names, active.nodes), np.setdiff1d(chosen.nodes, active.nodes)
    return NodeChoice(
        nodes=nodes,
        spares=_names_at(tree.names, spares),
        objective=problem.objective,
        cost=cost,
        extra_cost=extra,
        height=int(tree.height[below == below.max()].min()),
        pods=len(np.unique(tree.parent[used][tree.parent[used] >= 0])),
        leaves=len(used),
        ring_hops=min_ring_hops(nodes, fabric),
        per_leaf={tree.leaves[leaf]: int(chosen.count[leaf]) for leaf in used},
        free=free,
        segment=problem.unit_nodes if problem.unit_nodes > 1 else 0,
        warning=_precision_warning(problem),
    )


def _precision_warning(problem: Problem) -> str:
    """Return a warning if a cost has more digits than a float, else ""."""
    if problem.objective in ("pair", "ring"):
        return ""
    max_cost = max(problem.top * float(problem.tree.height.max()), float(problem.link.max()))
    return "too many levels of switches for exact costs: the lowest levels are ignored" * (max_cost > _MAX_EXACT)


def _names_at(names: tuple[str, ...], positions: Ints) -> tuple[str, ...]:
    return tuple(names[place] for place in np.sort(positions).tolist())


def _select_on_flat(free: FreeInput, k: int, spares: int, segment: int, weights: CostWeights) -> NodeChoice:
    """Return the cheapest nodes, then the first by name, of a fabric with unknown wiring."""
    if segment:
        raise UsageError("segments are not supported on a flat fabric", where="segment", hint="omit it")
    cost_by_node = dict(free) if isinstance(free, Mapping) else dict.fromkeys(free, 0.0)
    require_valid_costs(cost_by_node, np.array(list(cost_by_node.values()), np.float64))
    usable = sorted((name for name, cost in cost_by_node.items() if cost < np.inf), key=natural_sort_key)
    if len(usable) < k + spares:
        problem = f"{k + spares} nodes requested, {len(usable)} free"
        raise ClusterError(problem, where="nodes", hint="request fewer nodes, or retry later")
    chosen = sorted(usable, key=cost_by_node.__getitem__)[: k + spares]
    cost = sum(cost_by_node[name] for name in chosen)
    return NodeChoice(
        nodes=tuple(sorted(chosen[:k], key=natural_sort_key)),
        spares=tuple(sorted(chosen[k:], key=natural_sort_key)),
        objective="flat",
        cost=weights.node_cost * cost,
        extra_cost=weights.node_cost * cost,
        free=len(cost_by_node),
        warning="the fabric is flat: nodes are chosen by cost and name",
    )
