"""Draw a fabric with its occupancy: a summary on the left, the fabric on the right."""

from __future__ import annotations

import io
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

from pitools.core.errors import ToolMissing
from pitools.core.fs import write_atomic
from pitools.core.output import format_cell
from pitools.topology.fabric_model import Fabric
from pitools.topology.show.occupancy import STATES, LeafState, leaf_states, total_states
from pitools.topology.show.sunburst import COLOURS, FAINT, INK, draw_rings
from pitools.topology.show.text import short_name, summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH_IN, _HEIGHT_IN, _DPI = 13.33, 7.5, 150  # a slide
_TEXT_X, _COLUMN_WIDTH = 0.045, 0.36  # left edge and width of the summary, as shares of the figure
_MAX_PODS = 7  # most pods with a line each


def draw_fabric(fabric: Fabric, states: Mapping[str, str], path: Path, *, title: str = "") -> None:
    """Draw a fabric into a .svg or .png. states: node → state, from `occupancy.node_states`.

    Raises ToolMissing without matplotlib, NoSpace or ClusterError if the file cannot be written.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        hint = "pip install 'pitools-hpc[plot]'"
        raise ToolMissing("drawing a fabric needs the package matplotlib", hint=hint) from error

    leaves = list(leaf_states(fabric, states))
    form = "svg" if path.suffix == ".svg" else "png"
    style = {"font.family": "DejaVu Sans", "svg.hashsalt": "pit"}
    with mpl.rc_context(style), io.BytesIO() as out, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # matplotlib warns of characters missing in the font
        figure = Figure(figsize=(_WIDTH_IN, _HEIGHT_IN), dpi=_DPI, facecolor="white")
        _draw_figure(figure, fabric, leaves, states, title)
        # No date, so that equal fabrics give equal files.
        figure.savefig(out, format=form, metadata={"Date": None} if form == "svg" else None)
        write_atomic(path, out.getvalue())


def _draw_figure(
    figure: Figure, fabric: Fabric, leaves: Sequence[LeafState], states: Mapping[str, str], title: str
) -> None:
    side = _HEIGHT_IN / _WIDTH_IN
    axes = figure.add_axes((1 - side, 0, side, 1))
    axes.set_aspect("equal")
    axes.set_axis_off()
    wired = [leaf for leaf in leaves if leaf.path]
    if fabric.torus:
        _draw_planes(axes, fabric.torus.dims, [node for leaf in wired for node in leaf.nodes], states)
    elif wired:
        draw_rings(axes, wired, states)
    _draw_summary(figure, fabric, leaves, title)


def _draw_planes(axes: Axes, dims: Sequence[int], nodes: Sequence[str], states: Mapping[str, str]) -> None:
    """Draw a torus as a grid of its planes."""
    from matplotlib.collections import PolyCollection

    width, height = dims[-1], dims[-2] if len(dims) > 1 else 1
    count = len(nodes) // (width * height)
    sides = [(max(n * (width + 1.2), ceil(count / n) * (height + 1.6)), n) for n in range(1, count + 1)]
    planes_per_row = min(sides)[1]  # planes per row, for the most square grid
    shapes: dict[str, list[list[tuple[float, float]]]] = {}
    for i, node in enumerate(nodes):
        plane, inside = divmod(i, width * height)
        x = plane % planes_per_row * (width + 1.2) + inside % width
        y = -(plane // planes_per_row) * (height + 1.6) - inside // width
        shapes.setdefault(states.get(node, "unknown"), []).append(
            [(x, y), (x + 0.9, y), (x + 0.9, y - 0.9), (x, y - 0.9)]
        )
        if not inside and count > 1:
            axes.text(x, y + 0.15, f"plane {plane}", size=9, color=FAINT, va="bottom")
    for state, squares in shapes.items():
        axes.add_collection(PolyCollection(squares, facecolors=COLOURS[state], edgecolors="none"))
    axes.autoscale_view()
    axes.margins(0.06)


def _draw_summary(figure: Figure, fabric: Fabric, leaves: Sequence[LeafState], title: str) -> None:
    """Draw the summary: the fabric's size, nodes by state, and idle nodes by pod."""
    wired = [leaf for leaf in leaves if leaf.path]
    figure.text(
        _TEXT_X,
        0.90,
        format_cell(title) if title else "Fabric",
        size=26,
        weight="bold",
        color=INK,
        va="top",
        parse_math=False,
    )
    figure.text(_TEXT_X, 0.815, summary(fabric, wired), size=12, color=FAINT, va="top")
    counts, y = total_states(leaves), 0.68
    count = max(1, counts.total())
    if counts["unknown"] < count:
        _draw_bar(figure, counts, (_TEXT_X, y, _COLUMN_WIDTH, 0.035))
        for state in (state for state in STATES if counts[state]):
            y -= 0.048
            share = f"{100 * counts[state] / count:.1f} %"
            figure.text(_TEXT_X, y, "■", size=15, color=COLOURS[state], va="center")
            figure.text(
                _TEXT_X + 0.07, y, f"{counts[state]}", size=13, color=INK, va="center", ha="right", weight="bold"
            )
            figure.text(_TEXT_X + 0.08, y, state, size=13, color=INK, va="center")
            figure.text(_TEXT_X + _COLUMN_WIDTH, y, share, size=12, color=FAINT, va="center", ha="right")
        y = _draw_pods(figure, wired, y - 0.075)
    outside = sum(len(leaf.nodes) for leaf in leaves if not leaf.path)
    idle_leaves = sum(leaf.idle == len(leaf.nodes) for leaf in wired)
    notes = [f"{idle_leaves} of {len(wired)} leaves entirely idle"] if counts["idle"] and not fabric.torus else []
    notes += [f"{outside} nodes not in the topology"] if outside else []
    figure.text(_TEXT_X, max(y, 0.10), "\n".join(notes), size=12, color=FAINT, va="top", linespacing=1.6)


def _draw_pods(figure: Figure, leaves: Sequence[LeafState], y: float) -> float:
    """Draw a line per pod, up to _MAX_PODS. Returns the y of the next line."""
    pods: dict[tuple[str, ...], list[LeafState]] = {}
    for leaf in leaves:
        pods.setdefault(leaf.path[:-1], []).append(leaf)
    if 1 < len(pods) <= _MAX_PODS:
        largest_pod = max(sum(len(leaf.nodes) for leaf in held) for held in pods.values())
        for path, pod_leaves in pods.items():
            counts = total_states(pod_leaves)
            figure.text(_TEXT_X, y, short_name(path), size=11, color=INK, va="center", parse_math=False)
            _draw_bar(figure, counts, (_TEXT_X + 0.07, y - 0.009, 0.19 * counts.total() / largest_pod, 0.018))
            idle_text = f"{counts['idle']} of {counts.total()} idle"
            figure.text(_TEXT_X + _COLUMN_WIDTH, y, idle_text, size=10, color=FAINT, va="center", ha="right")
            y -= 0.038
        y -= 0.02
    return y


def _draw_bar(figure: Figure, counts: Counter[str], box: tuple[float, float, float, float]) -> None:
    axes = figure.add_axes(box)
    axes.set_axis_off()
    axes.set_xlim(0, max(1, counts.total()))
    axes.set_ylim(0, 1)
    x = 0
    for state in STATES:
        axes.barh(0.5, counts[state], left=x, height=1, color=COLOURS[state], linewidth=0)
        x += counts[state]
