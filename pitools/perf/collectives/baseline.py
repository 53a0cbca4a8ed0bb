"""Say whether collectives are as fast as they were: against earlier results at the same kind of placement of a site."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import exp, log, sqrt
from statistics import NormalDist
from typing import NamedTuple

import msgspec
import numpy as np

from pitools.perf.collectives.run import CollectiveResult
from pitools.perf.regression.store import Point, Series
from pitools.perf.statistics import false_discovery_rates, from_normal, to_normal

Baseline = Mapping[tuple[str, str], Sequence[float]]
"""Earlier bus bandwidths by device and measure, oldest first."""

MIN_RUNS = 8
_MAX_RUNS = 30  # the newest
_FALSE_RATE = 0.001  # of healthy placements: a run has up to four of them
_LOW = 0.01
_FLOOR = 0.1  # of the median: less is no finding, however little the results vary
_REMEASURES = 3  # a disturbance passes; a loss stays


def measure_name(result: CollectiveResult) -> str:
    """Return the name of what a result measures, which together with its device is its key at a site and partition."""
    place = f"{result.placement}-{result.n_nodes}x{result.ranks // result.n_nodes}-{result.leaves}"
    return f"{result.framework}/{result.operation}/{place}/{result.bytes}/busbw_bytes_per_s"


def to_points(results: Iterable[CollectiveResult], *, site: str, partition: str, t: str, source: str) -> list[Point]:
    """Return the points of results to keep: those that are right, and not slow."""
    return [
        Point(
            measure=measure_name(each),
            value=each.busbw_bytes_per_s,
            t=t,
            site=site,
            partition=partition,
            device=each.device,
            source=source,
            software=each.software,
            better="higher",
        )
        for each in results
        if each.verdict == "ok" and each.busbw_bytes_per_s
    ]


def to_baseline(series: Iterable[Series], site: str, partition: str) -> Baseline:
    """Return the baseline of a site and partition, from all series of a store."""
    return {
        (each.key[2], each.key[3]): [point.value for point in each.points[-_MAX_RUNS:]]
        for each in series
        if each.key[:2] == (site, partition)
    }


class Normal(NamedTuple):
    """What is normal: earlier results, as logarithms, by Student's distribution around their median."""

    center: float
    scale: float
    degrees: float

    def low_limit(self) -> float:
        """Return what 99 of 100 healthy results are not below."""
        return exp(self.center - self.scale * from_normal(NormalDist().inv_cdf(1 - _LOW), self.degrees))

    def p_value(self, value: float) -> float:
        """Return how probable a healthy result so low is; 1 for a loss that is no finding, however little they vary."""
        t = (self.center - log(value)) / max(self.scale, 1e-9)
        if log(value) > self.center + log(1 - _FLOOR):
            return 1.0
        return NormalDist().cdf(-float(to_normal(t, self.degrees)))


def fit_normal(values: Sequence[float]) -> Normal | None:
    """Return what is normal after earlier results, all positive; None after fewer than MIN_RUNS.

    The spread is Rousseeuw and Croux's Qn, a robust one that needs few values. Scale and degrees of freedom are those
    that simulated Gaussian values need: tail probabilities down to 1e-4 are right within a factor of 3.
    """
    n = len(values)
    if n < MIN_RUNS:
        return None
    logs = np.log(values)
    first, second = np.triu_indices(n, 1)
    half = n // 2 + 1
    spread = float(np.sort(np.abs(logs[first] - logs[second]))[half * (half - 1) // 2 - 1])
    spread *= 2.2219 * n / (n + (1.4 if n % 2 else 3.8))
    return Normal(float(np.median(logs)), spread * sqrt(1 + 1.57 / n), 0.75 * n - 1)


def judge_results(results: Sequence[CollectiveResult], baseline: Baseline) -> list[CollectiveResult]:
    """Return the results of a placement with their share of the baseline, and whether they are slow.

    They are judged together, by Benjamini and Hochberg's procedure: of many healthy results, one is low by chance.
    Without a baseline none is slow.
    """
    normals = [fit_normal(baseline.get((each.device, measure_name(each)), ())) for each in results]
    judged = []
    for each, normal in zip(results, normals, strict=True):
        changes: dict[str, float] = {}
        if normal and each.busbw_bytes_per_s:
            share, p = each.busbw_bytes_per_s / exp(normal.center), normal.p_value(each.busbw_bytes_per_s)
            changes = {"of_baseline": round(share, 3), "low_bytes_per_s": normal.low_limit(), "p": float(f"{p:.3g}")}
        judged.append(msgspec.structs.replace(each, **changes))
    p_values = [each.p for each in judged if each.p is not None]
    low = [p for p, q in zip(p_values, false_discovery_rates(p_values), strict=True) if q <= _FALSE_RATE]
    return [
        msgspec.structs.replace(each, verdict="slow", problem=f"{each.of_baseline:.0%} of the baseline")
        if each.verdict == "ok" and each.p in low
        else each
        for each in judged
    ]


def measure_and_judge(measure: Callable[[], list[CollectiveResult]], baseline: Baseline) -> list[CollectiveResult]:
    """Measure, and where a result is slow, at most three times again: it is slow if the fastest is.

    A result that is wrong, or a failure, is returned at once.
    """
    measured = measure()
    results = judge_results(measured, baseline)
    for _ in range(_REMEASURES):
        if not {each.verdict for each in results} <= {"ok", "slow"} or all(each.verdict == "ok" for each in results):
            break
        again = measure()
        if any(each.verdict != "ok" for each in again):
            return judge_results(again, baseline)
        measured = [min(pair, key=lambda each: each.wall_s) for pair in zip(measured, again, strict=True)]
        results = judge_results(measured, baseline)
    return results
