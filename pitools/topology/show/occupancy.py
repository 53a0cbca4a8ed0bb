"""The occupancy of a fabric: the state of each node, counted by leaf."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from pitools.core.record import Record
from pitools.slurm.records import Node
from pitools.slurm.states import is_schedulable
from pitools.topology.fabric_model import Fabric, Leaf, natural_sort_key, nodes_of

# In drawing order. unknown: a node without a state from Slurm.
STATES = ("allocated", "mixed", "idle", "drained", "down", "unknown")


class LeafState(Record, frozen=True, kw_only=True, tag="pit.leaf-state/1"):
    """A leaf and its nodes by state. path: switches from the root down; () for nodes outside the fabric.

    drained: accepts no new job, although one may still run. On a torus a leaf is a line of the last dimension.
    """

    leaf: str
    path: tuple[str, ...]
    nodes: tuple[str, ...]
    allocated: int = 0
    mixed: int = 0
    idle: int = 0
    drained: int = 0
    down: int = 0
    unknown: int = 0


def state_of(node: Node) -> str:
    """Return the node's state, one of STATES."""
    if is_schedulable(node.state, node.flags):
        return node.state
    is_down = node.state in ("down", "unknown", "error", "future") or "not_responding" in node.flags
    return "down" if is_down else "drained"


def node_states(nodes: Iterable[Node]) -> dict[str, str]:
    """Return node → state."""
    return {node.node: state_of(node) for node in nodes}


def leaf_states(fabric: Fabric, states: Mapping[str, str]) -> Iterator[LeafState]:
    """Yield the leaves in the fabric's order, then one record of the nodes outside the fabric."""
    for leaf in leaf_rows(fabric):
        yield _count_leaf(leaf.path[-1], leaf.path, leaf.nodes, states)
    fabric_nodes = set(nodes_of(fabric))
    outside = sorted((node for node in states if node not in fabric_nodes), key=natural_sort_key)
    if outside:
        yield _count_leaf("", (), outside, states)


def leaf_rows(fabric: Fabric) -> Sequence[Leaf]:
    """Return the leaves; for a torus, its lines below its planes."""
    if not fabric.torus:
        return fabric.leaves
    *outer, length = fabric.torus.dims
    lines = []
    for number in range(len(fabric.torus.nodes) // length):
        coordinates: list[str] = []
        rest = number
        for size in reversed(outer):
            rest, coordinate = divmod(rest, size)
            coordinates.insert(0, str(coordinate))
        names = (
            [f"plane {','.join(coordinates[:-1])}", f"line {','.join(coordinates)}"]
            if len(outer) > 1
            else [f"line {number}"]
        )
        lines.append(Leaf(path=tuple(names), nodes=fabric.torus.nodes[number * length : (number + 1) * length]))
    return lines


def total_states(leaves: Iterable[LeafState]) -> Counter[str]:
    """Return state → number of nodes."""
    totals: Counter[str] = Counter()
    for leaf in leaves:
        totals.update({state: getattr(leaf, state) for state in STATES})
    return +totals


def _count_leaf(name: str, path: tuple[str, ...], nodes: Iterable[str], states: Mapping[str, str]) -> LeafState:
    members = tuple(nodes)
    counts = Counter(states.get(node, "unknown") for node in members)
    return LeafState(leaf=name, path=path, nodes=members, **{state: counts[state] for state in STATES})
