"""Draw a tree as rings: switches around the core, and each node as a coloured cell outside of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, cos, pi, sin, sqrt
from typing import TYPE_CHECKING, NamedTuple

from pitools.core.output import format_cell
from pitools.topology.show.occupancy import STATES, LeafState, total_states
from pitools.topology.show.text import short_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {
    "allocated": "#2f5fa7",
    "mixed": "#7fa8d9",
    "idle": "#a9dcb4",
    "drained": "#f0a63c",
    "down": "#cf3f45",
    "unknown": "#d7dae0",
}
INK, FAINT = "#22303c", "#7b8794"

_RING = "#e9edf2"
_CORE, _RIM = 0.20, 1.0  # radii of the core and of the outer edge
_SWITCH, _THIN_SWITCH = 0.075, 0.03  # thickness of a ring of switches, with and without names
_LETTER = 0.0023  # width of a letter per point of font size, in radii
_MAX_NAMED, _MAX_NODES_NAMED = 160, 32  # most leaves named around the rim; most nodes named in their cells
_MAX_ROWS = 16  # most rows of nodes per leaf


class RingSegment(NamedTuple):
    """A part of a ring. start, stop: angles in turns, clockwise from the top. inner, outer: radii."""

    start: float
    stop: float
    inner: float
    outer: float


def draw_rings(axes: Axes, leaves: Sequence[LeafState], states: Mapping[str, str]) -> None:
    """Draw the core, a ring per level of switches, and outside of them the nodes of each leaf."""
    axes.set_xlim(-1.1, 1.1)
    axes.set_ylim(-1.1, 1.1)
    deepest = max(len(leaf.path) for leaf in leaves)
    rows = _row_count([len(leaf.nodes) for leaf in leaves])
    angles = _angles(leaves, rows)
    has_core = len({leaf.path[0] for leaf in leaves}) == 1 and deepest > 1  # a single root is drawn as the core
    inner = _CORE + 0.02
    for depth in range(int(has_core), deepest - 1):
        for path, start, stop in _spans(leaves, angles, depth):
            _draw_segments(axes, [RingSegment(start, stop, inner, inner + _SWITCH)], _RING)
            _draw_label(axes, short_name(path), RingSegment(start, stop, inner, inner + _SWITCH), 11)
        inner += _SWITCH + 0.012
    named = [
        (short_name(leaf.path), RingSegment(*angle, inner, inner + _SWITCH))
        for leaf, angle in zip(leaves, angles, strict=True)
    ]
    is_wide = all(_label_fits(name, wedge, 9) for name, wedge in named)
    outer = inner + (_SWITCH if is_wide else _THIN_SWITCH)
    _draw_segments(axes, [wedge._replace(outer=outer) for _, wedge in named], _RING)
    for name, wedge in named:
        if is_wide:
            _draw_label(axes, name, wedge, 9)
        elif len(named) <= _MAX_NAMED and len(name) <= 6:
            _draw_rim_label(axes, name, wedge)
    cells: dict[str, list[RingSegment]] = {}
    for leaf, angle in zip(leaves, angles, strict=True):
        for node, wedge in zip(
            _nodes_outwards(leaf, states), _cells(len(leaf.nodes), rows, *angle, outer + 0.012), strict=True
        ):
            cells.setdefault(states.get(node, "unknown"), []).append(wedge)
            if sum(len(leaf.nodes) for leaf in leaves) <= _MAX_NODES_NAMED:
                _draw_node_label(axes, node, wedge, is_dark=states.get(node) in ("allocated", "down"))
    for state, wedges in cells.items():
        _draw_segments(axes, wedges, COLOURS[state])
    _draw_core(axes, leaves, short_name(leaves[0].path[:1]) if has_core else "")


def _row_count(sizes: Sequence[int]) -> int:
    """Return the rows of nodes per leaf that make the cells about square."""
    square = round(sqrt(0.136 * sum(sizes)))
    return max(1, min(max(sizes), _MAX_ROWS, square))


def _draw_core(axes: Axes, leaves: Sequence[LeafState], name: str) -> None:
    from matplotlib.patches import Circle

    counts = total_states(leaves)
    count = sum(counts.values())
    axes.add_patch(Circle((0, 0), _CORE, color=_RING, lw=0))
    if counts["unknown"] == count:
        big, small = str(count), "nodes"
    else:
        big, small = f"{100 * (counts['allocated'] + counts['mixed']) / count:.0f} %", "in use"
    axes.text(0, 0.03, big, ha="center", va="center", size=24, weight="bold", color=INK)
    axes.text(0, -0.055, small, ha="center", va="center", size=11, color=FAINT)
    if name:
        axes.text(0, 0.125, name, ha="center", va="center", size=10, color=INK, parse_math=False)


def _angles(leaves: Sequence[LeafState], rows: int) -> list[tuple[float, float]]:
    """Return each leaf's first and last angle, in turns: in proportion to its columns, with gaps between switches."""
    widths = [ceil(len(leaf.nodes) / rows) for leaf in leaves]
    deepest = max(len(leaf.path) for leaf in leaves)
    gaps = [_gap_width(a.path, b.path, deepest) for a, b in zip(leaves, [*leaves[1:], leaves[0]], strict=True)]
    shrink = min(1.0, 0.02 * sum(widths) / max(gaps))  # few leaves need no wide gaps
    unit = 1 / (sum(widths) + sum(gaps) * shrink)
    angles, angle = [], gaps[-1] * shrink * unit / 2
    for width, gap in zip(widths, gaps, strict=True):
        angles.append((angle, angle + width * unit))
        angle += (width + gap * shrink) * unit
    return angles


