"""A fabric and who is on it, as a picture: on the right the fabric, on the left what there is to say of it."""

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
_LEFT, _COLUMN_WIDTH = 0.045, 0.36  # where the words begin, and how far they go
_MAX_PODS = 7  # that are told one by one


def draw_fabric(fabric: Fabric, states: Mapping[str, str], path: Path, *, title: str = "") -> None:
    """Draw a fabric into a .svg or .png. states: node → state, as `occupancy.states` tells.

    Raises ToolMissing without matplotlib, NoSpace or ClusterError when the file cannot be written.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        hint = "pip install 'pitools-hpc[plot]'"
        raise ToolMissing("a picture of a fabric needs the package matplotlib", hint=hint) from error

    leaves = list(leaf_states(fabric, states))
    form = "svg" if path.suffix == ".svg" else "png"
    style = {"font.family": "DejaVu Sans", "svg.hashsalt": "pit"}
    with mpl.rc_context(style), io.BytesIO() as out, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a name in letters that the font does not have is drawn as boxes
        figure = Figure(figsize=(_WIDTH_IN, _HEIGHT_IN), dpi=_DPI, facecolor="white")
        _compose(figure, fabric, leaves, states, title)
        # No date: the same fabric is the same file.
        figure.savefig(out, format=form, metadata={"Date": None} if form == "svg" else None)
        write_atomic(path, out.getvalue())


def _compose(figure: Figure, fabric: Fabric, leaves: Sequence[LeafState], of: Mapping[str, str], title: str) -> None:
    side = _HEIGHT_IN / _WIDTH_IN
    axes = figure.add_axes((1 - side, 0, side, 1))
    axes.set_aspect("equal")
    axes.set_axis_off()
    wired = [leaf for leaf in leaves if leaf.path]
    if fabric.torus:
        _planes(axes, fabric.torus.dims, [node for leaf in wired for node in leaf.nodes], of)
    elif wired:
        draw_rings(axes, wired, of)
    _draw_summary(figure, fabric, leaves, title)


def _planes(axes: Axes, dims: Sequence[int], nodes: Sequence[str], of: Mapping[str, str]) -> None:
    """A torus as its planes, side by side in rows."""
    from matplotlib.collections import PolyCollection

    width, height = dims[-1], dims[-2] if len(dims) > 1 else 1
    count = len(nodes) // (width * height)
    sides = [(max(n * (width + 1.2), ceil(count / n) * (height + 1.6)), n) for n in range(1, count + 1)]
    across = min(sides)[1]  # as square as it gets
    shapes: dict[str, list[list[tuple[float, float]]]] = {}
    for i, node in enumerate(nodes):
        plane, inside = divmod(i, width * height)
        x = plane % across * (width + 1.2) + inside % width
        y = -(plane // across) * (height + 1.6) - inside // width
        shapes.setdefault(of.get(node, "unknown"), []).append([(x, y), (x + 0.9, y), (x + 0.9, y - 0.9), (x, y - 0.9)])
        if not inside and count > 1:
            axes.text(x, y + 0.15, f"plane {plane}", size=9, color=FAINT, va="bottom")
    for state, squares in shapes.items():
        axes.add_collection(PolyCollection(squares, facecolors=COLOURS[state], edgecolors="none"))
    axes.autoscale_view()
    axes.margins(0.06)


def _draw_summary(figure: Figure, fabric: Fabric, leaves: Sequence[LeafState], title: str) -> None:
    """On the left: what it is, how many nodes are in each state, and where there is room."""
    wired = [leaf for leaf in leaves if leaf.path]
    figure.text(
        _LEFT,
        0.90,
        format_cell(title) if title else "Fabric",
        size=26,
        weight="bold",
        color=INK,
        va="top",
        parse_math=False,
    )
    figure.text(_LEFT, 0.815, summary(fabric, wired), size=12, color=FAINT, va="top")
    found, y = total_states(leaves), 0.68
    count = max(1, found.total())
    if found["unknown"] < count:
        _bar(figure, found, (_LEFT, y, _COLUMN_WIDTH, 0.035))
        for state in (state for state in STATES if found[state]):
            y -= 0.048
            share = f"{100 * found[state] / count:.1f} %"
            figure.text(_LEFT, y, "■", size=15, color=COLOURS[state], va="center")
            figure.text(_LEFT + 0.07, y, f"{found[state]}", size=13, color=INK, va="center", ha="right", weight="bold")
            figure.text(_LEFT + 0.08, y, state, size=13, color=INK, va="center")
            figure.text(_LEFT + _COLUMN_WIDTH, y, share, size=12, color=FAINT, va="center", ha="right")
        y = _pods(figure, wired, y - 0.075)
    lost = sum(len(leaf.nodes) for leaf in leaves if not leaf.path)
    whole = sum(leaf.idle == len(leaf.nodes) for leaf in wired)
    notes = [f"{whole} of {len(wired)} leaves wholly idle"] if found["idle"] and not fabric.torus else []
    notes += [f"{lost} nodes not in the topology"] if lost else []
    figure.text(_LEFT, max(y, 0.10), "\n".join(notes), size=12, color=FAINT, va="top", linespacing=1.6)


def _pods(figure: Figure, leaves: Sequence[LeafState], y: float) -> float:
    """A line for each pod, where there are a few; where the next line goes."""
    pods: dict[tuple[str, ...], list[LeafState]] = {}
    for leaf in leaves:
        pods.setdefault(leaf.path[:-1], []).append(leaf)
    if 1 < len(pods) <= _MAX_PODS:
        most = max(sum(len(leaf.nodes) for leaf in held) for held in pods.values())
        for path, held in pods.items():
            found = total_states(held)
            figure.text(_LEFT, y, short_name(path), size=11, color=INK, va="center", parse_math=False)
            _bar(figure, found, (_LEFT + 0.07, y - 0.009, 0.19 * found.total() / most, 0.018))
            told = f"{found['idle']} of {found.total()} idle"
            figure.text(_LEFT + _COLUMN_WIDTH, y, told, size=10, color=FAINT, va="center", ha="right")
            y -= 0.038
        y -= 0.02
    return y


def _bar(figure: Figure, found: Counter[str], box: tuple[float, float, float, float]) -> None:
    axes = figure.add_axes(box)
    axes.set_axis_off()
    axes.set_xlim(0, max(1, found.total()))
    axes.set_ylim(0, 1)
    at = 0
    for state in STATES:
        axes.barh(0.5, found[state], left=at, height=1, color=COLOURS[state], linewidth=0)
        at += found[state]
