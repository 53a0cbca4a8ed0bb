"""Who comes first, and where each job would be best off."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from pitools.place.policy.capacity import PoolCapacity
from pitools.place.policy.job_table import JobTable
from pitools.place.policy.params import PolicyParams

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[np.float64]]


class PriorityOrder(NamedTuple):
    """Jobs in the order in which they are served; every array is in this order.

    index: into the jobs as given. is_starving: (jobs,). takes_s: (jobs, pools), from a start to the end, staging
    included. ends_s: (jobs, pools), the expected end from now, waiting included. start_pool: pools that a job would
    take now.
    """

    index: Any
    is_starving: Any
    table: JobTable
    takes_s: Array
    ends_s: Array
    start_pool: Any


def prioritize(now_s: float, table: JobTable, capacity: PoolCapacity, policy: PolicyParams) -> PriorityOrder:
    """The jobs in order, and what each can expect."""
    import numpy as np

    takes = table.stage_s + table.run_s
    share_s = _ideal_s(table, capacity)
    old = now_s - table.submit_s > max(policy.starvation_s, policy.starvation_share * float(share_s.sum()))
    best = takes.min(axis=1)
    brief = best <= policy.short_job_s
    key = np.where(old & ~brief, table.submit_s, best)
    index = np.lexsort((key, ~old | brief, ~brief, -table.tier))
    table = JobTable(*(column[index] for column in table))
    takes, old, share_s = takes[index], old[index], share_s[index]
    ahead = (np.cumsum(share_s) - share_s) * policy.queue_weight
    starts = [
        capacity.start_s(pool, table.units[:, pool], table.limit_s[:, pool]) for pool in range(len(capacity.names))
    ]
    wait = np.column_stack(starts) - now_s
    # What waits is staged meanwhile.
    ends = np.where(wait > 0, np.maximum(np.maximum(wait, ahead[:, None]), table.stage_s) + table.run_s, takes)
    will = (takes <= policy.max_slowdown * ends.min(axis=1)[:, None]) | old[:, None]
    return PriorityOrder(index, old, table, takes, ends, will & np.isfinite(takes))


def _ideal_s(table: JobTable, rooms: PoolCapacity) -> Array:
    """How long all pools together would need for each job, if it could be spread over them."""
    import numpy as np

    rate = np.where(table.units <= rooms.size, rooms.size / (table.units * table.run_s), 0.0).sum(axis=1)
    found: Array = np.divide(1.0, rate, out=np.zeros_like(rate), where=rate > 0)
    return found
