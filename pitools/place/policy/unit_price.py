"""The price of a pool's units: what other jobs would gain from them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from pitools.place.types import PoolState

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[np.float64]]


def unit_prices(pools: Sequence[PoolState]) -> Array:
    """Return for each pool the run time, as a share of a job's own, that others lose by each unit that the job holds.

    A pool that is twice as fast saves a small job as much time as a large one, for fewer units: the mean completion is
    least if the smallest of the running jobs fill the fastest pool, the next the second, and so on. The jobs where one
    pool ends and the next begins are as well off in both; so, from the slowest pool upward, they set the prices. The
    slowest pool is free of charge, and so is each one that would have room for all running jobs.
    """
    import numpy as np

    order = sorted(range(len(pools)), key=lambda number: (pools[number].speed, number))
    price = np.zeros(len(pools))
    running = [(float(units), units * pool.speed) for pool in pools for _, units in pool.running]
    if not running:
        return price
    units, rate = np.array(sorted(running)).T
    used = np.cumsum(rate)
    room = {number: pools[number].units * pools[number].speed for number in order}
    for slower, faster in pairwise(order):
        ratio = pools[faster].speed / pools[slower].speed
        filled = sum(room[number] for number in order[order.index(faster) :])
        marginal = int(np.searchsorted(used, filled))
        if marginal == len(units):
            price[faster] = ratio * price[slower]
        else:
            size = units[marginal]
            price[faster] = (ratio * (1.0 + size * price[slower]) - 1.0) / size
    return price
