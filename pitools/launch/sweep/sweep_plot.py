"""Plot a sweep: losses over steps, or parallel coordinates of the points."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pitools.core.errors import DataError, ToolMissing, UsageError
from pitools.core.fs import write_atomic
from pitools.launch.request import typed_value
from pitools.launch.sweep.sweep_folder import SweepPoint
from pitools.launch.sweep.sweep_table import SweepRow
from pitools.run.steps import read_run_steps

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FORMATS = {".svg": "svg", ".png": "png", ".pdf": "pdf"}
_LEGEND_RUNS = 20  # more names hide the picture


def plot_losses(points: Sequence[SweepPoint], rows: Sequence[SweepRow], target: Path) -> None:
    """Write the loss of each run over its steps to a file. Raises DataError without any, UsageError, ToolMissing."""
    figure, colours = _new_figure(target), _colours(rows)
    axes = figure.subplots()
    is_empty = True
    for point, row in zip(points, rows, strict=True):
        logs = read_run_steps(Path(point.run_dir))
        pairs = [(number, step.loss) for number, step in sorted(logs.items()) if step.loss is not None]
        if pairs:
            is_empty = False
            axes.plot(*zip(*pairs, strict=True), label=row.name, color=colours[row.run_id], linewidth=1)
    if is_empty:
        raise DataError("no run of the sweep has a step log", hint="pitools.run.steps.StepLog writes one")
    axes.set(xlabel="step", ylabel="loss")
    if len(rows) <= _LEGEND_RUNS:
        axes.legend(fontsize="small", frameon=False)
    _save(figure, target)


def plot_points(rows: Sequence[SweepRow], target: Path) -> None:
    """Write parallel coordinates of the points to a file: an axis for each key, and one for the loss."""
    figure, colours = _new_figure(target), _colours(rows)
    keys = [*dict.fromkeys(key for row in rows for key in row.point), "loss"]
    axes = figure.subplots()
    scales = [_Scale([_value(row, key) for row in rows]) for key in keys]
    for row in rows:
        heights = [scale.height(_value(row, key)) for key, scale in zip(keys, scales, strict=True)]
        pairs = [(number, height) for number, height in enumerate(heights) if height is not None]
        axes.plot(*zip(*pairs, strict=True), color=colours[row.run_id], linewidth=1, marker="o", markersize=3)
    for number, scale in enumerate(scales):
        axes.axvline(number, color="0.8", zorder=0)
        for text, height in scale.ticks():
            axes.annotate(text, (number, height), xytext=(4, 0), textcoords="offset points", fontsize="x-small")
    axes.set_xticks(range(len(keys)), keys)
    axes.set_yticks([])
    _save(figure, target)


def _value(row: SweepRow, key: str) -> str | int | float | bool | None:
    return row.loss if key == "loss" else typed_value(row.point[key]) if key in row.point else None


class _Scale:
    """The positions of one key's values on its axis, 0 to 1: by size, by logarithm over a factor of 50, or by name."""

    def __init__(self, values: Sequence[Any]) -> None:
        present = [value for value in values if value is not None]
        self._is_number = bool(present) and all(type(value) in (int, float) for value in present)
        self._names = sorted(set(map(str, present)))
        self._low: Any
        self._high: Any
        self._low, self._high = (min(present), max(present)) if self._is_number else (0, len(self._names) - 1)
        self._is_log = self._is_number and self._low > 0 and self._high / self._low > 50

    def height(self, value: Any) -> float | None:
        if value is None:
            return None
        position = value if self._is_number else self._names.index(str(value))
        low, high = self._low, self._high
        if self._is_log:
            position, low, high = math.log(position), math.log(low), math.log(high)
        return 0.5 if high == low else float((position - low) / (high - low))

    def ticks(self) -> list[tuple[str, float]]:
        """Return the texts on the axis and their positions."""
        values: Sequence[Any] = dict.fromkeys((self._low, self._high)) if self._is_number else self._names  # type: ignore[assignment]
        return [
            (f"{value:.4g}" if self._is_number else value, height)
            for value in values
            if (height := self.height(value)) is not None
        ]


def _colours(rows: Sequence[SweepRow]) -> dict[str, Any]:
    """Return run id → colour by the rank of its loss, dark for the best; grey without a loss."""
    from matplotlib import colormaps

    ordered = sorted((row for row in rows if row.loss is not None), key=lambda row: row.loss or 0.0)
    shades = {row.run_id: colormaps["viridis"](number / max(1, len(ordered) - 1)) for number, row in enumerate(ordered)}
    return {row.run_id: shades.get(row.run_id, "0.7") for row in rows}


def _new_figure(target: Path) -> Figure:
    if target.suffix not in _FORMATS:
        raise UsageError(f'"{target.suffix}": not an image format', where="--to", hint="FILE.svg, FILE.png or FILE.pdf")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ToolMissing("matplotlib is not installed", hint="pip install 'pitools-hpc[plot]'") from error
    return Figure(figsize=(8, 5), layout="constrained")


def _save(figure: Figure, target: Path) -> None:
    import io

    buffer = io.BytesIO()
    figure.savefig(buffer, format=_FORMATS[target.suffix])
    write_atomic(target, buffer.getvalue(), durable=False)
