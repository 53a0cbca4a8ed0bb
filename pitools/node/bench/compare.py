"""Compare what nodes measured with their own past and with their peers, so that a slow node is found, a slow day not.

Every measure is a rate: more is better. A value is low if it is below the median by more than the values vary, and by
more than a floor. Peers are the nodes of the same run with the same hardware. Of the past, only results of the same
hardware count, and none that were slow. Where there are peers, the node's share of their median is compared with its
shares of the past, as a day on which all are slow changes no share. What slows a node for seconds is no fault either:
nodes that are slow are measured again.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
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

    value: bytes, operations or such per second, as the measure's name says; None if there is none. of_peers: value as a
    share of their median. of_past: value, or of_peers where known, as a share of its past median. Either is None with
    too few. wrong: data read or reduced were not those written.
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
    peers: dict[tuple[str, str], list[float]] = {}
    own_past: dict[tuple[str, str, str], list[BenchResult]] = {}
    for each in filter(_is_good, results):
        peers.setdefault((each.measure, each.hardware), []).append(each.value or 0.0)
    for each in filter(_is_good, past):
        own_past.setdefault((each.node, each.measure, each.hardware), []).append(each)
    return [
        _judge(
            each,
            peers[each.measure, each.hardware],
            own_past.get((each.node, each.measure, each.hardware), [])[-_MAX_PAST:],
            is_judged=is_judged,
        )
        if _is_good(each)
        else each
        for each in results
    ]


def compare_twice(
    results: Sequence[BenchResult],
    past: Sequence[BenchResult],
    measure_again: Callable[[list[str]], Iterable[BenchResult]],
) -> list[BenchResult]:
    """Return the results of a run as `compare` does, with the better ones of nodes that are slow and measured again."""
    compared = compare(results, past)
    slow = sorted({each.node for each in compared if each.verdict == "slow"})
    if not slow:
        return compared
    again = {(each.node, each.measure): each for each in measure_again(slow)}
    best = [_better(each, again.pop((each.node, each.measure), each)) for each in results]
    return compare([*best, *again.values()], past)


def _better(first: BenchResult, second: BenchResult) -> BenchResult:
    if not (_is_good(first) and _is_good(second)):
        return first if not _is_good(first) else second
    return max(first, second, key=lambda each: each.value or 0.0)


def _is_good(result: BenchResult) -> bool:
    return result.value is not None and result.verdict == "ok"


def _judge(result: BenchResult, peers: Sequence[float], past: Sequence[BenchResult], *, is_judged: bool) -> BenchResult:
    value = result.value or 0.0
    of_peers = _share(value, peers, _MIN_PEERS)
    if of_peers is None:
        now, before = value, [each.value or 0.0 for each in past]
    else:  # what the day does to all is in both, and cancels
        now, before = of_peers, [each.of_peers for each in past if each.of_peers is not None]
    is_slow = is_low(value, peers, min_values=_MIN_PEERS) or is_low(now, before, min_values=_MIN_PAST)
    return msgspec.structs.replace(
        result,
        of_peers=of_peers,
        of_past=_share(now, before, _MIN_PAST),
        verdict="slow" if is_slow and not is_judged else "ok",
    )


def _share(value: float, values: Sequence[float], min_values: int) -> float | None:
    middle = statistics.median_high(values) if len(values) >= min_values else 0.0
    return round(value / middle, 3) if middle else None
