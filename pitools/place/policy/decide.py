"""The decision: which waiting jobs get a ticket now, and which tickets are taken back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

from pitools.place.policy.capacity import PoolCapacity
from pitools.place.policy.job_table import JobTableBuilder, runnable
from pitools.place.policy.migration import withdrawals
from pitools.place.policy.params import PolicyParams
from pitools.place.policy.priority import PriorityOrder, prioritize
from pitools.place.types import PendingJob, PoolState, Submit, Ticket, Withdraw


def decide(
    now_s: float,
    jobs: Sequence[PendingJob],
    pools: Mapping[str, PoolState],
    tickets: Sequence[Ticket],
    policy: PolicyParams,
    builder: JobTableBuilder | None = None,
) -> list[Submit | Withdraw]:
    """What to do now. Pure: the same arguments give the same decisions, in an order that is safe to stop anywhere.

    jobs: every job of ours that has not started; tickets: every one that waits. A job with a ticket gets no other, and
    one whose ticket is withdrawn is placed in a later decision, when the ticket is known to be gone. Nothing is asked
    of a dark pool. `Pool.running` holds ends by time limit, as Slurm tells them. builder: a memory for whoever
    decides often; it changes nothing but the time needed.
    """
    rooms = PoolCapacity(now_s, pools, policy.limit_usage)
    if not jobs or not rooms.names:
        return []
    ours = {job.job_id: job for job in jobs}
    column = {name: number for number, name in enumerate(rooms.names)}
    queued = sorted(
        (ticket for ticket in tickets if ticket.pool in column), key=lambda t: (t.submitted_s, t.job_id, t.pool)
    )
    asked = {
        (job_id, option.pool): (float(option.units), option.limit_s)
        for job_id in {ticket.job_id for ticket in tickets} & ours.keys()
        for option in ours[job_id].options
    }
    rooms.reserve_for([(column[t.pool], *asked.get((t.job_id, t.pool), (0.0, 0.0))) for t in queued])
    back = withdrawals(now_s, ours, rooms, queued, policy)
    bound = {ticket.job_id for ticket in tickets}
    unbound = [job for job in jobs if job.job_id not in bound]
    loose, table = runnable(unbound, (builder or JobTableBuilder()).build(unbound, rooms.names))
    if not loose:
        return list(back)
    found = prioritize(now_s, table, rooms, policy)
    placing = _Decision(loose, found, rooms, policy)
    placing.run()
    return [*back, *placing.placed]


class _Decision:
    """Jobs get tickets, the first in line first; each changes what there is for the next."""

    def __init__(
        self, jobs: Sequence[PendingJob], order: PriorityOrder, rooms: PoolCapacity, policy: PolicyParams
    ) -> None:
        import numpy as np

        self.jobs, self.line, self.rooms, self.policy = jobs, order, rooms, policy
        self.placed: list[Submit] = []
        self.open = np.ones(len(jobs), dtype=bool)  # not yet looked at in vain
        self.fits = np.zeros(order.start_pool.shape, dtype=bool)
        self.reserved = 0
        for pool in range(len(rooms.names)):
            self._refresh(pool)

    def run(self) -> None:
        """Until nobody can start. Whoever is before the first who can, and cannot, keeps room or waits in a queue."""
        import numpy as np

        old, old_left = self.line.is_starving, self.policy.starvation_tickets - sum(self.rooms.waiting)
        while True:
            can = self.fits.any(axis=1) & self.open
            next_up = int(can.argmax()) if can.any() else len(self.jobs)
            keeps = self.reserved < self.policy.reserve and next_up < len(self.jobs)
            stuck = np.flatnonzero(self.open[:next_up] & np.where(old[:next_up], old_left > 0, keeps))
            if stuck.size:
                row = int(stuck[0])
                self.open[row] = False
                if old[row]:
                    old_left -= self._queue_starving(row)
                else:
                    self._reserve(row)
            elif next_up < len(self.jobs):
                self._start(next_up)
            else:
                break

    def _start(self, row: int) -> None:
        """To the pool where it ends first, of those that would start it now."""
        import numpy as np

        pool = int(np.argmin(np.where(self.fits[row], self.line.takes_s[row], inf)))
        self.open[row] = False
        self._submit(row, pool, "starts now")
        self.rooms.start_job(pool, float(self.line.table.units[row, pool]), self._end_s(pool)[row])
        self._refresh(pool)

    def _reserve(self, row: int) -> None:
        """Keep a pool from filling up before a job that would run there."""
        bare = [pool for pool, waiting in enumerate(self.rooms.waiting) if not waiting]
        bare = [p for p in bare if self.rooms.shadow_s[p] == inf and self.rooms.is_open(p, self._demand(row, p)[2])]
        found = [pool for pool in self._sorted(row) if pool in bare]
        if found:
            self.rooms.reserve(found[0], float(self.line.table.units[row, found[0]]))
            self._refresh(found[0])
        self.reserved += bool(found) if bare else self.policy.reserve

    def _queue_starving(self, row: int) -> bool:
        """Put an old job into a queue, where Slurm keeps its place; tells whether there was one."""
        found = [p for p in self._sorted(row) if self.rooms.waiting[p] < self.rooms.pools[p].max_pending]
        if found:
            self._submit(row, found[0], "it is old: waits there for its turn")
            self.rooms.reserve_for([self._demand(row, found[0])])
            self._refresh(found[0])
        return bool(found)

    def _sorted(self, row: int) -> list[int]:
        """Pools large enough for a job, by its expected end."""
        ends, units = self.line.ends_s[row], self.line.table.units[row]
        return sorted((p for p in range(len(ends)) if units[p] <= self.rooms.size[p]), key=lambda p: (ends[p], p))

    def _end_s(self, pool: int) -> Any:
        """When jobs would end if they started now: Slurm lets one pass a ticket of ours only if its limit allows."""
        table = self.line.table
        return self.rooms.now_s + (table.limit_s if self.rooms.waiting[pool] else table.run_s)[:, pool]

    def _refresh(self, pool: int) -> None:
        import numpy as np

        table, now_s = self.line.table, self.rooms.now_s
        admitted = self.rooms.admits(pool, table.units[:, pool], self._end_s(pool))
        open_ = self.rooms.opens_s(pool, np.full(len(self.jobs), now_s), table.limit_s[:, pool]) == now_s
        self.fits[:, pool] = self.line.start_pool[:, pool] & admitted & open_

    def _demand(self, row: int, pool: int) -> tuple[int, float, float]:
        return pool, float(self.line.table.units[row, pool]), float(self.line.table.limit_s[row, pool])

    def _submit(self, row: int, pool: int, why: str) -> None:
        job = self.jobs[int(self.line.index[row])]
        self.placed.append(Submit(job_id=job.job_id, pool=self.rooms.names[pool], reason=why))
