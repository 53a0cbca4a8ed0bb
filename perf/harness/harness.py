"""Run the cases of a benchmark in turn, and print each as a JSON line: the ratio of medians, with its range."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import msgspec

from pitools.core.record import Record


class Case(Record, frozen=True, kw_only=True, tag="pit.bench/1"):
    """One comparison. ratio: the peer's median time ÷ ours, above 1 if ours is better; min and max over all rounds.

    target: the least ratio that is good enough. n: rounds, ours and the peer's in turn. command: the peer's, if its
    options matter.
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
    """Return the seconds of each run in each round: A B A B, after one round that is not counted.

    around_each: run → a context in which it runs, entered and left outside its time. rotate: begin each round with
    another run, and reverse every other round, so that no run always follows the same one.
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
    """Return a case, from the seconds of both sides, measured in one run."""
    pairs = [theirs / ours for ours, theirs in zip(ours_s, peers_s, strict=True)]
    return _case(case, peer, version, statistics.median(peers_s) / statistics.median(ours_s), pairs, target, command)


def from_ratios(
    case: str, peer: str, version: str, ratios: Sequence[float], *, target: float, command: str = ""
) -> Case:
    """Return a case of which each round gave a ratio itself, such as a limit over the amount used."""
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
    """Print every case, and return the exit code: 1 if one falls short."""
    for case in cases:
        print(msgspec.json.encode(case).decode(), flush=True)
    return int(any(itertools.filterfalse(lambda case: case.ok, cases)))
