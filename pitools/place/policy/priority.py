"""Who comes first, and where each job would be best off."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from pitools.place.policy.capacity import Rooms
from pitools.place.policy.job_table import Table
from pitools.place.policy.params import Policy

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[np.float64]]


class Line(NamedTuple):
    """Jobs in the order in which they are served; every array is in this order.

    index: into the jobs as given. old: (jobs,). takes_s: (jobs, pools), from a start to the end, staging included.
    ends_s: (jobs, pools), the expected end from now, waiting included. will: pools that a job would take now.
    """

    index: Any
    old: Any
    table: Table
    takes_s: Array
    ends_s: Array
    will: Any


def line(now_s: float, table: Table, rooms: Rooms, policy: Policy) -> Line:
    """The jobs in order, and what each can expect."""
    import numpy as np

    takes = table.stage_s + table.run_s
    share_s = _share_s(table, rooms)
    old = now_s - table.submit_s > max(policy.old_s, policy.old_share * float(share_s.sum()))
    best = takes.min(axis=1)
    brief = best <= policy.brief_s
    key = np.where(old & ~brief, table.submit_s, best)
    index = np.lexsort((key, ~old | brief, ~brief, -table.tier))
    table = Table(*(column[index] for column in table))
    takes, old, share_s = takes[index], old[index], share_s[index]
    ahead = (np.cumsum(share_s) - share_s) * policy.queueing
    starts = [rooms.start_s(pool, table.units[:, pool], table.limit_s[:, pool]) for pool in range(len(rooms.names))]
    wait = np.column_stack(starts) - now_s
    # What waits is staged meanwhile.
    ends = np.where(wait > 0, np.maximum(np.maximum(wait, ahead[:, None]), table.stage_s) + table.run_s, takes)
    will = (takes <= policy.patience * ends.min(axis=1)[:, None]) | old[:, None]
    return Line(index, old, table, takes, ends, will & np.isfinite(takes))


def _share_s(table: Table, rooms: Rooms) -> Array:
    """How long all pools together would need for each job, if it could be spread over them."""
    import numpy as np

    rate = np.where(table.units <= rooms.size, rooms.size / (table.units * table.run_s), 0.0).sum(axis=1)
    found: Array = np.divide(1.0, rate, out=np.zeros_like(rate), where=rate > 0)
    return found
