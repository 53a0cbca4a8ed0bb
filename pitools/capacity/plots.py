"""One picture of what-ifs: waits of each group of jobs with their bands, use and cost."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

from pitools.capacity.ask import CapacityAnswer
from pitools.capacity.workload import ALL
from pitools.place.simulate.plots import draw_slide

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MAX_GROUPS = 8  # of bars that can be told apart
_LEAST_WAIT_S = 1.0  # of the logarithmic axis


def draw_answers(answers: Sequence[CapacityAnswer], path: Path) -> None:
    """Draw answers into a PNG, see `draw_slide`: the p95 wait of the groups with the most jobs, use and cost."""
    with draw_slide(path, [["waits", "waits"], ["use", "cost"]]) as (figure, axes):
        every = [answer for answer in answers if answer.group == ALL]
        figure.suptitle(f"{every[0].jobs:.0f} jobs today; median, lowest and highest of {every[0].seeds} seeds")
        _plot_waits(axes["waits"], answers)
        _plot_total(
            axes["use"],
            "share of GPU time in use",
            [(each.utilisation, each.utilisation_low, each.utilisation_high) for each in every],
        )
        _plot_total(axes["cost"], "cost of the period", [(each.cost, each.cost_low, each.cost_high) for each in every])
        axes["use"].set_yticks(range(len(every)), [each.what_if or "today" for each in every])
        axes["cost"].set_yticks(range(len(every)), [""] * len(every))


def _plot_waits(axes: Axes, answers: Sequence[CapacityAnswer]) -> None:
    """Draw the p95 waits: a group of bars per group of jobs, a bar per what-if."""
    what_ifs = list(dict.fromkeys(answer.what_if for answer in answers))
    by_jobs = sorted((answer for answer in answers if answer.what_if == what_ifs[0]), key=lambda each: -each.jobs)
    groups = [answer.group for answer in by_jobs[:_MAX_GROUPS]]
    width = 0.8 / len(what_ifs)
    for number, what_if in enumerate(what_ifs):
        of_what_if = {answer.group: answer for answer in answers if answer.what_if == what_if}
        drawn = [
            (place, of_what_if[group])
            for place, group in enumerate(groups)
            if group in of_what_if and isfinite(of_what_if[group].wait_p95_high_s)
        ]
        heights = [max(each.wait_p95_s, _LEAST_WAIT_S) for _, each in drawn]
        below = [
            height - max(each.wait_p95_low_s, _LEAST_WAIT_S) for height, (_, each) in zip(heights, drawn, strict=True)
        ]
        above = [max(each.wait_p95_high_s - height, 0.0) for height, (_, each) in zip(heights, drawn, strict=True)]
        places = [place + (number + 0.5) * width - 0.4 for place, _ in drawn]
        axes.bar(places, heights, width, yerr=[below, above], capsize=2, label=what_if or "today")
    axes.set_xticks(range(len(groups)), groups)
    axes.set(yscale="log", ylabel="p95 wait, s", ylim=(_LEAST_WAIT_S, None))
    axes.legend(fontsize="small", loc="lower left", bbox_to_anchor=(0, 1), ncols=len(what_ifs))
    axes.grid(axis="y", alpha=0.3)


def _plot_total(axes: Axes, label: str, bands: Sequence[tuple[float, float, float]]) -> None:
    """Draw a bar per what-if, the first on top."""
    values = [band[0] for band in bands]
    errors = [[value - low for value, low, _ in bands], [high - value for value, _, high in bands]]
    axes.barh(range(len(bands)), values, xerr=errors, capsize=2)
    axes.invert_yaxis()
    axes.set(xlabel=label, xlim=(0, None))
    axes.grid(axis="x", alpha=0.3)
