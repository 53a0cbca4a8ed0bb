"""Find the steps of a series of measurements: a max-scan whose threshold knows of correlated noise.

A series is clipped (`_CLIP`), so that one outlier is no step. For each split point a step is fitted by generalized
least squares under AR(1) noise, and the largest likelihood ratio is compared with its simulated distribution
(`null.csv`, by `perf/performance/null_table.py`). The correlation of neighbours is estimated from the series, and
raised by about its standard error: a short series cannot tell correlated noise from a step. A small step, in turn,
cannot be told from a mean that changes slowly (a drift, long memory, two kinds of nodes in turn) or from noise that
grows: a step is certain only from `MIN_DEVIATIONS` on. Constants were chosen on the noise that `perf/run
performance_regressions` does not call new.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

ALPHA = 0.0085  # of one scan: leaves room to 1 in 100 healthy series where the noise is not as simulated
MIN_EFFECT = 0.02
MIN_DEVIATIONS = 1.5  # of the noise near a step
MIN_POINTS = 12
MAX_POINTS = 500  # the newest
_MIN_SEGMENT = 4  # points on each side of a step
_NEAR = 10  # points on each side that tell the noise near a step
_CLIP = 3.25  # standard deviations from the median
_LEVELS = np.log([1.0, 0.5, 0.1, 0.02])  # of the quantiles in null.csv


class ChangePoint(NamedTuple):
    """A step of a series. at: index of the first point after it. before, after: medians of the segments on its sides.

    effect: after ÷ before - 1. p: probability of so large a step somewhere in a series without one. deviations: its
    size in standard deviations of the noise near it, or on both of its sides if these are larger.
    """

    at: int
    before: float
    after: float
    effect: float
    p: float
    deviations: float

    @property
    def is_certain(self) -> bool:
        """Whether the step is too large to be a slow change of the mean."""
        return self.deviations >= MIN_DEVIATIONS


class Scan(NamedTuple):
    """The largest step of each series. at: index of its first point. statistic: likelihood ratio. phi: correlation."""

    at: NDArray[np.intp]
    statistic: Array
    phi: Array


def find_changes(values: Sequence[float] | Array, *, min_effect: float = MIN_EFFECT) -> tuple[list[ChangePoint], float]:
    """Return the steps of a series, oldest first, and the p-value of the newest, or of the largest if none is found.

    values: oldest first; of more than MAX_POINTS the newest count. min_effect: a smaller relative step is none.
    """
    series = np.asarray(values, dtype=float)
    skipped = max(0, len(series) - MAX_POINTS)
    series = series[skipped:]
    p_values: dict[int, float] = {}
    first_p = _split(series, 0, len(series), p_values)
    while changes := _changes(series, p_values):
        smallest = min(changes, key=lambda change: abs(change.effect))
        if abs(smallest.effect) >= min_effect:
            break
        del p_values[smallest.at]  # its neighbours' segments grow
    kept = [change._replace(at=change.at + skipped) for change in changes]
    return kept, (kept[-1].p if kept else first_p)


def find_changes_of_each(
    series: Sequence[Sequence[float]], *, min_effect: float = MIN_EFFECT
) -> list[tuple[list[ChangePoint], float]]:
    """Return what `find_changes` gives for each series; those of equal length are scanned at once."""
    by_length: dict[int, list[int]] = {}
    for number, values in enumerate(series):
        by_length.setdefault(min(len(values), MAX_POINTS), []).append(number)
    results: list[tuple[list[ChangePoint], float]] = [([], 1.0)] * len(series)
    for n, numbers in by_length.items():
        if n < MIN_POINTS:
            continue
        p_values = p_value(scan(np.array([series[number][-n:] for number in numbers], dtype=float)), n)
        for number, p in zip(numbers, p_values, strict=True):
            is_step = p <= ALPHA
            results[number] = find_changes(series[number], min_effect=min_effect) if is_step else ([], float(p))
    return results


def _split(series: Array, start: int, end: int, p_values: dict[int, float]) -> float:
    """Add the steps between two points to `p_values`, by binary segmentation; return the p-value of the largest."""
    part = series[start:end]
    if len(part) < MIN_POINTS:
        return 1.0
    found = scan(part[None])
    p = float(p_value(found, len(part))[0])
    if p <= ALPHA:
        at = start + _refine(part, int(found.at[0]))
        p_values[at] = p
        _split(series, start, at, p_values)
        _split(series, at, end, p_values)
    return p


def _changes(series: Array, p_values: Mapping[int, float]) -> list[ChangePoint]:
    """Return the steps at these indices, with the medians of the segments between them."""
    bounds = [0, *sorted(p_values), len(series)]
    medians = [float(np.median(series[start:end])) for start, end in pairwise(bounds)]
    return [
        ChangePoint(at, *sides, _effect(*sides), p_values[at], _deviations(series[start:end], at - start))
        for start, at, end, sides in zip(bounds, bounds[1:], bounds[2:], pairwise(medians), strict=False)
    ]


def _deviations(values: Array, at: int) -> float:
    """Return the size of the step at an index in standard deviations of the noise on its sides."""
    before, after = np.split(_clip(values[None])[0], [at])
    noise = 0.0
    for sides in ((before, after), (before[-_NEAR:], after[:_NEAR])):
        squares = sum(float(((side - side.mean()) ** 2).sum()) for side in sides)
        noise = max(noise, squares / (len(sides[0]) + len(sides[1]) - 2))
    return float(abs(after.mean() - before.mean()) / max(noise, 1e-24) ** 0.5)


def _refine(values: Array, index: int) -> int:
    """Return the split near index with the least sum of absolute deviations: an outlier does not attract it."""

    def deviation(at: int) -> float:
        return sum(float(np.abs(part - np.median(part)).sum()) for part in (values[:at], values[at:]))

    nearby = range(max(_MIN_SEGMENT, index - 10), min(len(values) - _MIN_SEGMENT, index + 10) + 1)
    return min(nearby, key=deviation)


def _effect(before: float, after: float) -> float:
    return (after - before) / abs(before) if before else float(np.sign(after)) * np.inf if after else 0.0


def scan(values: Array) -> Scan:
    """Return the largest step of each series, which have equal lengths. values: (series, points), finite."""
    scores = _clip(values)
    count, n = scores.shape
    _, index = _largest_step(scores, np.zeros(count))
    phi = _upper_phi(_correlation(scores, index), n)
    ratio, index = _largest_step(scores, phi)
    return Scan(index, ratio, phi)


def _clip(values: Array) -> Array:
    """Return the series around 0 with deviation 1, of logarithms where all values are positive, clipped."""
    positive = (values > 0).all(axis=1, keepdims=True)
    scores = np.where(positive, np.log(np.where(positive, values, 1.0)), values)
    scores = scores - np.median(scores, axis=1, keepdims=True)
    scale = 1.4826 * np.median(np.abs(scores), axis=1, keepdims=True)
    scale = np.where(scale > 0, scale, scores.std(axis=1, keepdims=True))  # more than half of the values are equal
    clipped: Array = np.clip(scores / np.where(scale > 0, scale, 1.0), -_CLIP, _CLIP)
    return clipped


def _largest_step(scores: Array, phi: Array) -> tuple[Array, NDArray[np.intp]]:
    """Return the likelihood ratio of the best step under AR(1) noise of correlation phi, and its index."""
    count, n = scores.shape
    phi = phi[:, None]
    first = np.sqrt(1 - phi**2)
    noise = np.hstack([first * scores[:, :1], scores[:, 1:] - phi * scores[:, :-1]])  # whitened
    level = np.hstack([first, np.repeat(1 - phi, n - 1, axis=1)])  # a constant, whitened
    level_sq = (level**2).sum(axis=1, keepdims=True)
    noise = noise - level * ((level * noise).sum(axis=1, keepdims=True) / level_sq)
    split = np.arange(_MIN_SEGMENT, n - _MIN_SEGMENT + 1)
    after = noise[:, ::-1].cumsum(axis=1)[:, ::-1][:, split] - noise[:, split]
    # A step at index i, whitened, is 1 at i and 1 - phi later.
    product = noise[:, split] + (1 - phi) * after
    later = n - 1 - split
    step_sq = 1 + (1 - phi) ** 2 * later - ((1 - phi) * (1 + (1 - phi) * later)) ** 2 / level_sq
    explained = product**2 / (step_sq * np.maximum((noise**2).sum(axis=1, keepdims=True), 1e-12))
    best = explained.argmax(axis=1)
    largest = np.minimum(explained[np.arange(count), best], 1 - 1e-12)
    return -n * np.log1p(-largest), best + _MIN_SEGMENT


def _correlation(scores: Array, index: NDArray[np.intp]) -> Array:
    """Return the correlation of neighbours, apart from the step at index and, if there are more steps, from these."""
    n = scores.shape[1]
    is_before = np.arange(n) < index[:, None]
    before = (scores * is_before).sum(axis=1) / index
    after = (scores * ~is_before).sum(axis=1) / (n - index)
    rest = scores - np.where(is_before, before[:, None], after[:, None])
    raw = (rest[:, 1:] * rest[:, :-1]).sum(axis=1) / np.maximum((rest**2).sum(axis=1), 1e-12)
    phi = (raw + 4 / n) / (1 - 9 / n)  # its bias after the best of all steps is taken out, by simulation
    near, far = np.diff(scores, axis=1), scores[:, 2:] - scores[:, :-2]
    by_differences = (far**2).mean(axis=1) / np.maximum((near**2).mean(axis=1), 1e-12) - 1
    corrected: Array = np.where(phi - by_differences > 4 / np.sqrt(n), by_differences, phi)
    return corrected


def _upper_phi(phi: Array, n: int) -> Array:
    """Return the correlation that a threshold has to allow for, 0 to 0.9, by the estimate from n points."""
    base: Array = np.clip(phi, 0.0, 0.9)
    error = np.sqrt((1 - base**2) / n)
    upper: Array = 0.25 * (30 / n) ** 3.5 + (base + 1.15 * error) * np.clip((phi - 0.1) / 0.2, 0.0, 1.0)
    return np.minimum(upper, 0.9)


def p_value(found: Scan, n: int) -> Array:
    """Return the probability of each statistic, or a larger one, in n points without a step."""
    sizes, phis, table = _null_table()
    at = np.clip(np.interp(np.log(n), np.log(sizes), np.arange(len(sizes))), 0, len(sizes) - 1)
    low = int(at)
    parts = [_log_p(table[row], phis, found) for row in (low, min(low + 1, len(sizes) - 1))]
    p: Array = np.exp(parts[0] * (1 - at + low) + parts[1] * (at - low))
    return p


def _log_p(rows: Array, phis: Array, found: Scan) -> Array:
    """Return log p of each statistic for one number of points. rows: for each phi, quantiles and the tail's mean."""
    logs = np.empty((len(phis), len(found.statistic)))
    for number, (*quantiles, tail) in enumerate(rows):
        logs[number] = np.interp(found.statistic, [0.0, *quantiles], _LEVELS)
        logs[number] -= np.maximum(found.statistic - quantiles[-1], 0.0) / tail
    at = np.interp(found.phi, phis, np.arange(len(phis)))
    low = np.minimum(at.astype(int), len(phis) - 2)
    column = np.arange(len(at))
    result: Array = logs[low, column] * (1 - at + low) + logs[low + 1, column] * (at - low)
    return result


@cache
def _null_table() -> tuple[Array, Array, Array]:
    """Return the numbers of points, the correlations, and (points, correlation, quantiles and the tail's mean)."""
    with Path(__file__).with_name("null.csv").open(newline="") as file:
        rows = np.array([[float(cell) for cell in row] for row in list(csv.reader(file))[1:]])
    sizes, phis = np.unique(rows[:, 0]), np.unique(rows[:, 1])
    return sizes, phis, rows[:, 2:].reshape(len(sizes), len(phis), -1)
