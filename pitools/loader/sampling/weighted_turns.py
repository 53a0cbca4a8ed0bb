"""Turns in proportion to weights: whose turn is at a position, and which of its own turns that is, without counting.

    weights 0.5, 0.3, 0.2 ──▶ parts 5, 3, 2 of a cycle of 10 ──Tijdeman──▶ 0 1 0 2 0 1 0 2 1 0, again and again

Before any position, each has had its share of the turns to within less than one, and so within less than two between
any two positions; for three and more, one between any two is not possible. Turn p of a cycle is a place in a table of
at most 65,536, so it costs the same anywhere. Source: Tijdeman, The chairman assignment problem (1980).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from pitools.core.errors import ConfigError
from pitools.loader.sampling.shuffle import Indices

# Weights that are not small fractions are taken to the nearest of so many parts.
MAX_CYCLE = 1 << 16


class TurnCycle(NamedTuple):
    """One cycle. member: (cycle,) whose turn it is. index_within: (cycle,) which of its own there. parts: how many each
    has."""

    member: Indices
    index_within: Indices
    parts: Indices

    def locate(self, places: Indices, cycles: Indices) -> tuple[Indices, Indices]:
        """(n,) places in (n,) cycles → whose turn it is, and which of all its own turns, from 0."""
        whose = self.member[places]
        return whose, cycles * self.parts[whose] + self.index_within[places]


def integer_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Whole numbers in the proportion of the weights: exactly where few are enough, else to the nearest of 65,536.

    Raises ConfigError for weights that are no proportion, or one too small to ever have a turn.
    """
    if not weights or not all(math.isfinite(weight) and weight > 0 for weight in weights):
        raise ConfigError(f"weights {list(weights)}", where="weights", hint="give one above 0 for each")
    exact = [Fraction(repr(float(weight))) for weight in weights]
    common = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * common) for weight in exact]
    whole = [number // math.gcd(*whole) for number in whole]
    if sum(whole) <= MAX_CYCLE:
        return tuple(whole)
    shares = [weight * MAX_CYCLE / sum(exact) for weight in exact]
    found = [int(share) for share in shares]
    rest = sorted(range(len(found)), key=lambda i: (found[i] - shares[i], i))
    for i in rest[: MAX_CYCLE - sum(found)]:
        found[i] += 1
    if 0 in found:
        what = f"weight {weights[found.index(0)]:g} is less than 1 in {MAX_CYCLE} of all"
        raise ConfigError(what, where="weights", hint="leave that one out, or give it more")
    return tuple(found)


@lru_cache(maxsize=8)
def make_cycle(counts: tuple[int, ...]) -> TurnCycle:
    """A cycle in which i has counts[i] turns, spread evenly.

    Turn j (from 0) of i may be had from (j + d) / weight on, and must be by (j + 1 - d) / weight, with d = 1 / (2k - 2)
    of k: the one that must be soonest goes first. Times are in whole numbers, so that nothing is rounded.
    """
    cycle, unit = sum(counts), max(1, 2 * len(counts) - 2)
    # In units of 1 / (unit · counts[i]): from (j · unit + 1) · cycle, by ((j + 1) · unit - 1) · cycle.
    waiting = [(-(-cycle // (unit * count)), i, 0) for i, count in enumerate(counts)]
    heapq.heapify(waiting)
    ready: list[tuple[Fraction, int, int]] = []
    whose, nth = np.empty(cycle, np.int64), np.empty(cycle, np.int64)
    for place in range(cycle):
        while waiting and waiting[0][0] <= place + 1:
            _, i, j = heapq.heappop(waiting)
            heapq.heappush(ready, (Fraction(((j + 1) * unit - 1) * cycle, counts[i]), i, j))
        _, i, j = heapq.heappop(ready)
        whose[place], nth[place] = i, j
        if j + 1 < counts[i]:
            heapq.heappush(waiting, (-(-((j + 1) * unit + 1) * cycle // (unit * counts[i])), i, j + 1))
    return TurnCycle(whose, nth, np.array(counts, np.int64))
