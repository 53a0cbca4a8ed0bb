"""Records of node selection: cost weights and the choice."""

from __future__ import annotations

from typing import Literal

import msgspec

from pitools.core.record import Record

Objective = Literal["pair", "ring", "level", "leaf"]


class CostWeights(msgspec.Struct, frozen=True, kw_only=True):
    """Weights of costs other than links. With the objectives `level` and `leaf` these only break ties.

    node_cost: weight of the nodes' own costs. broken_leaf: cost of using only part of an entirely free leaf.
    """

    node_cost: float = 1.0
    broken_leaf: float = 0.0


DEFAULT_WEIGHTS = CostWeights()


class NodeChoice(Record, frozen=True, kw_only=True, tag="pit.node-choice/1"):
    """The chosen nodes. All numbers are for `nodes` and `spares` together.

    nodes: in rank order. cost: the minimized cost; with `level` its digits are the height of the lowest common switch,
    then the switches used at each level below, leaves last; with `leaf` the leaves, then the switches at each level
    above. runner_up_cost: of the best choice with other counts per leaf (torus: of another box); None if there is none,
    or it was not computed. extra_cost: the part of the cost that is not links, before scaling. height: of the lowest
    common switch, 0 within one leaf. pods: switches directly above the leaves. ring_hops: switch uplinks that a ring
    over `nodes` crosses; on a torus, its hops. free: nodes to choose from. shape: of the box on a torus. warning: for
    the user. node_list: `nodes` as a host list, when printed.
    """

    nodes: tuple[str, ...]
    spares: tuple[str, ...] = ()
    objective: str = "level"
    cost: float = 0.0
    runner_up_cost: float | None = None
    extra_cost: float = 0.0
    height: int = 0
    pods: int = 0
    leaves: int = 0
    ring_hops: int = 0
    per_leaf: dict[str, int] = {}
    free: int = 0
    segment: int = 0
    shape: tuple[int, ...] = ()
    warning: str = ""
    node_list: str = ""
