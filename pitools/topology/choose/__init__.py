"""Which of the free nodes: exactly the best ones, by a knapsack over the switch tree, or a free box of a torus."""

from pitools.topology.choose.select import cost_by_size, runner_up_cost, select_nodes
from pitools.topology.choose.types import CostWeights, NodeChoice, Objective

__all__ = ["CostWeights", "NodeChoice", "Objective", "cost_by_size", "runner_up_cost", "select_nodes"]
