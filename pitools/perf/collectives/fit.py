"""Fit the time of a collective over the size of its messages: alpha + bytes / beta."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

import numpy as np

from pitools.core.record import Record
from pitools.perf.collectives.operations import bus_factor
from pitools.perf.collectives.run import CollectiveResult


class CollectiveFit(Record, frozen=True, kw_only=True, tag="pit.perf-collective-fit/1"):
    """An operation at a placement: alpha_s is the time of the smallest message, the bandwidth that of the largest.

    residual: mean of |fitted time / measured time - 1|; large where the library changes its algorithm with the size.
    """

    framework: str
    operation: str
    placement: str
    n_nodes: int
    ranks: int
    alpha_s: float
    beta_busbw_bytes_per_s: float | None
    residual: float


def fit_alpha_beta(sizes: Iterable[float], walls_s: Iterable[float]) -> tuple[float, float, float]:
    """Return alpha in s, 1 / beta in s/byte, both at least 0, and the mean relative residual.

    The least sum of relative deviations: an outlier, or a size of another algorithm, moves it little. That sum is least
    on a line through two of the points, or on one through a point that has alpha or 1 / beta 0: all of these are tried.
    """
    size, wall_s = np.array(list(sizes), dtype=float), np.array(list(walls_s), dtype=float)
    first, second = np.triu_indices(len(size), 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        slope = (wall_s[second] - wall_s[first]) / (size[second] - size[first])
        alpha = wall_s[first] - slope * size[first]
    zeros = np.zeros_like(size)
    lines = np.array([[*alpha, *wall_s, *zeros], [*slope, *zeros, *(wall_s / size)]]).T
    lines = lines[np.isfinite(lines).all(axis=1) & (lines >= 0).all(axis=1)]
    deviations = np.abs((lines[:, :1] + lines[:, 1:] * size) / wall_s - 1)
    best = int(deviations.mean(axis=1).argmin())
    return float(lines[best, 0]), float(lines[best, 1]), float(deviations[best].mean())


def fit_results(results: Iterable[CollectiveResult]) -> list[CollectiveFit]:
    """Return the fit of each operation at each placement that was measured with three sizes or more."""
    fits = []
    for _, group in groupby(results, lambda each: (each.framework, each.placement, each.n_nodes, each.operation)):
        rows = [each for each in group if each.wall_s]
        if len(rows) < 3:
            continue
        first = rows[0]
        alpha_s, slope, residual = fit_alpha_beta(*zip(*((each.bytes, each.wall_s) for each in rows), strict=True))
        fits.append(
            CollectiveFit(
                framework=first.framework,
                operation=first.operation,
                placement=first.placement,
                n_nodes=first.n_nodes,
                ranks=first.ranks,
                alpha_s=alpha_s,
                beta_busbw_bytes_per_s=bus_factor(first.operation, first.ranks) / slope if slope else None,
                residual=residual,
            )
        )
    return fits
