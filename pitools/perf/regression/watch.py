"""Judge the newest step of each stored series, with false alarms controlled over all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np

from pitools.core.errors import ToolMissing
from pitools.core.fs import write_atomic
from pitools.core.record import Record
from pitools.perf.regression.change_points import ALPHA, MIN_EFFECT, MIN_POINTS, ChangePoint, find_changes_of_each
from pitools.perf.regression.repeats import Effect
from pitools.perf.regression.store import Point, Series, SeriesKey
from pitools.perf.statistics import false_discovery_rates

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FALSE_SHARE = 0.05  # of the alarms, expected, over all series of a store
_PLOTTED = 24
_COMPARED = 20  # points before a step, with which repeated runs are compared


class SeriesVerdict(Record, frozen=True, kw_only=True, tag="pit.perf-series/1"):
    """The newest step of one series.

    verdict: `short` with too few points for any; `steady` without a step; `inconclusive` for one that is not certain:
    so small beside the noise that slow changes of the mean give it, too; `unconfirmed` for a regression that repeated
    runs do not show. points: their number. changed_at, source: of the first point after the step. before, after:
    medians. effect: after ÷ before - 1. p: for this series alone. q: the least share of false alarms among all series
    at which this is one. changed: `software` if it differs across the step, `cluster` if it is the same, "" if unknown.
    rerun_effect, rerun_low, rerun_high: what repeated runs show, with a 95 % interval; None without them.
    """

    site: str
    partition: str
    device: str
    measure: str
    verdict: Literal["regression", "unconfirmed", "improvement", "inconclusive", "steady", "short"]
    points: int
    changed_at: str = ""
    source: str = ""
    before: float | None = None
    after: float | None = None
    effect: float | None = None
    p: float | None = None
    q: float | None = None
    changed: Literal["software", "cluster", ""] = ""
    rerun_effect: float | None = None
    rerun_low: float | None = None
    rerun_high: float | None = None

    @property
    def key(self) -> SeriesKey:
        """Site, partition, device and measure."""
        return self.site, self.partition, self.device, self.measure


def judge_series(series: Sequence[Series], *, min_effect: float = MIN_EFFECT, since: str = "") -> list[SeriesVerdict]:
    """Return the verdict on each series, worst first. since: steps before this time (RFC 3339 UTC) are history."""
    found = find_changes_of_each([[point.value for point in one.points] for one in series], min_effect=min_effect)
    is_short = [len(one.points) < MIN_POINTS for one in series]
    recent = [
        max(
            (change for change in changes if one.points[change.at].t >= since),
            key=lambda change: (change.is_certain, change.at),
            default=None,
        )
        for one, (changes, _) in zip(series, found, strict=True)
    ]
    # Changes before `since` are not reported, and count as p = 1.
    p_values = [
        change.p if change else 1.0 if changes else p for change, (changes, p) in zip(recent, found, strict=True)
    ]
    q_values = np.ones(len(series))
    tested = np.flatnonzero(~np.array(is_short, dtype=bool))
    q_values[tested] = false_discovery_rates([p_values[number] for number in tested])
    verdicts = [
        _verdict(one, change, p, float(q), short)
        for one, change, p, q, short in zip(series, recent, p_values, q_values, is_short, strict=True)
    ]
    order = {"regression": 0, "improvement": 1, "inconclusive": 2, "steady": 3, "short": 4}
    return sorted(verdicts, key=lambda verdict: (order[verdict.verdict], -abs(verdict.effect or 0.0)))


def _verdict(series: Series, change: ChangePoint | None, p: float, q: float, is_short: bool) -> SeriesVerdict:
    points = series.points
    names: dict[str, Any] = dict(zip(("site", "partition", "device", "measure"), series.key, strict=True))
    if is_short:
        return SeriesVerdict(**names, verdict="short", points=len(points))
    if change is None or p > ALPHA or q > FALSE_SHARE:
        return SeriesVerdict(**names, verdict="steady", points=len(points), p=p, q=q)
    last, first = points[change.at - 1], points[change.at]
    kind: Literal["regression", "improvement", "inconclusive"] = "inconclusive"
    if change.is_certain:
        kind = "regression" if (change.effect > 0) == (first.better == "lower") else "improvement"
    is_same = last.software == first.software
    return SeriesVerdict(
        **names,
        verdict=kind,
        points=len(points),
        changed_at=first.t,
        source=first.source,
        before=change.before,
        after=change.after,
        effect=change.effect,
        p=p,
        q=q,
        changed=("cluster" if is_same else "software") if last.software and first.software else "",
    )


def points_around(series: Series, verdict: SeriesVerdict) -> tuple[list[Point], Point]:
    """Return the newest points of a series before the step of its verdict, and the first one after it."""
    at = _changed_at(series, verdict)
    return list(series.points[max(0, at - _COMPARED) : at]), series.points[at]


def _changed_at(series: Series, verdict: SeriesVerdict) -> int:
    """Return the number of the first point after a step; points of one day may share its time."""
    changed = verdict.changed_at, verdict.source
    return next(i for i, point in enumerate(series.points) if (point.t, point.source) == changed)


def is_other_code(before: Point, after: Point) -> bool:
    """Return whether the code differs, and the packages do not: of a run, today's packages are all that is there."""
    first, second = before.software.split("+"), after.software.split("+")
    return bool(first[0] and second[0]) and first[0] != second[0] and first[1:2] == second[1:2]


