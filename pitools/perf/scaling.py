"""Fit how a step's time depends on the number of GPUs, name what limits it, and predict other sizes.

T(n) = serial + work / n + latency · log2 n + ring · (n - 1) / n, no term below 0. In weak scaling, where each GPU keeps
its work, work / n is a constant and part of `serial`. A fit is of one layout: a table with two has two fits. With few
sizes several models fit equally well, so a prediction is their average by Akaike weight, and its band spans them.
"""

from __future__ import annotations

import csv
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pitools.core.errors import DataError
from pitools.core.record import Record

Array = NDArray[np.float64]
ScalingKind = Literal["strong", "weak"]

_TERMS = ("serial", "work", "latency", "ring")
_BOOTSTRAPS = 200
_NOISE = 0.01  # least relative deviation of a measured step time
_TOLERANCE = 0.1  # by which the work of a step may differ within one fit


class Measured(NamedTuple):
    """A measured step. gpus: their number. layout: the parallelism without its data-parallel degree. work: of a step,
    such as its tokens; None if unknown."""

    gpus: int
    step_s: float
    layout: str = ""
    work: float | None = None


class ScalingPoint(Record, frozen=True, kw_only=True, tag="pit.perf-scaling/1"):
    """A size, measured or not, and what the fit says of it.

    measured_s: median of the step's measurements; None for a size that was only asked for. step_s, low_s, high_s: the
    fit and its 90 % band. efficiency: of a GPU, relative to the smallest measured size. limit: the largest term that
    more GPUs do not shorten, `work` if all of these are below a tenth of the step; `serial|ring` where models that fit
    equally well differ: times alone cannot tell a constant from a ring's (n - 1) / n. terms: seconds by term. note: a
    weakness of the fit.
    """

    layout: str
    kind: ScalingKind
    gpus: int
    measured_s: float | None
    step_s: float
    low_s: float
    high_s: float
    efficiency: float
    limit: str
    terms: dict[str, float]
    note: str = ""


class _Model(NamedTuple):
    """A fit of some terms. terms: their columns. weight: Akaike's, of 1 over all models."""

    terms: tuple[int, ...]
    seconds: Array
    weight: float


def fit_scaling(
    measured: Sequence[Measured], at: Sequence[int] = (), kind: ScalingKind | None = None
) -> list[ScalingPoint]:
    """Fit the steps of one layout; return the measured sizes and those of `at`, by size.

    kind: needed where the work of a step is unknown. Raises DataError for several layouts, fewer than two sizes, work
    that is neither constant nor proportional to the GPUs, or a size of `at` beyond twice the largest of two sizes.
    """
    layouts = sorted({point.layout for point in measured})
    if len(layouts) > 1:
        raise DataError(f"{len(layouts)} layouts (expected 1): {', '.join(layouts)}", hint="fit each by itself")
    where = f"layout {layouts[0]}" if layouts and layouts[0] else "measured sizes"
    kind = kind or _kind(measured, where)
    sizes = np.array([point.gpus for point in measured])
    times = np.array([point.step_s for point in measured])
    are_positive = bool((np.isfinite(times) & (times > 0)).all())
    distinct = [int(size) for size in np.unique(sizes)]
    asked = sorted({*distinct, *at})
    if len(distinct) < 2 or sizes.min() < 1 or not are_positive or min(asked, default=1) < 1:
        message = f"sizes {distinct} (expected at least 2, of 1 GPU or more, with times above 0)"
        raise DataError(message, where=where, hint="measure another size with this layout; a third tests the fit")
    if asked[-1] > (2 if len(distinct) == 2 else 8) * distinct[-1]:
        hint = "measure more and larger sizes" if len(distinct) > 2 else "measure a third size"
        message = f"{asked[-1]} GPUs are too far from {distinct[-1]}, the largest of {len(distinct)} sizes"
        raise DataError(message, where=where, hint=hint)
    models = _fit_models(sizes, times, kind)
    note = "2 sizes: no test of the fit" if len(distinct) == 2 else ""
    low, high = _band(sizes, times, kind, models, np.array(asked))
    base = _predict(models, distinct[0])
    points = []
    for number, size in enumerate(asked):
        here = times[sizes == size]
        step_s = _predict(models, size)
        points.append(
            ScalingPoint(
                layout=layouts[0],
                kind=kind,
                gpus=size,
                measured_s=float(np.median(here)) if len(here) else None,
                step_s=step_s,
                low_s=float(low[number]),
                high_s=float(high[number]),
                efficiency=base / step_s * (distinct[0] / size if kind == "strong" else 1.0),
                limit=_limit(models, size, kind),
                terms=_terms(models, size),
                note=note,
            )
        )
    return points


def _kind(measured: Sequence[Measured], where: str) -> ScalingKind:
    """Return the kind of scaling by the work of a step."""
    work = [point.work for point in measured if point.work]
    hint = "pit perf scaling --kind strong|weak"
    if len(work) < len(measured) or not work:
        raise DataError("the work of a step is unknown (column tokens_per_step)", where=where, hint=hint)
    each = [amount / point.gpus for amount, point in zip(work, measured, strict=True)]
    for kind, amounts in (("strong", work), ("weak", each)):
        if max(amounts) / min(amounts) <= 1 + _TOLERANCE:
            return kind  # type: ignore[return-value]
    message = "the work of a step is neither the same for all sizes (strong) nor proportional to GPUs (weak)"
    raise DataError(message, where=where, hint="leave out the rows of the other kind")


