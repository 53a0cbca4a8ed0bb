"""Weights of the terms, and fabrics at the edge of what numbers tell."""

from __future__ import annotations

import math

import pytest

from pitools.core.errors import UsageError
from pitools.topology.choose import Objective, Terms, choose
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
    kept = choose(PAIR, costs, 2, objective=objective, terms=Terms(node=0.0, broken=3.0))
    assert kept.per_leaf == {"b": 2}
    assert kept.terms == 0.0


@pytest.mark.parametrize("terms", [Terms(node=-1.0), Terms(broken=-1.0), Terms(node=math.nan), Terms(broken=math.inf)])
def test_a_weight_is_a_number_from_nought_up(terms: Terms) -> None:
    """Anything else would turn the question round."""
    with pytest.raises(UsageError, match="for a broken leaf"):
        choose(PAIR, FREE, 2, terms=terms)


def test_more_levels_than_a_number_has_digits_are_told() -> None:
    """Twenty switches in a chain have a cost, and a note that not all of them could be weighed; few have none."""
    deep = Fabric(
        leaves=tuple(Leaf(path=("c", *(f"{side}{depth}" for depth in range(20))), nodes=(f"{side}n",)) for side in "ab")
    )
    assert "weighed" in choose(deep, ["an", "bn"], 2).note
    assert not choose(deep, ["an", "bn"], 2, objective="ring").note
    assert not choose(PAIR, FREE, 5).note
