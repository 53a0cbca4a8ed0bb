"""Who is where: the state of every node of a fabric, counted by leaf."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from pitools.core.record import Record
from pitools.slurm.records import Node
from pitools.slurm.states import is_schedulable
from pitools.topology.fabric_model import Fabric, Leaf, natural_sort_key, nodes_of

# In the order in which they are drawn. Unknown: Slurm does not know the node, or was not asked.
STATES = ("allocated", "mixed", "idle", "drained", "down", "unknown")


class LeafState(Record, frozen=True, kw_only=True, tag="pit.leaf-state/1"):
    """One leaf and what its nodes do. path: switches from the root down; () for nodes that the fabric does not know.

    drained: takes no new job, though one may still run. On a torus a leaf is a line of the last dimension.
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
    """One of STATES, of what Slurm says of a node."""
    if is_schedulable(node.state, node.flags):
        return node.state
    is_down = node.state in ("down", "unknown", "error", "future") or "not_responding" in node.flags
    return "down" if is_down else "drained"


def node_states(nodes: Iterable[Node]) -> dict[str, str]:
    """Node → its state."""
    return {node.node: state_of(node) for node in nodes}


def leaf_states(fabric: Fabric, states: Mapping[str, str]) -> Iterator[LeafState]:
    """Each leaf, in the fabric's order, then in one record the nodes that Slurm knows and the fabric does not."""
    for leaf in leaf_rows(fabric):
        yield _count_leaf(leaf.path[-1], leaf.path, leaf.nodes, states)
    known = set(nodes_of(fabric))
    rest = sorted((node for node in states if node not in known), key=natural_sort_key)
    if rest:
        yield _count_leaf("", (), rest, states)


def leaf_rows(fabric: Fabric) -> Sequence[Leaf]:
    """The leaves; of a torus its lines, below its planes."""
    if not fabric.torus:
        return fabric.leaves
    *outer, length = fabric.torus.dims
    lines = []
    for number in range(len(fabric.torus.nodes) // length):
        place: list[str] = []
        rest = number
        for size in reversed(outer):
            rest, at = divmod(rest, size)
            place.insert(0, str(at))
        names = [f"plane {','.join(place[:-1])}", f"line {','.join(place)}"] if len(outer) > 1 else [f"line {number}"]
        lines.append(Leaf(path=tuple(names), nodes=fabric.torus.nodes[number * length : (number + 1) * length]))
    return lines


def total_states(leaves: Iterable[LeafState]) -> Counter[str]:
    """Nodes in each state."""
    found: Counter[str] = Counter()
    for leaf in leaves:
        found.update({state: getattr(leaf, state) for state in STATES})
    return +found


def _count_leaf(name: str, path: tuple[str, ...], held: Iterable[str], of: Mapping[str, str]) -> LeafState:
    members = tuple(held)
    counts = Counter(of.get(node, "unknown") for node in members)
    return LeafState(leaf=name, path=path, nodes=members, **{state: counts[state] for state in STATES})