def _gap_width(left: Sequence[str], right: Sequence[str], deepest: int) -> float:
    """Return the gap between two leaves, in columns of nodes: larger the higher their common switch."""
    if left[:-1] == right[:-1]:
        return 0.22
    shared = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), 0)
    return 0.22 + 0.9 * (deepest - 1 - shared)


def _spans(
    leaves: Sequence[LeafState], angles: Sequence[tuple[float, float]], depth: int
) -> list[tuple[tuple[str, ...], float, float]]:
    """Return the non-leaf switches of a level, from the start of their first leaf to the end of their last."""
    spans: dict[tuple[str, ...], tuple[float, float]] = {}
    for leaf, (start, stop) in zip(leaves, angles, strict=True):
        if depth < len(leaf.path) - 1:
            path = leaf.path[: depth + 1]
            spans[path] = (spans.get(path, (start, 0.0))[0], stop)
    return [(path, start, stop) for path, (start, stop) in spans.items()]


def _nodes_outwards(leaf: LeafState, states: Mapping[str, str]) -> list[str]:
    """Return the nodes from the switch outwards: nodes in use first, so that idle nodes are at the rim."""
    return sorted(leaf.nodes, key=lambda node: STATES.index(states.get(node, "unknown")))


def _cells(count: int, rows: int, start: float, stop: float, inner: float) -> list[RingSegment]:
    columns = ceil(count / rows)
    width, height = (stop - start) / columns, (_RIM - inner) / rows
    return [
        RingSegment(
            start + i % columns * width,
            start + (i % columns + 1) * width,
            inner + i // columns * height,
            inner + (i // columns + 1) * height,
        )
        for i in range(count)
    ]


def _draw_segments(axes: Axes, wedges: Sequence[RingSegment], colour: str) -> None:
    from matplotlib.collections import PolyCollection

    shapes = [_outline(wedge) for wedge in wedges]
    axes.add_collection(PolyCollection(shapes, facecolors=colour, edgecolors="white", linewidths=0.6))


def _outline(wedge: RingSegment) -> list[tuple[float, float]]:
    steps = max(2, ceil((wedge.stop - wedge.start) * 240))
    turns = [wedge.start + (wedge.stop - wedge.start) * i / steps for i in range(steps + 1)]
    return [_point(turn, wedge.outer) for turn in turns] + [_point(turn, wedge.inner) for turn in reversed(turns)]


def _point(turn: float, radius: float) -> tuple[float, float]:
    return radius * sin(2 * pi * turn), radius * cos(2 * pi * turn)


def _label_fits(text: str, wedge: RingSegment, size: float) -> bool:
    return 2 * pi * (wedge.stop - wedge.start) * wedge.inner > _LETTER * size * len(text) + 0.01


def _draw_label(axes: Axes, text: str, wedge: RingSegment, size: float) -> None:
    """Draw a switch's name along its ring, if it fits."""
    if _label_fits(text, wedge, size):
        turn = (wedge.start + wedge.stop) / 2
        angle = 180 - 360 * turn if 0.25 < turn < 0.75 else -360 * turn
        place = _point(turn, (wedge.inner + wedge.outer) / 2)
        axes.text(*place, text, rotation=angle, ha="center", va="center", size=size, color=INK, parse_math=False)


def _draw_node_label(axes: Axes, name: str, wedge: RingSegment, *, is_dark: bool) -> None:
    place = _point((wedge.start + wedge.stop) / 2, (wedge.inner + wedge.outer) / 2)
    axes.text(
        *place,
        format_cell(name)[:16],
        ha="center",
        va="center",
        size=10,
        color="white" if is_dark else INK,
        parse_math=False,
    )


def _draw_rim_label(axes: Axes, text: str, wedge: RingSegment) -> None:
    """Draw a leaf's name outside of its nodes."""
    turn = (wedge.start + wedge.stop) / 2
    is_right = turn < 0.5
    axes.text(
        *_point(turn, _RIM + 0.015),
        text,
        rotation=(90 if is_right else 270) - 360 * turn,
        rotation_mode="anchor",
        ha="left" if is_right else "right",
        va="center",
        size=6,
        color=FAINT,
        parse_math=False,
    )
