"""Compare what nodes measured with their own past and with their peers, so that a slow node is found, a slow day not.

Every measure is a rate: more is better. A value is low if it is below the median by more than the values vary, and by
more than a floor. Peers are the nodes of the same run with the same hardware. Of the past, only results of the same
hardware count, and none that were slow; where all nodes are slower than they were, that share is forgiven.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from pitools.core.record import Record

Verdict = Literal["ok", "slow", "wrong", "failed", "undecided"]

_MIN_PAST, _MAX_PAST = 5, 20
_MIN_PEERS = 4
_FLOOR = 0.15  # of the median: less is no finding, however little the values vary
_SPREADS = 6 * 1.4826  # median absolute deviations; the factor makes one of them a standard deviation
_ALWAYS_LOW = 0.25  # of the median, however much the values vary


class BenchResult(Record, frozen=True, kw_only=True, tag="pit.node-bench/1"):
    """One measure of a node, or of a group of nodes that fails only together: then node is a host list.

    value: bytes, operations or such per second, as the measure's name says; None if there is none. of_peers, of_past:
    value as a share of their median; None with too few. wrong: data read or reduced were not those written.
    """

    node: str
    measure: str
    value: float | None
    verdict: Verdict = "ok"
    of_peers: float | None = None
    of_past: float | None = None
    problem: str = ""
    hardware: str = ""
    measured_at: str = ""


def is_low(value: float, values: Sequence[float], *, min_values: int, floor: float = _FLOOR) -> bool:
    """Return whether a value is far below the median of others, of which fewer than half may be low themselves.

    values: with or without this one. min_values: with fewer, nothing is low. floor: least share below the median.
    """
    if len(values) < min_values:
        return False
    middle = statistics.median_high(values)
    spread = statistics.median_low([abs(each - middle) for each in values])
    limit = middle - max(_SPREADS * spread, floor * middle)
    return value < max(limit, _ALWAYS_LOW * middle)


def compare(
    results: Sequence[BenchResult], past: Iterable[BenchResult], *, is_judged: bool = False
) -> list[BenchResult]:
    """Return the results of a run with shares and verdicts. past: earlier results of these nodes, oldest first.

    is_judged: verdicts stay as they are; those of group tests come of two tests of a node.
    """
    values: dict[tuple[str, str], list[float]] = {}
    for each in results:
        if each.value is not None and each.verdict == "ok":
            values.setdefault((each.measure, each.hardware), []).append(each.value)
    past_values: dict[tuple[str, str, str], list[float]] = {}
    for each in past:
        if each.value is not None and each.verdict == "ok":
            past_values.setdefault((each.node, each.measure, each.hardware), []).append(each.value)
    own_past = {key: each[-_MAX_PAST:] for key, each in past_values.items() if len(each) >= _MIN_PAST}
    day = _day_factors(results, own_past)
    compared = [_judge(each, values, own_past, day) for each in results]
    if is_judged:
        pairs = zip(compared, results, strict=True)
        return [msgspec.structs.replace(after, verdict=before.verdict) for after, before in pairs]
    return compared


def _day_factors(
    results: Sequence[BenchResult], own_past: Mapping[tuple[str, str, str], Sequence[float]]
) -> dict[tuple[str, str], float]:
    """Return by measure and hardware how fast nodes are today, as a share of their past: at most 1."""
    shares: dict[tuple[str, str], list[float]] = {}
    for each in results:
        before = own_past.get((each.node, each.measure, each.hardware))
        if before and each.value is not None:
            middle = statistics.median(before)
            shares.setdefault((each.measure, each.hardware), []).append(each.value / middle if middle else 1.0)
    return {key: min(1.0, statistics.median(each)) for key, each in shares.items() if len(each) >= _MIN_PEERS}


def _judge(
    result: BenchResult,
    values: Mapping[tuple[str, str], Sequence[float]],
    own_past: Mapping[tuple[str, str, str], Sequence[float]],
    day: Mapping[tuple[str, str], float],
) -> BenchResult:
    if result.value is None or result.verdict != "ok":
        return result
    key = (result.measure, result.hardware)
    peers = values[key] if len(values[key]) >= _MIN_PEERS else []
    before = own_past.get((result.node, *key), [])
    factor = max(day.get(key, 1.0), 1e-9)
    is_slow = is_low(result.value, peers, min_values=_MIN_PEERS)
    is_slow |= is_low(result.value / factor, before, min_values=_MIN_PAST)
    return msgspec.structs.replace(
        result,
        of_peers=_share(result.value, peers),
        of_past=_share(result.value, before),
        verdict="slow" if is_slow else "ok",
    )


def _share(value: float, values: Sequence[float]) -> float | None:
    middle = statistics.median_high(values) if values else 0.0
    return round(value / middle, 3) if middle else None
