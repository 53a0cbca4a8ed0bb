"""What every benchmark here shares: cases run in turn, ratios of medians with their range, one JSON line a case."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import msgspec

from pitools.core.record import Record


class Case(Record, frozen=True, kw_only=True, tag="pit.bench/1"):
    """One comparison. ratio: peer's median time ÷ ours, so above 1 means we are better; min and max over all pairs.

    target: the least ratio that is good enough. n: rounds, ours and the peer's in turn. command: the peer's, where its
    options are worth telling.
    """

    case: str
    peer: str
    peer_version: str
    ratio: float
    ratio_min: float
    ratio_max: float
    n: int
    target: float
    ok: bool
    command: str = ""


def interleave(
    rounds: int,
    runs: Mapping[str, Callable[[], object]],
    *,
    rotate: bool = False,
    around_each: Callable[[str], AbstractContextManager[object]] = lambda _: nullcontext(),
) -> dict[str, list[float]]:
    """Seconds of each run in each round: A B A B, after one round that is not counted.

    setting(name): what a run happens in, made and undone outside its time. rotate: each round begins with another run,
    and every other round goes backwards, so that none has always the same one before it.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name in _order(list(runs), number if rotate else 0):
            with around_each(name):
                began = time.perf_counter()
                runs[name]()
                took = time.perf_counter() - began
            if number:
                times[name].append(took)
    return times


def _order(names: list[str], number: int) -> list[str]:
    first = number % len(names)
    turned = names[first:] + names[:first]
    return turned[::-1] if number % 2 else turned


def compare(
    case: str,
    peer: str,
    version: str,
    ours_s: Sequence[float],
    peers_s: Sequence[float],
    *,
    target: float,
    command: str = "",
) -> Case:
    """The case's record, from seconds of both sides measured in one run."""
    pairs = [theirs / ours for ours, theirs in zip(ours_s, peers_s, strict=True)]
    return _case(case, peer, version, statistics.median(peers_s) / statistics.median(ours_s), pairs, target, command)


def from_ratios(
    case: str, peer: str, version: str, ratios: Sequence[float], *, target: float, command: str = ""
) -> Case:
    """The case's record where each round gave a ratio itself, such as a limit over what was used."""
    return _case(case, peer, version, statistics.median(ratios), ratios, target, command)


def _case(
    case: str, peer: str, version: str, ratio: float, ratios: Sequence[float], target: float, command: str
) -> Case:
    return Case(
        case=case,
        peer=peer,
        peer_version=version,
        ratio=round(ratio, 3),
        ratio_min=round(min(ratios), 3),
        ratio_max=round(max(ratios), 3),
        n=len(ratios),
        target=round(target, 4),
        ok=ratio >= target,
        command=command,
    )


def report(cases: Sequence[Case]) -> int:
    """Print every case; the exit code is 1 when one falls short."""
    for case in cases:
        print(msgspec.json.encode(case).decode(), flush=True)
    return int(any(itertools.filterfalse(lambda case: case.ok, cases)))
