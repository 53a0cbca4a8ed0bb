"""One picture of several replays: completion times, waits by size, GPUs in use over time."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pitools.core.errors import ToolMissing
from pitools.core.fs import write_atomic
from pitools.place.simulate.metrics import SimulationSummary, in_window, timeline
from pitools.place.simulate.model import DAY_S, HOUR_S, Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH_IN, _HEIGHT_IN, _DPI = 13.33, 7.5, 150  # a slide
_POINTS = 500  # of the time axis


@contextmanager
def draw_slide(path: Path, mosaic: list[list[str]]) -> Iterator[tuple[Figure, dict[str, Axes]]]:
    """Yield a figure and its axes by name, and write it into a PNG.

    Raises ToolMissing without matplotlib, NoSpace or ClusterError when the file cannot be written.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        hint = "pip install 'pitools-hpc[plot]'"
        raise ToolMissing("--png needs the package matplotlib", hint=hint) from error

    with mpl.rc_context({"font.family": "DejaVu Sans"}), io.BytesIO() as out:
        figure = Figure(figsize=(_WIDTH_IN, _HEIGHT_IN), dpi=_DPI, facecolor="white", layout="constrained")
        yield figure, figure.subplot_mosaic(mosaic)
        figure.savefig(out, format="png")
        write_atomic(path, out.getvalue())


def draw_results(results: Sequence[Result], summaries: Sequence[SimulationSummary], path: Path) -> None:
    """Draw replays of one trace, and their figures, into a PNG; see `draw_slide`."""
    with draw_slide(path, [["times", "waits"], ["use", "use"]]) as (figure, axes):
        first = summaries[0]
        figure.suptitle(f"{first.trace} on {first.scenario}, load x{first.load:g}, {first.jobs} jobs ({first.window})")
        _plot_times(axes["times"], results, summaries)
        _plot_waits(axes["waits"], summaries)
        _plot_utilisation(axes["use"], results)


def _plot_times(axes: Axes, results: Sequence[Result], summaries: Sequence[SimulationSummary]) -> None:
    """Draw the share of jobs that ended within a time."""
    for result, summary in zip(results, summaries, strict=True):
        jct = np.frombuffer(result.end_s) - np.frombuffer(result.submit_s)
        jct = np.sort(jct[in_window(result, summary.window)]) / HOUR_S
        mean_h, longest_h = summary.mean_jct_s / HOUR_S, summary.max_wait_s / HOUR_S
        label = f"{result.policy}: mean {mean_h:.2f} h, longest wait {longest_h:.0f} h"
        axes.plot(jct, np.arange(1, len(jct) + 1) / max(len(jct), 1), label=label)
    axes.set(xscale="log", xlabel="from submission to end, h", ylabel="share of the jobs", ylim=(0, 1.02))
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)


def _plot_waits(axes: Axes, summaries: Sequence[SimulationSummary]) -> None:
    """Draw mean waits, grouped by requested GPUs."""
    width = 0.8 / len(summaries)
    classes = list(summaries[0].wait_by_gpus_s)
    for number, summary in enumerate(summaries):
        places = [group + (number + 0.5) * width - 0.4 for group in range(len(classes))]
        axes.bar(places, [wait / HOUR_S for wait in summary.wait_by_gpus_s.values()], width, label=summary.policy)
    axes.set_xticks(range(len(classes)), classes)
    axes.set(xlabel="requested GPUs", ylabel="mean wait, h", ylim=(0, None))
    axes.grid(axis="y", alpha=0.3)


def _plot_utilisation(axes: Axes, results: Sequence[Result]) -> None:
    """Draw the GPUs in use in all pools, each point a mean."""
    for result in results:
        moments, used = timeline(result)
        if len(moments) < 2:
            continue
        grid = np.linspace(moments[0], moments[-1], _POINTS + 1)
        total = used.sum(1)
        area = np.concatenate([[0.0], np.cumsum(np.diff(moments) * total[:-1])])
        mean = np.diff(np.interp(grid, moments, area)) / np.diff(grid)
        axes.plot((grid[:-1] - moments[0]) / DAY_S, mean, label=result.policy)
    axes.axhline(sum(pool.gpus for pool in results[0].scenario.pools), color="grey", linestyle=":")
    axes.set(xlabel="days", ylabel="GPUs in use", ylim=(0, None))
    axes.grid(alpha=0.3)
