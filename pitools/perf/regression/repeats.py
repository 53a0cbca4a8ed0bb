"""Run two variants in turn, A B A B, until the difference of their few measurements is known or enough is tried."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from pitools.core.errors import DataError
from pitools.perf.statistics import from_normal

PAIRS = (2, 3, 4)  # after which the difference is judged
_Z = 2.394  # of a two-sided interval that holds the truth in 95 of 100 cases over all of PAIRS (Bonferroni)


class Effect(NamedTuple):
    """B ÷ A - 1, and its 95 % interval over all looks."""

    effect: float
    low: float
    high: float


def effect_of_few(a: Sequence[float], b: Sequence[float], *, is_b_together: bool = False) -> Effect:
    """Return the effect of few independent positive measurements, such as one of each run.

    is_b_together: whether all of B are of one night and its nodes, and each of A of another: what nights differ by,
    which A's deviation has, is then in B's mean, however often it was measured.
    The interval is Student's for the means of logarithms with one variance; its quantile is by Wallace's approximation,
    which is a few percent too wide for few runs. Raises DataError for fewer than 2 a side, or a value that is not
    positive.
    """
    if min(len(a), len(b)) < 2 or not all(math.isfinite(value) and value > 0 for value in (*a, *b)):
        raise DataError(f"{len(a)} and {len(b)} measurements (expected at least 2 a side, all positive)")
    first, second = np.log(a), np.log(b)
    free = len(first) + len(second) - 2
    variance = (first.var() * len(first) + second.var() * len(second)) / free
    error = variance * (1 / len(first) + 1 / len(second))
    if is_b_together:
        free = len(first) - 1
        error = first.var(ddof=1) * (1 + 1 / len(first)) + second.var(ddof=1) / len(second)
    half = from_normal(_Z, free) * math.sqrt(error)
    middle = float(second.mean() - first.mean())
    return Effect(math.expm1(middle), math.expm1(middle - half), math.expm1(middle + half))


def alternate(
    measure: Callable[[bool], float], is_decided: Callable[[Effect], bool], known: Sequence[float] = ()
) -> tuple[list[float], list[float], Effect]:
    """Measure A, B, A, B, and up to two pairs more until the effect decides; return both sides' values, and it.

    measure: returns one measurement, of B if true. known: at least two of A, each of another night, which then is not
    measured.
    """
    a, b = list(known), list[float]()
    while True:
        if not known:
            a.append(measure(False))
        b.append(measure(True))
        if len(b) in PAIRS:
            effect = effect_of_few(a, b, is_b_together=bool(known))
            if is_decided(effect) or len(b) == PAIRS[-1]:
                return a, b, effect
