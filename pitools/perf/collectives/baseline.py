"""Say whether collectives are as fast as they were: against earlier results at the same kind of placement of a site."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import exp, log

import msgspec
import numpy as np

from pitools.perf.collectives.run import CollectiveResult
from pitools.perf.regression.store import Point, Series

Baseline = Mapping[tuple[str, str], Sequence[float]]
"""Earlier bus bandwidths by device and measure, oldest first."""

MIN_RUNS = 8
_MAX_RUNS = 30  # the newest
_SPREADS = 4.0  # below the median: fewer than 1 of 100 healthy results are, of 8 earlier ones and more
_FLOOR = 0.1  # of the median: less is no finding, however little the results vary
_REMEASURES = 2  # a disturbance passes; a loss stays


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


def low_limit(values: Sequence[float]) -> float | None:
    """Return what a healthy result is not below; None with fewer than MIN_RUNS earlier ones, all positive.

    The spread is Rousseeuw and Croux's Qn of their logarithms, a robust one that needs few values.
    """
    n = len(values)
    if n < MIN_RUNS:
        return None
    logs = np.log(values)
    first, second = np.triu_indices(n, 1)
    half = n // 2 + 1
    spread = float(np.sort(np.abs(logs[first] - logs[second]))[half * (half - 1) // 2 - 1])
    spread *= 2.2219 * n / (n + (1.4 if n % 2 else 3.8))
    return exp(float(np.median(logs)) - max(_SPREADS * spread, -log(1 - _FLOOR)))


def judge(results: Iterable[CollectiveResult], baseline: Baseline) -> list[CollectiveResult]:
    """Return results with their share of the baseline, and whether they are slow. Without a baseline none is."""
    judged = []
    for each in results:
        earlier = baseline.get((each.device, measure_name(each)), ())
        low = low_limit(earlier)
        if low is not None and each.busbw_bytes_per_s:
            share = each.busbw_bytes_per_s / float(np.median(earlier))
            is_slow = each.verdict == "ok" and each.busbw_bytes_per_s < low
            changes = {"verdict": "slow", "problem": f"{share:.0%} of the baseline"} if is_slow else {}
            each = msgspec.structs.replace(each, of_baseline=round(share, 3), low_bytes_per_s=low, **changes)
        judged.append(each)
    return judged


def measure_and_judge(measure: Callable[[], list[CollectiveResult]], baseline: Baseline) -> list[CollectiveResult]:
    """Measure, and where a result is slow, at most twice again: it is slow if it is each time.

    Of each operation and size the fastest result stays; but a result that is wrong, or a failure, is returned at once.
    """
    results = judge(measure(), baseline)
    for _ in range(_REMEASURES):
        if not {each.verdict for each in results} <= {"ok", "slow"} or all(each.verdict == "ok" for each in results):
            break
        again = judge(measure(), baseline)
        if not {each.verdict for each in again} <= {"ok", "slow"}:
            return again
        results = [min(pair, key=lambda each: each.wall_s) for pair in zip(results, again, strict=True)]
    return results
