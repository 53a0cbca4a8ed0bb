"""`choose`: the best k of the free nodes, whatever the fabric."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import get_args

import numpy as np

from pitools.core.errors import ClusterError, UsageError
from pitools.topology.choose import torus
from pitools.topology.choose.knapsack import node_costs, solve
from pitools.topology.choose.problem import (
    Free,
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

_DIGITS = 1e14  # what a float tells from itself and a hundredth more


def select_nodes(
    fabric: Fabric,
    free: Free,
    k: int,
    *,
    objective: Objective = "level",
    spares: int = 0,
    segment: int = 0,
    weights: CostWeights = DEFAULT_WEIGHTS,
    pods_like_slurm: bool = False,
) -> NodeChoice:
    """The k + spares nodes of `free` that cost least, and of them the best k as `nodes`, in rank order.

    free: may be taken; a mapping gives each a cost (health risk, bytes of data missing, preemption; 0 or more, inf for
    never). objective: `pair` is the sum over pairs of nodes of the links between them, `ring` the links that a ring
    over the nodes passes, `level` the lowest common switch, then the fewest switches below it, the leaves last, `leaf`
    the fewest leaves, then the fewest switches above them; a torus has its own: the box with the least surface, and
    the fewest free neighbours cut off. segment: so many nodes at a time within one leaf. pods_like_slurm: only below
    the switch that Slurm would take, the fullest of the lowest that have room. next_cost is for the function of that
    name to say.

    Raises ClusterError when there are not so many free, UsageError for a segment that does not divide k and spares.
    """
    _check(k, objective, spares, segment)
    require_valid_weights(weights)
    if fabric.torus is not None:
        if segment:
            raise UsageError("a torus has no segments", where="segment", hint="leave it out")
        return torus.select_box(fabric, fabric.torus, free, k, spares=spares, weights=weights)
    if not fabric.leaves:
        return _flat(free, k, spares, segment, weights)
    tree = tree_arrays(fabric)
    have = make_free_nodes(tree, free)
    asked = make_problem(tree, have, k + spares, objective=objective, unit=segment or 1, terms=weights)
    taken = take_cheapest(
        tree, have, solve(asked, _lowest_level(asked, _roomy_vertices(asked, len(free), pods_like_slurm)))
    )
    active = taken
    if spares:
        within = make_problem(tree, taken, k, objective=objective, unit=segment or 1, terms=weights)
        active = take_cheapest(
            tree, taken, solve(within, _lowest_level(within, _roomy_vertices(within, k, like_slurm=False)))
        )
    return _make_choice(fabric, asked, taken, active, len(free))


def runner_up_cost(
    fabric: Fabric,
    free: Free,
    choice: NodeChoice,
    *,
    weights: CostWeights = DEFAULT_WEIGHTS,
    pods_like_slurm: bool = False,
) -> float | None:
    """What the best choice with other counts per leaf costs, asked for as `choice` was; None when there is none."""
    if fabric.torus is not None or not fabric.leaves:
        return choice.runner_up_cost
    tree = tree_arrays(fabric)
    chosen = (*choice.nodes, *choice.spares)
    asked = make_problem(
        tree,
        make_free_nodes(tree, free),
        len(chosen),
        objective=_parse_objective(choice.objective),
        unit=choice.segment or 1,
        terms=weights,
        ties=False,
    )
    counts = np.bincount(tree.leaf_of[tree.positions(chosen)], minlength=tree.leaf_count)
    return runner_up(asked, _roomy_vertices(asked, len(free), pods_like_slurm), counts)


def cost_by_size(
    fabric: Fabric,
    free: Free,
    sizes: Iterable[int],
    *,
    objective: Objective = "level",
    weights: CostWeights = DEFAULT_WEIGHTS,
) -> dict[int, float]:
    """Cost by number of nodes, for jobs that can do with more or fewer; sizes that are not free are left out."""
    wanted = sorted(size for size in set(sizes) if size > 0)
    if fabric.torus is not None or not fabric.leaves or objective == "pair":  # a pair's cost depends on k everywhere
        return {k: cost for k in wanted if (cost := _cost(fabric, free, k, objective, weights)) is not None}
    tree = tree_arrays(fabric)
    have = make_free_nodes(tree, free)
    most = min(max(wanted, default=0), len(have.nodes))
    if not most:
        return {}
    asked = make_problem(tree, have, most, objective=objective, terms=weights, ties=False)
    least = node_costs(asked, [int(vertex) for vertex in np.flatnonzero(asked.room)])
    return {k: float(least[k]) for k in wanted if k <= most and least[k] < np.inf}


def _cost(fabric: Fabric, free: Free, k: int, objective: Objective, terms: CostWeights) -> float | None:
    try:
        return select_nodes(fabric, free, k, objective=objective, weights=terms).cost
    except ClusterError:
        return None


def _parse_objective(objective: str) -> Objective:
    for known in get_args(Objective):
        if objective == known:
            return known  # type: ignore[no-any-return]
    raise UsageError(f'no objective "{objective}"', where="objective", hint=" | ".join(get_args(Objective)))


def _check(k: int, objective: str, spares: int, segment: int) -> None:
    _parse_objective(objective)
    if k < 1 or spares < 0 or segment < 0:
        raise UsageError(f"{k} nodes, {spares} spares, segments of {segment}", hint="at least 1, 0 and 0")
    for what, number in (("nodes", k), ("spares", spares)):
        if segment and number % segment:
            low, high = number - number % segment, number - number % segment + segment
            hint = f"{low} or {high}" if low else f"{high}"
            raise UsageError(f"{number} {what} are not whole segments of {segment}", where=what, hint=hint)


def _roomy_vertices(asked: Problem, free: int, like_slurm: bool) -> list[int]:
    """The vertices with room enough. Raises ClusterError when none has."""
    fits = np.flatnonzero(asked.room >= asked.units)
    if not len(fits):
        raise _too_few_error(asked, free)
    if like_slurm:
        lowest = fits[asked.index.height[fits] == asked.index.height[fits].min()]
        fits = lowest[[asked.room[lowest].argmin()]]
    return [int(vertex) for vertex in fits]


def _lowest_level(asked: Problem, among: list[int]) -> list[int]:
    """By level, nothing higher than the lowest switch with room can be best: it need not be looked at."""
    if asked.objective != "level":
        return among
    height = asked.index.height
    least = min(height[vertex] for vertex in among)
    return [vertex for vertex in among if height[vertex] == least]


def _too_few_error(asked: Problem, free: int) -> ClusterError:
    known, k = len(asked.supply.nodes), asked.units * asked.unit
    what = f"{k} nodes asked for, {known} free"
    if known < free:
        what += f" on this fabric ({free - known} others are not in it or excluded by their cost)"
    if known >= k and asked.unit > 1:
        what += f", in whole segments {int(asked.room.max()) * asked.unit}"
    elif known >= k:
        what += f", but no more than {int(asked.room.max())} that are connected"
    return ClusterError(what, where="nodes", hint="ask for fewer, or wait for more to be free")


def _make_choice(fabric: Fabric, asked: Problem, taken: FreeNodes, active: FreeNodes, free: int) -> NodeChoice:
    tree = asked.index
    cost, extra = evaluate(asked, taken.count)
    below = tree.sums(taken.count)
    used = np.flatnonzero(taken.count)
    nodes, spares = _names(tree.names, active.nodes), np.setdiff1d(taken.nodes, active.nodes)
    return NodeChoice(
        nodes=nodes,
        spares=_names(tree.names, spares),
        objective=asked.objective,
        cost=cost,
        extra_cost=extra,
        height=int(tree.height[below == below.max()].min()),
        pods=len(np.unique(tree.parent[used][tree.parent[used] >= 0])),
        leaves=len(used),
        ring_hops=min_ring_hops(nodes, fabric),
        per_leaf={tree.leaves[leaf]: int(taken.count[leaf]) for leaf in used},
        free=free,
        segment=asked.unit if asked.unit > 1 else 0,
        warning=_precision_note(asked),
    )


def _precision_note(asked: Problem) -> str:
    """Says so where the digits of a cost are more than a float has."""
    if asked.objective in ("pair", "ring"):
        return ""
    most = max(asked.top * float(asked.index.height.max()), float(asked.link.max()))
    return "more levels of switches than can be weighed exactly: the least of them decide nothing" * (most > _DIGITS)


def _names(names: tuple[str, ...], positions: Ints) -> tuple[str, ...]:
    return tuple(names[place] for place in np.sort(positions).tolist())


def _flat(free: Free, k: int, spares: int, segment: int, terms: CostWeights) -> NodeChoice:
    """Of a fabric of which nothing is known: the cheapest, then by name."""
    if segment:
        raise UsageError("nothing tells where a segment is: the fabric is flat", where="segment", hint="leave it out")
    price_of = dict(free) if isinstance(free, Mapping) else dict.fromkeys(free, 0.0)
    require_valid_costs(price_of, np.array(list(price_of.values()), np.float64))
    usable = sorted((name for name, cost in price_of.items() if cost < np.inf), key=natural_sort_key)
    if len(usable) < k + spares:
        what = f"{k + spares} nodes asked for, {len(usable)} free"
        raise ClusterError(what, where="nodes", hint="ask for fewer, or wait for more to be free")
    taken = sorted(usable, key=price_of.__getitem__)[: k + spares]
    cost = sum(price_of[name] for name in taken)
    return NodeChoice(
        nodes=tuple(sorted(taken[:k], key=natural_sort_key)),
        spares=tuple(sorted(taken[k:], key=natural_sort_key)),
        objective="flat",
        cost=terms.node_cost * cost,
        extra_cost=terms.node_cost * cost,
        free=len(price_of),
        warning="the fabric is flat: by cost and name",
    )
