"""What the pools have room for, now and later, while one decision is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, Any

from pitools.place.types import PoolState

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[np.float64]]

OVERRUN_S = 60.0  # a job that should have ended by now is expected to within this


class PoolCapacity:
    """Free units of each pool, when running jobs give back theirs, and one reservation a pool.

    names: the pools that answer, in order; a pool's column is its place there. shadow_s: when what is reserved is
    expected to start, inf without a reservation; until then others may use its units, and beyond it only `spare` units.
    claim: the units reserved. waiting: our tickets in the pool's queue.
    """

    def __init__(self, now_s: float, pools: Mapping[str, PoolState], limit_usage: float) -> None:
        import numpy as np

        self.now_s = now_s
        self.names = [name for name in sorted(pools) if not pools[name].is_unreachable]
        self.pools = [pools[name] for name in self.names]
        self.size = np.array([float(pool.units) for pool in self.pools])
        self.free = np.array([float(pool.free) for pool in self.pools])
        self.shadow_s = np.full(len(self.names), inf)
        self.spare = np.full(len(self.names), inf)
        self.claim = np.zeros(len(self.names))
        self.waiting = [0] * len(self.names)
        profiles = [self._profile(pool, limit_usage) for pool in self.pools]
        self._ends, self._back = [ends for ends, _ in profiles], [back for _, back in profiles]

    def _profile(self, pool: PoolState, used: float) -> tuple[Array, Array]:
        """When something is expected to end, ascending, `now` first and `never` last; the units given back by then.

        What waits there of others is put before anything of ours, so it takes the first units that come free.
        """
        import numpy as np

        ends = np.array([end_s for end_s, _ in pool.running])
        back = np.array([float(units) for _, units in pool.running])
        ends = self.now_s + np.maximum(ends - self.now_s, OVERRUN_S) * used
        back = np.maximum(np.cumsum(back) - pool.others_pending, 0.0)
        return np.concatenate([[self.now_s], ends, [inf]]), np.concatenate([[0.0], back])

    def start_s(self, pool: int, units: Array, limit_s: Array) -> Array:
        """The expected moment, if nothing else came, at which a pool has so many units, beside what is reserved."""
        import numpy as np

        asked = units + np.where(units > self.spare[pool], self.claim[pool], 0.0)
        at = np.searchsorted(self._back[pool] + self.free[pool], asked)
        return self.opens_s(pool, self._ends[pool][at], limit_s)

    def opens_s(self, pool: int, start_s: Array, limit_s: Array) -> Array:
        """The first moments from start_s on at which jobs of these limits do not reach into a closed window."""
        import numpy as np

        for from_s, to_s in sorted(self.pools[pool].maintenance_windows):
            start_s = np.where((start_s < to_s) & (start_s + limit_s > from_s), to_s, start_s)
        return start_s

    def is_open(self, pool: int, limit_s: float) -> bool:
        """Whether a job of this limit may start there now."""
        return all(
            self.now_s >= to_s or self.now_s + limit_s <= from_s
            for from_s, to_s in self.pools[pool].maintenance_windows
        )

    def admits(self, pool: int, units: Array, end_s: Array) -> Any:
        """Which of these could start there now and not delay what is reserved, if they end as expected."""
        import numpy as np

        fits = np.logical_and(units <= self.free[pool], units <= self.size[pool])
        return fits & ((end_s <= self.shadow_s[pool]) | (units <= self.spare[pool]))

    def start_job(self, pool: int, units: float, end_s: float) -> None:
        """A job starts there."""
        self.free[pool] -= units
        if end_s > self.shadow_s[pool]:
            self.spare[pool] -= units

    def reserve(self, pool: int, units: float) -> None:
        """The pool's next free units are for this one."""
        import numpy as np

        at = float(self.start_s(pool, np.array([units]), np.zeros(1))[0])
        given = int(np.searchsorted(self._ends[pool][:-1], at, side="right")) - 1
        self.shadow_s[pool], self.claim[pool] = at, units
        self.spare[pool] = self.free[pool] + self._back[pool][given] - units

    def reserve_for(self, demands: Sequence[tuple[int, float, float]]) -> None:
        """Our tickets that wait, (pool, units, limit), oldest first: what fits is about to start, the first other
        reserves. What must wait for a window to be over holds no room until then."""
        for pool, units, limit_s in demands:
            self.waiting[pool] += 1
            if self.shadow_s[pool] < inf or not self.is_open(pool, limit_s):
                continue
            if units <= self.free[pool]:
                self.free[pool] -= units
            else:
                self.reserve(pool, units)
