"""Draw an episode with matplotlib, laid out in inches so that text and frames are always legible."""

from __future__ import annotations

import io
import textwrap
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pitools.core.errors import ToolMissing
from pitools.core.fs import write_atomic
from pitools.dataset.plot import content
from pitools.dataset.plot.content import MAX_CURVES, MAX_FRAMES, Curves, EpisodeContent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH_IN, _LEFT_IN, _RIGHT_IN, _DPI = 13.0, 0.95, 1.25, 110
_LEAST_FRAME_IN, _MOST_FRAME_IN = 0.9, 2.2
_PANEL_IN, _PANEL_GAP_IN, _ROW_GAP_IN = 1.15, 0.16, 0.24
_LINE_IN = 1.5 / 72  # for each point of a line's size


def draw_episode(path: Path, episode: int, png: Path) -> None:
    """Draw an episode of the version in folder `path`: its cameras' frames, actions and observations, over steps.

    Raises UsageError for an episode that is not there, DataError for damage, ToolMissing without matplotlib, NoSpace or
    ClusterError when the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        hint = "pip install 'pitools-hpc[plot]'"
        raise ToolMissing("a picture of an episode needs the package matplotlib", hint=hint) from error

    shown = content.read_content(path, episode)
    figure = Figure(dpi=_DPI)
    FigureCanvasAgg(figure)
    _lay_out(figure, shown)
    with io.BytesIO() as out, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an instruction in letters that the font does not have is drawn as boxes
        figure.savefig(out, format="png")
        write_atomic(png, out.getvalue())


def _lay_out(figure: Figure, shown: EpisodeContent) -> None:
    """Place all panels from the top down, in inches."""
    width = _WIDTH_IN - _LEFT_IN - _RIGHT_IN
    heights = [_height(pictures[0], width / MAX_FRAMES) for pictures in shown.frames.values()]
    counts = [len(panel.columns) for panel in shown.panels]
    tall = [_PANEL_IN if count <= MAX_CURVES else min(3.2, 0.5 + 0.05 * count) for count in counts]
    head_in = 0.1 + sum(line.size for line in shown.header) * _LINE_IN
    total = head_in + sum(heights) + _ROW_GAP_IN * len(heights) + sum(tall) + _PANEL_GAP_IN * len(tall) + 0.62
    figure.set_size_inches(_WIDTH_IN, total)

    top = total - 0.12
    for line in shown.header:
        place = _LEFT_IN / _WIDTH_IN, top / total
        figure.text(*place, line.text, size=line.size, color=line.colour, va="top", parse_math=False)
        top -= line.size * _LINE_IN
    top = total - head_in
    for (name, pictures), height in zip(shown.frames.items(), heights, strict=True):
        top -= height + _ROW_GAP_IN
        for i, (picture, step) in enumerate(zip(pictures, shown.frame_steps, strict=True)):
            left = _LEFT_IN + i * width / MAX_FRAMES
            box = (left / _WIDTH_IN, top / total, (width / MAX_FRAMES - 0.06) / _WIDTH_IN, height / total)
            _draw_frame(figure.add_axes(box), picture, step, name if i == 0 else "")
    for i, (panel, height) in enumerate(zip(shown.panels, tall, strict=True)):
        top -= height + _PANEL_GAP_IN
        axes = figure.add_axes((_LEFT_IN / _WIDTH_IN, top / total, width / _WIDTH_IN, height / total))
        (_draw_curves if len(panel.columns) <= MAX_CURVES else _draw_heatmap)(axes, panel)
        _steps_axis(axes, panel, shown.frame_steps if shown.frames else [], last=i == len(shown.panels) - 1)


def _height(picture: NDArray[np.uint8], width: float) -> float:
    return float(np.clip(width * picture.shape[0] / picture.shape[1], _LEAST_FRAME_IN, _MOST_FRAME_IN))


def _draw_frame(axes: Axes, picture: NDArray[np.uint8], step: int, name: str) -> None:
    axes.imshow(picture, cmap="gray", vmin=0, vmax=255)
    axes.set_title(str(step), size=8, pad=2)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_ylabel(_label(name), size=8, parse_math=False)


def _draw_curves(axes: Axes, panel: Curves) -> None:
    from matplotlib import color_sequences

    marker = "." if len(panel.values) <= 40 else ""
    colours = color_sequences["tab10"]
    for i, column in enumerate(panel.columns):
        style = "-" if column < len(colours) else "--"
        axes.plot(
            panel.values[:, i],
            style,
            color=colours[column % len(colours)],
            lw=1,
            marker=marker,
            ms=3,
            label=str(column),
        )
    axes.grid(axis="y", lw=0.3)
    axes.tick_params(labelsize=7)
    axes.legend(
        loc="upper left",
        bbox_to_anchor=(1.0, 1.06),
        fontsize=7,
        frameon=False,
        handlelength=1.0,
        labelspacing=0.15,
        ncols=1 if len(panel.columns) <= 6 else 2,
        columnspacing=0.8,
        title=panel.note or None,
        title_fontsize=7,
    )


def _draw_heatmap(axes: Axes, panel: Curves) -> None:
    """Draw each column as a row, by its distance from its mean, in its standard deviations."""
    finite = np.where(np.isfinite(panel.values), panel.values, np.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        deviation = np.nanstd(finite, axis=0)
        scaled = (finite - np.nanmean(finite, axis=0)) / np.where(deviation > 0, deviation, 1)
    image = axes.imshow(scaled.T, aspect="auto", cmap="RdBu_r", vmin=-2.5, vmax=2.5, interpolation="nearest")
    axes.tick_params(labelsize=7)
    place = axes.inset_axes((1.012, 0.1, 0.012, 0.8))
    bar = axes.figure.colorbar(image, cax=place)
    bar.ax.tick_params(labelsize=7)
    bar.set_label("deviations from a column's mean", size=7)


def _steps_axis(axes: Axes, panel: Curves, shown: list[int], *, last: bool) -> None:
    from matplotlib.ticker import MaxNLocator

    steps = len(panel.values)
    axes.set_xlim(-0.5, max(steps - 0.5, 0.5))
    axes.set_ylabel(_label(panel.array), size=8, parse_math=False)
    for step in shown:
        axes.axvline(step, color="gray", lw=0.5, ls=":", zorder=0)
    bad = ~np.isfinite(panel.values).all(axis=1)
    edges = np.flatnonzero(np.diff(bad, prepend=False, append=False)).tolist()
    for low, high in zip(edges[::2], edges[1::2], strict=True):
        axes.axvspan(low - 0.5, high - 0.5, color="red", alpha=0.35, lw=0.8)  # the line: one step may be no pixel wide
    if edges:
        axes.text(
            0.995,
            0.06,
            f"{int(bad.sum())} steps NaN or infinite, first {edges[0]}",
            color="firebrick",
            size=8,
            ha="right",
            transform=axes.transAxes,
            bbox={"color": "white", "alpha": 0.8, "pad": 1},
        )
    axes.tick_params(labelbottom=last)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if last:
        axes.set_xlabel("step", size=8)


def _label(name: str) -> str:
    """Return an array's name without common parts, on lines short enough for the margin."""
    return "\n".join(textwrap.wrap(name.removeprefix("obs/").removesuffix("_image").replace("_", " "), 16)[:3])