def confirms(min_effect: float) -> Callable[[Effect], bool]:
    """Return the test of whether repeated runs show a regression, or surely none that counts."""
    return lambda effect: _is_shown(effect, min_effect) or effect.high < min_effect


def with_rerun(verdict: SeriesVerdict, effect: Effect, min_effect: float) -> SeriesVerdict:
    """Return the verdict on a regression after runs were repeated: unconfirmed if these do not show it."""
    return msgspec.structs.replace(
        verdict,
        verdict="regression" if _is_shown(effect, min_effect) else "unconfirmed",
        rerun_effect=effect.effect,
        rerun_low=effect.low,
        rerun_high=effect.high,
    )


def _is_shown(effect: Effect, min_effect: float) -> bool:
    return effect.low > 0 and effect.effect >= min_effect


def plot_series(series: Sequence[Series], verdicts: Sequence[SeriesVerdict], target: Path) -> None:
    """Write a picture of the series, in the order of their verdicts, to a file. Raises ToolMissing, UsageError."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ToolMissing("matplotlib is not installed", hint="pip install 'pitools-hpc[plot]'") from error
    import io

    by_key = {one.key: one for one in series}
    shown = verdicts[:_PLOTTED]
    columns = min(3, len(shown)) or 1
    rows = -(-len(shown) // columns) or 1
    figure = Figure(figsize=(4.5 * columns, 2.2 * rows), layout="constrained")
    for verdict, axes in zip(shown, figure.subplots(rows, columns, squeeze=False).flat, strict=False):
        _plot_one(axes, by_key[verdict.key], verdict)
    buffer = io.BytesIO()
    figure.savefig(buffer, format=target.suffix.lstrip(".").lower() or "png", dpi=130)
    write_atomic(target, buffer.getvalue())


def _plot_one(axes: Axes, series: Series, verdict: SeriesVerdict) -> None:
    values = [point.value for point in series.points]
    axes.plot(values, ".-", linewidth=0.6, markersize=3, color="0.4")
    if verdict.effect is not None and verdict.before is not None and verdict.after is not None:
        at = _changed_at(series, verdict)
        colour = {"regression": "tab:red", "improvement": "tab:green"}.get(verdict.verdict, "tab:orange")
        axes.axvline(at - 0.5, color=colour, linewidth=0.8)
        axes.hlines([verdict.before, verdict.after], [0, at], [at - 1, len(values) - 1], colors=colour)
        axes.set_xlabel(
            f"{verdict.effect:+.1%} at {verdict.changed_at[:10]}, {verdict.source or 'no source'}",
            fontsize=7,
            parse_math=False,
        )
    title = " ".join(word for word in (verdict.site, verdict.partition, verdict.device, verdict.measure) if word)
    axes.set_title(f"{title}: {verdict.verdict}", fontsize=8, parse_math=False)
    axes.tick_params(labelsize=7)
