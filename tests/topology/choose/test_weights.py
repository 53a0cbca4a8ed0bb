"""Weights of the terms, and fabrics at the edge of what numbers tell."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pitools.core.errors import ClusterError, UsageError
from pitools.topology.choose import CostWeights, NodeChoice, Objective, avoid_nodes, select_nodes
from pitools.topology.choose.problem import FreeInput
from pitools.topology.fabric_model import Fabric, Leaf

PAIR = Fabric(
    leaves=(
        Leaf(path=("c", "a"), nodes=("a1", "a2", "a3", "a4")),
        Leaf(path=("c", "b"), nodes=("b1", "b2", "b3", "b4")),
    )
)
FREE = {"a1": 0.0, "a2": 0.0, "a3": 0.0, "a4": 0.0, "b1": 9.0, "b2": 9.0, "b3": 9.0}


@pytest.mark.parametrize("objective", ["pair", "ring", "level", "leaf"])
@pytest.mark.parametrize("costs", [FREE, dict.fromkeys(FREE, 0.0)])
def test_a_whole_leaf_is_kept_though_nodes_weigh_nothing(objective: Objective, costs: dict[str, float]) -> None:
    """The weight of broken leaves counts whatever that of the nodes' own costs is."""
    selection = select_nodes(PAIR, costs, 2, objective=objective, weights=CostWeights(node_cost=0.0, broken_leaf=3.0))
    assert selection.per_leaf == {"b": 2}
    assert selection.extra_cost == 0.0


@pytest.mark.parametrize(
    "terms",
    [
        CostWeights(node_cost=-1.0),
        CostWeights(broken_leaf=-1.0),
        CostWeights(node_cost=math.nan),
        CostWeights(broken_leaf=math.inf),
    ],
)
def test_a_weight_is_a_number_from_nought_up(terms: CostWeights) -> None:
    """Anything else would turn the question round."""
    with pytest.raises(UsageError, match="for a broken leaf"):
        select_nodes(PAIR, FREE, 2, weights=terms)


def test_more_levels_than_a_number_has_digits_are_told() -> None:
    """Twenty switches in a chain have a cost, and a warning that not all of them count; few have none."""
    deep = Fabric(
        leaves=tuple(Leaf(path=("c", *(f"{side}{depth}" for depth in range(20))), nodes=(f"{side}n",)) for side in "ab")
    )
    assert "levels" in select_nodes(deep, ["an", "bn"], 2).warning
    assert not select_nodes(deep, ["an", "bn"], 2, objective="ring").warning
    assert not select_nodes(PAIR, FREE, 5).warning


@given(
    st.sets(st.sampled_from(sorted(FREE))),
    st.sets(st.sampled_from(sorted(FREE))),
    st.sets(st.sampled_from(sorted(FREE))),
    st.integers(1, 7),
    st.sampled_from(["pair", "ring", "level", "leaf"]),
)
def test_nodes_to_avoid_are_the_last_choice(
    strong: set[str], weak: set[str], never: set[str], k: int, objective: Objective
) -> None:
    """None is chosen where the others suffice, however far those are; what the user excluded stays out in any case."""
    free = {node: math.inf if node in never else cost for node, cost in FREE.items()}
    avoid = {**dict.fromkeys(weak, 5.0), **dict.fromkeys(strong, math.inf)}

    def select(costs: FreeInput) -> NodeChoice:
        return select_nodes(PAIR, costs, k, objective=objective)

    if len(FREE.keys() - never) < k:
        with pytest.raises(ClusterError):
            avoid_nodes(free, avoid, select)
        return
    choice, costs = avoid_nodes(free, avoid, select)
    others = FREE.keys() - never - strong
    assert never.isdisjoint(choice.nodes)
    assert len(others) < k or strong.isdisjoint(choice.nodes)
    assert choice == select(costs)
