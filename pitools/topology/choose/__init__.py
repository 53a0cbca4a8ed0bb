"""Which of the free nodes: exactly the best ones, by a knapsack over the switch tree, or a free box of a torus."""

from pitools.topology.choose.select import choose, curve, next_cost
from pitools.topology.choose.types import Choice, Objective, Terms

__all__ = ["Choice", "Objective", "Terms", "choose", "curve", "next_cost"]
