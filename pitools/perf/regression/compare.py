"""Compare two sets of measurements of the same thing: how much slower, within which limits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pitools.core.errors import DataError
from pitools.core.record import Record
from pitools.perf.regression.change_points import MIN_EFFECT
from pitools.perf.regression.repeats import effect_of_few

Array = NDArray[np.float64]
_Z = 2.576  # of a two-sided 99 % interval
_MIN_VALUES = 20  # in a row, of a run or file: the correlation of fewer cannot be told
_BLOCKS = 40  # a run's steps are summarized into at most so many medians: slow drifts then count as noise


class Comparison(Record, frozen=True, kw_only=True, tag="pit.perf-compare/1"):
    """B against A. effect: B ÷ A - 1, the median of all pairs; effect_low, effect_high: its 99 % interval,
    or of few runs a 95 % one of the means.

    verdict: `regression` or `improvement` if the interval excludes 0 and the effect is at least the least that counts;
    `same` if the interval is within it on both sides; else `inconclusive`. a_points, b_points: numbers of measurements.
    device: that both are of, "" where it is not known.
    """

    a: str
    b: str
    measure: str
    verdict: Literal["regression", "improvement", "same", "inconclusive"]
    effect: float
    effect_low: float | None
    effect_high: float | None
    a_median: float
    b_median: float
    a_points: int
    b_points: int
    device: str = ""


def compare(
    a: Sequence[float],
    b: Sequence[float],
    *,
    names: tuple[str, str] = ("a", "b"),
    measure: str = "",
    better: Literal["lower", "higher"] = "lower",
    min_effect: float = MIN_EFFECT,
    of_runs: bool = False,
) -> Comparison:
    """Compare two sets of positive measurements, each in the order of time.

    The interval is Hodges and Lehmann's, widened for the correlation of neighbours; None for fewer than 20 of them. Two
    levels, or work that is alike for 10 steps at a time, still make 40 values differ in up to 7 of 100 cases. of_runs:
    whether each is of a run of its own, so independent: for 2 to about 10 a side it is then `effect_of_few`'s. Raises
    DataError for an empty set or values that are not positive.
    """
    for name, values in zip(names, (a, b), strict=True):
        wrong = [f"{value:g}" for value in values if not (math.isfinite(value) and value > 0)]
        if wrong or not len(values):
            raise DataError(f"{wrong[0] if wrong else 'no numbers'} (expected positive numbers)", where=name)
    logs = [_block_medians(np.log(np.asarray(values, dtype=float))) for values in (a, b)]
    pairs = np.sort(np.subtract.outer(logs[1], logs[0]).ravel())
    variance = sum(_inflation(part) / len(part) for part in logs) / 12
    half = _Z * math.sqrt(variance)  # of the share of pairs on each side of the median
    is_enough = of_runs or min(len(a), len(b)) >= _MIN_VALUES
    limits: list[float | None] = [
        float(np.expm1(np.quantile(pairs, 0.5 + side * half))) if is_enough and half < 0.5 else None for side in (-1, 1)
    ]
    effect = float(np.expm1(np.median(pairs)))
    if of_runs and limits[0] is None and min(len(a), len(b)) > 1:
        effect, *limits = effect_of_few(a, b)
    return Comparison(
        a=names[0],
        b=names[1],
        measure=measure,
        verdict=_verdict(effect, limits[0], limits[1], better, min_effect),
        effect=effect,
        effect_low=limits[0],
        effect_high=limits[1],
        a_median=float(np.median(a)),
        b_median=float(np.median(b)),
        a_points=len(a),
        b_points=len(b),
    )


def _verdict(
    effect: float, low: float | None, high: float | None, better: str, min_effect: float
) -> Literal["regression", "improvement", "same", "inconclusive"]:
    if low is None or high is None:
        return "inconclusive"
    if (low > 0 or high < 0) and abs(effect) >= min_effect:
        return "regression" if (effect > 0) == (better == "lower") else "improvement"
    return "same" if -min_effect < low and high < min_effect else "inconclusive"


def _block_medians(values: Array) -> Array:
    """Return the medians of at most `_BLOCKS` equal pieces."""
    return np.array([np.median(part) for part in np.array_split(values, min(len(values), _BLOCKS))])


def _inflation(values: Array) -> float:
    """Return how much larger the variance of a mean is than for independent values, by the neighbours' correlation."""
    n = len(values)
    rest = values - np.median(values)
    scale = 1.4826 * float(np.median(np.abs(rest)))
    rest = np.clip(rest, -3.5 * scale, 3.5 * scale) if scale else rest
    raw = float(rest[1:] @ rest[:-1]) / max(float(rest @ rest), 1e-300)
    phi = min(0.9, max(0.0, raw + (1 + 4 * raw) / n + 0.5 / math.sqrt(n)))  # bias, and half a standard error
    return (1 + phi) / (1 - phi)
