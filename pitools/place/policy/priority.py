"""Order pending jobs by priority, and estimate each job's end and cost in each pool."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from pitools.place.policy.capacity import PoolCapacity
from pitools.place.policy.job_table import JobTable
from pitools.place.policy.params import PolicyParams
from pitools.place.policy.unit_price import unit_prices

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[np.float64]]


class PriorityOrder(NamedTuple):
    """Jobs in the order in which they are served; every array is in this order.

    index: into the jobs as given. price: of each pool's last free unit. The others: (jobs, pools). takes_s: staging and
    run. ends_s: expected time from now to the end. accepts: pools that a job accepts now.
    """

    index: Any
    table: JobTable
    price: Array
    takes_s: Array
    ends_s: Array
    accepts: Any


def prioritize(now_s: float, table: JobTable, capacity: PoolCapacity, policy: PolicyParams) -> PriorityOrder:
    """Return the jobs in order of priority, with the expected end of each."""
    import numpy as np

    starts = [
        capacity.expected_start_s(pool, table.units[:, pool], table.limit_s[:, pool])
        for pool in range(len(capacity.names))
    ]
    wait = np.column_stack(starts) - now_s
    takes = table.copy_s + table.run_s
    share_s, age_s = _ideal_s(table, capacity), now_s - table.submit_s
    least_wait_s = (wait - policy.limit_usage * capacity.others_s).min(axis=1)
    least_wait_s[np.isinf(least_wait_s)] = 0.0
    is_due = age_s + least_wait_s >= policy.due_share * _of_tiers_above(table.tier, share_s, np.sum)
    work = np.where(np.isfinite(takes), table.units * takes, np.inf).min(axis=1)
    index = np.lexsort((table.submit_s, np.where(is_due, table.submit_s, work), ~is_due, -table.tier))

    oldest_s = _of_tiers_above(table.tier, age_s, np.max)
    saved_s = np.where(np.isfinite(takes), takes, 0.0) - takes.min(axis=1)[:, None]
    budget_s = np.minimum(oldest_s[:, None], policy.patience * saved_s)
    is_patient = (age_s[:, None] + policy.next_decision_s < budget_s) & ~is_due[:, None]
    accepts = np.isfinite(takes) & ~is_patient

    queue_s = (np.cumsum(share_s[index]) - share_s[index])[:, None]
    table, takes, wait = JobTable(*(column[index] for column in table)), takes[index], wait[index]
    # Data is copied before the submission; the pool's running jobs go on meanwhile.
    ends = np.where(wait > 0, np.maximum(np.maximum(wait, queue_s), table.copy_s) + table.run_s, takes)
    return PriorityOrder(index, table, policy.last_unit * unit_prices(capacity.pools), takes, ends, accepts[index])


def _ideal_s(table: JobTable, capacity: PoolCapacity) -> Array:
    """Return the time that all pools together need for each job, if it were spread over them."""
    import numpy as np

    rate = np.where(table.units <= capacity.size, capacity.size / (table.units * table.run_s), 0.0).sum(axis=1)
    times_s: Array = np.divide(1.0, rate, out=np.zeros_like(rate), where=rate > 0)
    return times_s


def _of_tiers_above(tier: Array, values: Array, reduce: Any) -> Array:
    """Return for each job the sum or maximum of the values of the jobs of its tier and above."""
    import numpy as np

    result: Array = np.zeros_like(values)
    for one in np.unique(tier):
        result[tier == one] = reduce(values[tier >= one])
    return result
