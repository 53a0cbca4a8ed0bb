"""Choose the best of the free nodes: an exact knapsack over the switch tree, or the best free box of a torus."""

from pitools.topology.choose.node_costs import avoid_nodes
from pitools.topology.choose.select import runner_up_cost, select_nodes
from pitools.topology.choose.types import CostWeights, NodeChoice, Objective

__all__ = ["CostWeights", "NodeChoice", "Objective", "avoid_nodes", "runner_up_cost", "select_nodes"]
