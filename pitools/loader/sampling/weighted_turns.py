"""Assign positions to members in proportion to weights: a weighted round-robin in constant time per position.

    weights 0.5, 0.3, 0.2 ──▶ parts 5, 3, 2 of a cycle of 10 ──Tijdeman──▶ 0 1 0 2 0 1 0 2 1 0, repeated

Up to any position, each member's turns differ from its share by less than one, and between any two positions by less
than two (less than one there is impossible for three members or more). A turn is looked up in a table of at most 65,536
rows. Source: Tijdeman, The chairman assignment problem (1980).
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

# Weights that need a longer cycle are rounded to this many parts.
MAX_CYCLE = 1 << 16


class TurnCycle(NamedTuple):
    """A cycle of turns. member: (cycle,) the member of each turn. index_within: (cycle,) the turn's number among those
    of its member in the cycle. parts: (members,) turns of each member in the cycle."""

    member: Indices
    index_within: Indices
    parts: Indices

    def locate(self, places: Indices, cycles: Indices) -> tuple[Indices, Indices]:
        """Map (n,) turns of (n,) cycles to members, and to the turns' numbers among all of the member's, from 0."""
        members = self.member[places]
        return members, cycles * self.parts[members] + self.index_within[places]


def integer_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Return integers in proportion to the weights: exact if their sum is at most 65,536, else rounded to that sum.

    Raises ConfigError for no weights, a weight that is not positive and finite, or one too small for a turn.
    """
    if not weights or not all(math.isfinite(weight) and weight > 0 for weight in weights):
        raise ConfigError(f"weights: expected positive finite numbers, got {list(weights)}", where="weights")
    exact = [Fraction(repr(float(weight))) for weight in weights]
    common = math.lcm(*(weight.denominator for weight in exact))
    integers = [int(weight * common) for weight in exact]
    integers = [number // math.gcd(*integers) for number in integers]
    if sum(integers) <= MAX_CYCLE:
        return tuple(integers)
    shares = [weight * MAX_CYCLE / sum(exact) for weight in exact]
    rounded = [int(share) for share in shares]
    rest = sorted(range(len(rounded)), key=lambda i: (rounded[i] - shares[i], i))
    for i in rest[: MAX_CYCLE - sum(rounded)]:
        rounded[i] += 1
    if 0 in rounded:
        message = f"weight {weights[rounded.index(0)]:g}: too small (expected 1/{MAX_CYCLE} of the sum or more)"
        raise ConfigError(message, where="weights", hint="omit that dataset, or increase its weight")
    return tuple(rounded)


@lru_cache(maxsize=8)
def make_cycle(counts: tuple[int, ...]) -> TurnCycle:
    """Return a cycle in which member i has counts[i] evenly spread turns.

    Turn j (from 0) of a member is released at (j + d) / weight and due at (j + 1 - d) / weight, with d = 1 / (2k - 2)
    for k members. The released turn with the earliest due time is next. Times are fractions of integers: exact.
    """
    cycle, unit = sum(counts), max(1, 2 * len(counts) - 2)
    # In units of 1 / (unit · counts[i]): release (j · unit + 1) · cycle, due ((j + 1) · unit - 1) · cycle.
    waiting = [(-(-cycle // (unit * count)), i, 0) for i, count in enumerate(counts)]
    heapq.heapify(waiting)
    ready: list[tuple[Fraction, int, int]] = []
    members, index_within = np.empty(cycle, np.int64), np.empty(cycle, np.int64)
    for place in range(cycle):
        while waiting and waiting[0][0] <= place + 1:
            _, i, j = heapq.heappop(waiting)
            heapq.heappush(ready, (Fraction(((j + 1) * unit - 1) * cycle, counts[i]), i, j))
        _, i, j = heapq.heappop(ready)
        members[place], index_within[place] = i, j
        if j + 1 < counts[i]:
            heapq.heappush(waiting, (-(-((j + 1) * unit + 1) * cycle // (unit * counts[i])), i, j + 1))
    return TurnCycle(members, index_within, np.array(counts, np.int64))
