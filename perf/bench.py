"""What every benchmark here shares: cases run in turn, ratios of medians with their range, one JSON line a case."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from pitools.core.record import Record


class Case(Record, frozen=True, kw_only=True, tag="pit.bench/1"):
    """One comparison. ratio: peer's median time ÷ ours, so above 1 means we are better; min and max over all pairs.

    reach: the least ratio that is good enough. n: rounds, ours and the peer's in turn.
    """

    case: str
    peer: str
    peer_version: str
    ratio: float
    ratio_min: float
    ratio_max: float
    n: int
    reach: float
    ok: bool


def in_turn(rounds: int, runs: Mapping[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Seconds of each run in each round: A B A B, after one round that is not counted."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            if number:
                times[name].append(time.perf_counter() - began)
    return times


def compare(
    case: str, peer: str, version: str, ours_s: Sequence[float], peers_s: Sequence[float], *, reach: float
) -> Case:
    """The case's record, from seconds of both sides measured in one run."""
    ratio = statistics.median(peers_s) / statistics.median(ours_s)
    pairs = [theirs / ours for ours, theirs in zip(ours_s, peers_s, strict=True)]
    return Case(
        case=case, peer=peer, peer_version=version, ratio=round(ratio, 3), ratio_min=round(min(pairs), 3),
        ratio_max=round(max(pairs), 3), n=len(pairs), reach=reach, ok=ratio >= reach,
    )  # fmt: skip


def report(cases: Sequence[Case]) -> int:
    """Print every case; the exit code is 1 when one falls short."""
    for case in cases:
        print(msgspec.json.encode(case).decode(), flush=True)
    return int(any(itertools.filterfalse(lambda case: case.ok, cases)))
