"""Draw a fabric with its occupancy as text: a heading per switch, a line with a bar per leaf."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from pitools.core.output import format_cell
from pitools.topology.fabric_model import Fabric
from pitools.topology.show.occupancy import STATES, LeafState, leaf_states, total_states

MARKS = {"allocated": "█", "mixed": "▓", "idle": "░", "drained": "x", "down": "!", "unknown": "?"}
_COLOURS = {"allocated": "34", "mixed": "36", "idle": "32", "drained": "33", "down": "31", "unknown": "90"}
_MIN_BAR, _MAX_BAR = 8, 64


def draw_text(
    fabric: Fabric, states: Mapping[str, str], *, title: str = "", width: int = 100, colour: bool = False
) -> Iterator[str]:
    """Yield the lines of the drawing. states: node → state. width: most columns. colour: use ANSI codes."""
    leaves = list(leaf_states(fabric, states))
    wired = [leaf for leaf in leaves if leaf.path]
    yield "  ".join(filter(None, [format_cell(title) if title else "", summary(fabric, wired)]))
    counts = total_states(leaves)
    yield "  ".join(
        f"{_paint(MARKS[state], state, colour)} {counts[state]} {state}" for state in STATES if counts[state]
    )
    names = [short_name(leaf.path) for leaf in leaves]
    label = max((len(name) + 2 * (len(leaf.path) - 1) for name, leaf in zip(names, leaves, strict=True)), default=0)
    bar = max(_MIN_BAR, min(_MAX_BAR, width - label - 34, max((len(leaf.nodes) for leaf in leaves), default=0)))
    scale = min(1.0, bar / max((len(leaf.nodes) for leaf in leaves), default=1))
    shown: tuple[str, ...] = ()
    after_heading = False
    for name, leaf in zip(names, leaves, strict=True):
        above = leaf.path[:-1]
        for depth in range(len(above)):
            if above[: depth + 1] != shown[: depth + 1]:
                if not after_heading:
                    yield ""
                yield _heading(above[: depth + 1], leaves)
                after_heading = True
        shown, after_heading = above, False
        if not leaf.path:
            yield ""
        indent = "  " * len(above)
        drawn = _bar(leaf, scale, colour)
        pad = " " * (bar - sum(_cells(leaf, scale).values()))
        yield f"{indent}{name.ljust(label - len(indent))}  {drawn}{pad}  {_counts(leaf)}"


def summary(fabric: Fabric, leaves: Sequence[LeafState]) -> str:
    """Return a summary such as `tree: 847 nodes, 119 leaves, 3 pods`."""
    count = sum(len(leaf.nodes) for leaf in leaves)
    if fabric.torus:
        return f"torus of {' by '.join(map(str, fabric.torus.dims))}: {_pluralize(count, 'node')}"
    if fabric.kind == "block":
        sizes = f", of {', '.join(map(str, fabric.block_sizes))} nodes" if fabric.block_sizes else ""
        return f"block: {_pluralize(count, 'node')}, {_pluralize(len(leaves), 'block')}{sizes}"
    if not leaves:
        return "flat: the topology is unknown"
    pods = {leaf.path[:-1] for leaf in leaves if len(leaf.path) > 1}
    roots = {leaf.path[0] for leaf in leaves}
    parts = [_pluralize(count, "node"), f"{len(leaves)} {'leaf' if len(leaves) == 1 else 'leaves'}"]
    parts += [_pluralize(len(pods), "pod")] if pods else []
    parts += [f"{len(roots)} unconnected roots"] if len(roots) > 1 else []
    return f"tree: {', '.join(parts)}"


def short_name(path: Sequence[str]) -> str:
    """Return a switch's name without its parent's prefix; for (), the nodes outside the fabric, a label."""
    if not path:
        return "not in the topology"
    *above, name = path
    for start in ("/".join(above), *above[-1:]):
        if start and name.startswith(f"{start}/"):
            return format_cell(name.removeprefix(f"{start}/"))
    return format_cell(name)


def _heading(path: tuple[str, ...], leaves: Sequence[LeafState]) -> str:
    below = [leaf for leaf in leaves if leaf.path[: len(path)] == path]
    counts = total_states(below)
    counts_text = "  ".join(f"{counts[state]} {state}" for state in STATES if counts[state])
    nodes = _pluralize(sum(len(leaf.nodes) for leaf in below), "node")
    return f"{'  ' * (len(path) - 1)}{short_name(path)}: {nodes}  ({counts_text})"


def _counts(leaf: LeafState) -> str:
    if leaf.unknown == len(leaf.nodes):
        return _pluralize(leaf.unknown, "node")
    parts = [f"{leaf.idle} of {len(leaf.nodes)} idle"]
    return ", ".join(
        parts + [f"{n} {state}" for state in ("drained", "down", "unknown") if (n := getattr(leaf, state))]
    )


def _cells(leaf: LeafState, scale: float) -> Counter[str]:
    """Return state → cells of the bar: a cell per node, or scaled with at least one cell per state."""
    counts = {state: getattr(leaf, state) for state in STATES if getattr(leaf, state)}
    if scale == 1.0:
        return Counter(counts)
    room = max(len(counts), round(len(leaf.nodes) * scale))
    cells = Counter({state: max(1, int(count * scale)) for state, count in counts.items()})
    while sum(cells.values()) != room:
        step = 1 if sum(cells.values()) < room else -1
        # Adjust the state farthest from its share, but keep one cell for each.
        able = [state for state in counts if step > 0 or cells[state] > 1]
        cells[max(able, key=lambda state: step * (counts[state] * scale - cells[state]))] += step
    return cells


def _bar(leaf: LeafState, scale: float, colour: bool) -> str:
    cells = _cells(leaf, scale)
    return "".join(_paint(MARKS[state] * cells[state], state, colour) for state in STATES if cells[state])


def _paint(text: str, state: str, colour: bool) -> str:
    return f"\033[{_COLOURS[state]}m{text}\033[0m" if colour else text


def _pluralize(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
