"""Order pending jobs by priority, and estimate each job's end in each pool."""

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

    index: into the jobs as given. is_starving: (jobs,). takes_s: (jobs, pools), staging and run. ends_s: (jobs, pools),
    expected time from now to the end. accepts: (jobs, pools), pools that a job accepts now.
    """

    index: Any
    is_starving: Any
    table: JobTable
    takes_s: Array
    ends_s: Array
    accepts: Any


def prioritize(now_s: float, table: JobTable, capacity: PoolCapacity, policy: PolicyParams) -> PriorityOrder:
    """Return the jobs in order of priority, with the expected end of each."""
    import numpy as np

    takes = table.copy_s + table.run_s
    share_s = _ideal_s(table, capacity)
    is_starving = now_s - table.submit_s > max(policy.starvation_s, policy.starvation_share * float(share_s.sum()))
    best = takes.min(axis=1)
    is_short = best <= policy.short_job_s
    key = np.where(is_starving & ~is_short, table.submit_s, best)
    index = np.lexsort((key, ~is_starving | is_short, ~is_short, -table.tier))
    table = JobTable(*(column[index] for column in table))
    takes, is_starving, share_s = takes[index], is_starving[index], share_s[index]
    queue_s = (np.cumsum(share_s) - share_s) * policy.queue_weight
    starts = [
        capacity.start_s(pool, table.units[:, pool], table.limit_s[:, pool]) for pool in range(len(capacity.names))
    ]
    wait = np.column_stack(starts) - now_s
    # Data is copied before the submission; the pool's running jobs go on meanwhile.
    ends = np.where(wait > 0, np.maximum(np.maximum(wait, queue_s[:, None]), table.copy_s) + table.run_s, takes)
    accepts = (takes <= policy.max_slowdown * ends.min(axis=1)[:, None]) | is_starving[:, None]
    return PriorityOrder(index, is_starving, table, takes, ends, accepts & np.isfinite(takes))


def _ideal_s(table: JobTable, capacity: PoolCapacity) -> Array:
    """Return the time that all pools together need for each job, if it were spread over them."""
    import numpy as np

    rate = np.where(table.units <= capacity.size, capacity.size / (table.units * table.run_s), 0.0).sum(axis=1)
    times_s: Array = np.divide(1.0, rate, out=np.zeros_like(rate), where=rate > 0)
    return times_s
