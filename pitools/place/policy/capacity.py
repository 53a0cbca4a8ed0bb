"""The free and expected capacity of the pools during one decision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, Any

from pitools.place.types import PoolState

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[np.float64]]

OVERRUN_S = 60.0  # a job past its expected end is expected to end within this time


class PoolCapacity:
    """Free units of each pool, the ends of its running jobs by time limit, and at most one reservation a pool.

    names: reachable pools, sorted; a pool's column is its index in them. shadow_s: the time by which the reserved job
    can start, inf without one; jobs that may end later may use only `spare` units. claim: reserved units. waiting:
    number of our tickets in the pool's queue. others_s: the time that a pool needs for others' pending jobs.
    limit_usage: expected used share of the rest of a time limit.
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
        self.limit_usage = limit_usage
        self._started: list[list[tuple[float, float]]] = [[] for _ in self.names]
        self.others_s = np.array([pool.others_pending_s / max(pool.units, 1) for pool in self.pools])
        profiles = [self._profile(pool, later_s) for pool, later_s in zip(self.pools, self.others_s, strict=True)]
        self._ends, self._back = [ends for ends, _ in profiles], [back for _, back in profiles]

    def _profile(self, pool: PoolState, later_s: float) -> tuple[Array, Array]:
        """Return the latest ends of running jobs, ascending, from now to inf, and the units released until each.

        Others' pending jobs are served before ours. They delay every end by later_s, their work over the pool's size,
        as in slurmctld's job_start_data, and hold the idle units that are not free until then.
        """
        import numpy as np

        running = [*([(self.now_s, pool.units_held_for_others)] if pool.units_held_for_others else []), *pool.running]
        ends = np.array([end_s for end_s, _ in running])
        back = np.array([float(units) for _, units in running])
        ends = self.now_s + np.maximum(ends - self.now_s, OVERRUN_S) + later_s
        return np.concatenate([[self.now_s], ends, [inf]]), np.concatenate([[0.0], np.cumsum(back)])

    def expected_start_s(self, pool: int, units: Array, limit_s: Array) -> Array:
        """Return the expected time at which a pool has these units besides the reserved ones, without new jobs."""
        import numpy as np

        needed = units + np.where(units > self.spare[pool], self.claim[pool], 0.0)
        indices = np.searchsorted(self._back[pool] + self.free[pool], needed)
        return self.opens_s(pool, self.expected_s(self._ends[pool][indices]), limit_s)

    def expected_s(self, latest_s: Any) -> Any:
        """Return when something is expected that happens by latest_s if all jobs use up their limits."""
        return self.now_s + (latest_s - self.now_s) * self.limit_usage

    def opens_s(self, pool: int, start_s: Array, limit_s: Array) -> Array:
        """Return the first times from start_s on at which jobs of these limits overlap no maintenance window."""
        import numpy as np

        for from_s, to_s in sorted(self.pools[pool].maintenance_windows):
            start_s = np.where((start_s < to_s) & (start_s + limit_s > from_s), to_s, start_s)
        return start_s

    def is_open(self, pool: int, limit_s: float) -> bool:
        """Return whether a job of this limit can start now without overlapping a maintenance window."""
        return all(
            self.now_s >= to_s or self.now_s + limit_s <= from_s
            for from_s, to_s in self.pools[pool].maintenance_windows
        )

    def admits(self, pool: int, units: Array, end_s: Array) -> Any:
        """Return which jobs can start now without a delay of the reserved job, if they end by end_s."""
        import numpy as np

        fits = np.logical_and(units <= self.free[pool], units <= self.size[pool])
        return fits & ((end_s <= self.shadow_s[pool]) | (units <= self.spare[pool]))

    def start_job(self, pool: int, units: float, end_s: float) -> None:
        """Take the units of a job that starts now and ends by end_s."""
        self.free[pool] -= units
        self._started[pool].append((end_s, units))
        if end_s > self.shadow_s[pool]:
            self.spare[pool] -= units

    def reserve(self, pool: int, units: float) -> None:
        """Reserve the pool's next free units for a job."""
        import numpy as np

        ends, back = self._ends[pool], np.diff(self._back[pool], prepend=0.0, append=self._back[pool][-1])
        if self._started[pool]:
            started = np.array(self._started[pool])
            ends, back = np.concatenate([ends, started[:, 0]]), np.concatenate([back, started[:, 1]])
            order = np.argsort(ends, kind="stable")
            ends, back = ends[order], back[order]
        free = self.free[pool] + np.cumsum(back)
        start = min(int(np.searchsorted(free, units)), len(ends) - 1)
        self.shadow_s[pool], self.claim[pool] = float(ends[start]), units
        last_end = int(np.searchsorted(ends[:-1], self.shadow_s[pool], side="right")) - 1
        self.spare[pool] = free[last_end] - units

    def reserve_for(self, demands: Sequence[tuple[int, float, float]]) -> None:
        """Account for our pending tickets, (pool, units, limit), oldest first.

        A ticket that fits takes its units; the first other one reserves them. A ticket that has to wait for the end of
        a maintenance window takes none.
        """
        for pool, units, limit_s in demands:
            self.waiting[pool] += 1
            if self.shadow_s[pool] < inf or not self.is_open(pool, limit_s):
                continue
            if units <= self.free[pool]:
                self.start_job(pool, units, self.now_s + limit_s)
            else:
                self.reserve(pool, units)