def _design(sizes: Array | NDArray[np.intp]) -> Array:
    n = np.asarray(sizes, dtype=float)
    return np.stack([np.ones_like(n), 1 / n, np.log2(n), (n - 1) / n], axis=-1)


def _fit_models(sizes: Array, times: Array, kind: ScalingKind) -> list[_Model]:
    """Return every choice of terms that fits with no term below 0, weighted by how well."""
    usable = (0, 2, 3) if kind == "weak" else (0, 1, 2, 3)
    scores: list[float] = []
    fits: list[tuple[tuple[int, ...], Any]] = []
    design = _design(sizes) / times[:, None]  # relative errors
    for count in range(1, min(len(usable), len(np.unique(sizes))) + 1):
        for terms in itertools.combinations(usable, count):
            chosen = design[:, terms]
            seconds, *_ = np.linalg.lstsq(chosen, np.ones(len(times)), rcond=None)
            if (seconds >= 0).all():
                errors = chosen @ seconds - 1
                scores.append(float(errors @ errors) / _NOISE**2 + 2 * count)
                fits.append((terms, seconds))
    weights = np.exp(-(np.array(scores) - min(scores)) / 2)
    weights /= weights.sum()
    return [_Model(terms, seconds, float(w)) for (terms, seconds), w in zip(fits, weights, strict=True)]


def _predict(models: Sequence[_Model], size: int) -> float:
    return sum(_terms(models, size).values())


def _terms(models: Sequence[_Model], size: int) -> dict[str, float]:
    """Return the seconds of each term, averaged over the models."""
    row = _design(np.array([size]))[0]
    total = dict.fromkeys(_TERMS, 0.0)
    for model in models:
        for column, seconds in zip(model.terms, model.seconds, strict=True):
            total[_TERMS[column]] += float(model.weight * seconds * row[column])
    return total


def _limit(models: Sequence[_Model], size: int, kind: ScalingKind) -> str:
    """Return the largest term that more GPUs do not shorten, of each model with a noticeable weight."""
    names = {_limit_of(_terms([model._replace(weight=1.0)], size), kind) for model in models if model.weight >= 0.05}
    return "|".join(name for name in ("work", "serial", "latency", "ring") if name in names)


def _limit_of(terms: dict[str, float], kind: ScalingKind) -> str:
    """Return the limit of one model. In weak scaling `serial` holds the work, and is no limit."""
    names = ("latency", "ring") if kind == "weak" else ("serial", "latency", "ring")
    largest = max(names, key=lambda name: terms[name])
    return largest if terms[largest] >= 0.1 * sum(terms.values()) else "work"


def _band(sizes: Array, times: Array, kind: ScalingKind, models: Sequence[_Model], asked: Array) -> tuple[Array, Array]:
    """Return the 90 % band: of fits to times with resampled noise, and over the models that fit."""
    fitted = np.array([_predict(models, int(size)) for size in sizes])
    freedom = max(1, len(times) - min(2, len(np.unique(sizes)) - 1))
    noise = max(_NOISE, math.sqrt(float(((times / fitted - 1) ** 2).sum()) / freedom))
    rng = np.random.default_rng(0)
    drawn = []
    for _ in range(_BOOTSTRAPS):
        again = _fit_models(sizes, times * np.exp(noise * rng.standard_normal(len(times))), kind)
        model = again[rng.choice(len(again), p=[one.weight for one in again])]
        drawn.append([_predict([model._replace(weight=1.0)], int(size)) for size in asked])
    low, high = np.quantile(drawn, [0.05, 0.95], axis=0)
    return low, high


def read_measured(path: Path) -> list[Measured]:
    """Read a CSV file with the columns gpus, step_s and, where known, layout and tokens_per_step.

    Raises DataError with the line, or without rows.
    """
    with path.open(newline="", encoding="utf-8-sig") as file:
        try:
            rows = csv.DictReader(file)
            numbered = [(rows.line_num, row) for row in rows]
        except (csv.Error, UnicodeDecodeError) as error:
            raise DataError(f"not CSV: {error}", where=str(path)) from error
        if rows.fieldnames and not numbered:
            raise DataError("no rows", where=str(path), hint="gpus,step_s,layout,tokens_per_step")
        if missing := {"gpus", "step_s"} - set(rows.fieldnames or ()):
            message = f"no column {' and '.join(sorted(missing))}"
            raise DataError(message, where=str(path), hint="gpus,step_s,layout,tokens_per_step")
        measured = []
        for number, row in numbered:
            try:
                work = row.get("tokens_per_step")
                values = (int(row["gpus"]), float(row["step_s"]), float(work) if work else None)
            except (TypeError, ValueError) as error:
                raise DataError(str(error), where=f"{path}:{number}") from error
            measured.append(Measured(values[0], values[1], row.get("layout") or "", values[2]))
    return measured
