"""Draw plots as SVG text, by hand: no fonts, no scripts, nothing to load; a pointer's tooltip gives the numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from pitools.core.html_page import text

_WIDTH, _LEFT, _RIGHT = 1160, 250, 20
_ROW = 24
_MAX_LABEL = 30  # of a run's id the end is the most telling


class Part(NamedTuple):
    """A part of a line, from start to end on its axis. tip: the tooltip."""

    start: float
    end: float
    colour: str
    tip: str = ""


def legend(colours: Mapping[str, str]) -> str:
    """Return the names of colours, as HTML."""
    marks = "".join(
        f'<span class="key"><span style="background:{colour}"></span>{text(name)}</span>'
        for name, colour in colours.items()
    )
    return f"<p>{marks}</p>\n"


def bars(rows: Sequence[tuple[str, Sequence[Part]]], low: float, high: float, ticks: Mapping[float, str]) -> str:
    """Return a line of parts for each label, on one axis from low to high. ticks: position → its label."""
    height = _ROW * len(rows) + 30
    span = (high - low) or 1.0

    def x(value: float) -> float:
        inside = min(max(value, low), high)
        return _LEFT + (inside - low) / span * (_WIDTH - _LEFT - _RIGHT)

    marks = []
    for position, label in ticks.items():
        at = f"{x(position):.1f}"
        marks.append(f'<line x1="{at}" x2="{at}" y1="0" y2="{height - 25}" stroke="#8884"/>')
        marks.append(f'<text x="{at}" y="{height - 8}" text-anchor="middle">{text(label)}</text>')
    for number, (label, parts) in enumerate(rows):
        y = number * _ROW
        shown = label if len(label) <= _MAX_LABEL else f"{label[:10]}…{label[11 - _MAX_LABEL :]}"
        marks.append(
            f'<text x="{_LEFT - 8}" y="{y + 16}" text-anchor="end">{text(shown)}<title>{text(label)}</title></text>'
        )
        for part in parts:
            begin, size = x(part.start), max(1.0, x(part.end) - x(part.start))
            box = f'x="{begin:.1f}" y="{y + 3}" width="{size:.1f}" height="{_ROW - 6}"'
            marks.append(f'<rect {box} fill="{part.colour}"><title>{text(part.tip)}</title></rect>')
    return _svg(height, marks)


def lines(
    series: Mapping[str, Sequence[tuple[float, float]]], colours: Mapping[str, str], x_label: str, y_label: str
) -> str:
    """Return a plot of series of points, of which those beyond 1e300 or not finite are left out; "" without a point."""
    points = {name: [(x, y) for x, y in values if abs(x) < 1e300 and abs(y) < 1e300] for name, values in series.items()}
    every = [point for values in points.values() for point in values]
    if not every:
        return ""
    left, top, width, height = 70.0, 10.0, _WIDTH - 90.0, 230.0
    x_low, x_high = min(x for x, _ in every), max(x for x, _ in every)
    x_ticks = [tick for tick in ticks(x_low, x_high, 10) if x_low <= tick <= x_high]
    y_ticks = ticks(min(0.0, *(y for _, y in every)), max(y for _, y in every))
    y_low, y_high = y_ticks[0], y_ticks[-1]

    def at(x: float, y: float) -> tuple[float, float]:
        return left + (x - x_low) / ((x_high - x_low) or 1.0) * width, top + (y_high - y) / (y_high - y_low) * height

    marks = []
    for tick in x_ticks:
        x, y = at(tick, y_low)
        marks.append(f'<text x="{x:.1f}" y="{y + 18:.1f}" text-anchor="middle">{tick:g}</text>')
    for tick in y_ticks:
        x, y = at(x_low, tick)
        marks.append(f'<line x1="{left}" x2="{left + width}" y1="{y:.1f}" y2="{y:.1f}" stroke="#8884"/>')
        marks.append(f'<text x="{x - 8:.1f}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for name, values in points.items():
        path = " ".join("{:.1f},{:.1f}".format(*at(x, y)) for x, y in thin(values))
        colour = colours.get(name, "#0072B2")
        marks.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
    marks.append(f'<text x="{left + width / 2}" y="{top + height + 40}" text-anchor="middle">{text(x_label)}</text>')
    middle = top + height / 2
    marks.append(
        f'<text x="14" y="{middle}" text-anchor="middle" transform="rotate(-90 14 {middle})">{text(y_label)}</text>'
    )
    return _svg(int(top + height + 50), marks)


def thin(values: Sequence[tuple[float, float]], most: int = 1000) -> Sequence[tuple[float, float]]:
    """Return at most twice `most` points that look the same: of each run of points the lowest and the highest."""
    if len(values) <= 2 * most:
        return values
    size = math.ceil(len(values) / most)
    groups = [values[start : start + size] for start in range(0, len(values), size)]
    kept = [
        sorted({min(group, key=lambda point: point[1]), max(group, key=lambda point: point[1])}) for group in groups
    ]
    return [point for group in kept for point in group]


def ticks(low: float, high: float, count: int = 6) -> list[float]:
    """Return about `count` round numbers, of which the first is not above low, and the last not below high."""
    span = next(size for size in (high - low, abs(high), 1.0) if size > 1e-300)
    size = 10.0 ** math.floor(math.log10(span / count))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor * count >= span)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [float(f"{number * step:.15g}") for number in range(first, max(last, first + 1) + 1)]


def time_ticks(low: float, high: float) -> dict[float, str]:
    """Return labels of times (Unix) for an axis: of hours, minutes or days."""
    steps = (1, 5, 15, 60, 300, 900, 1800, 3600, 7200, 14400, 43200, 86400)
    step = next((step for step in steps if (high - low) / step <= 12), math.ceil((high - low) / 12 / 86400) * 86400)
    form = "%m-%d" if step >= 86400 else "%H:%M" if step >= 60 else "%H:%M:%S"
    first = math.ceil(low / step)
    numbers = range(first, math.floor(high / step) + 1)
    return {number * step: datetime.fromtimestamp(number * step, UTC).strftime(form) for number in numbers}


def _svg(height: int, marks: Iterable[str]) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" role="img">{"".join(marks)}</svg>\n'
    )
