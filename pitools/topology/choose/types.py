"""What is asked for and what is chosen."""

from __future__ import annotations

from typing import Literal

import msgspec

from pitools.core.record import Record

Objective = Literal["pair", "ring", "level", "leaf"]


class CostWeights(msgspec.Struct, frozen=True, kw_only=True):
    """What counts beside the fabric. With `level` and `leaf` it decides only between choices that are otherwise equal.

    node_cost: weight of the nodes' own costs. broken_leaf: cost of a leaf that was wholly free and is taken in part.
    """

    node_cost: float = 1.0
    broken_leaf: float = 0.0


DEFAULT_WEIGHTS = CostWeights()


class NodeChoice(Record, frozen=True, kw_only=True, tag="pit.node-choice/1"):
    """The nodes chosen. All numbers are of `nodes` and `spares` together.

    nodes: in rank order. cost: what was made least, terms included; for `level` its digits read: height of the lowest
    common switch, then the switches used at each level below it, the leaves last; for `leaf`: the leaves, then those
    at each level above. runner_up_cost: the best choice with other counts per leaf (of a torus: another box); None when
    there is none, or nobody asked. extra_cost: the part of the terms, in their own unit. height: 0 within one leaf.
    pods: switches right above the leaves. ring_hops: times that a ring over `nodes` in this order passes a switch's
    uplink; of a torus, its hops. free: nodes there were to choose from. shape: of a torus' box. warning: what the
    caller should know. node_list: `nodes`, folded, where it is printed.
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
