"""Decide which pending jobs get a ticket now, and which tickets are withdrawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

from pitools.place.policy.capacity import PoolCapacity
from pitools.place.policy.job_table import JobTableBuilder, runnable
from pitools.place.policy.migration import migrations
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
    """Return the tickets to withdraw and to submit now, in an order that is safe to stop anywhere. Pure.

    jobs: all our jobs that have not started. tickets: all pending ones. A job with a ticket gets no second one; a job
    whose ticket is withdrawn is placed by a later decision, once the ticket is gone. Unreachable pools are left out.
    `PoolState.running` holds ends by time limit, as Slurm reports them. builder: a cache for repeated decisions.
    """
    capacity = PoolCapacity(now_s, pools, policy.limit_usage)
    if not jobs or not capacity.names:
        return []
    jobs_by_id = {job.job_id: job for job in jobs}
    column = {name: number for number, name in enumerate(capacity.names)}
    queued = sorted(
        (ticket for ticket in tickets if ticket.pool in column), key=lambda t: (t.submitted_s, t.job_id, t.pool)
    )
    demands = {
        (job_id, option.pool): (float(option.units), option.limit_s)
        for job_id in {ticket.job_id for ticket in tickets} & jobs_by_id.keys()
        for option in jobs_by_id[job_id].options
    }
    capacity.reserve_for([(column[t.pool], *demands.get((t.job_id, t.pool), (0.0, 0.0))) for t in queued])
    withdraws = migrations(now_s, jobs_by_id, capacity, queued, policy)
    bound = {ticket.job_id for ticket in tickets}
    unbound = [job for job in jobs if job.job_id not in bound]
    candidates, table = runnable(unbound, (builder or JobTableBuilder()).build(unbound, capacity.names))
    if not candidates:
        return list(withdraws)
    decision = _Decision(candidates, prioritize(now_s, table, capacity, policy), capacity)
    decision.run()
    return [*withdraws, *decision.placed]


class _Decision:
    """Places jobs in order of priority; each placement reduces the capacity for the next job."""

    def __init__(self, jobs: Sequence[PendingJob], order: PriorityOrder, capacity: PoolCapacity) -> None:
        import numpy as np

        self.jobs, self.order, self.capacity = jobs, order, capacity
        self.largest = max((units for pool in capacity.pools for _, units in pool.running), default=0)
        self.placed: list[Submit] = []
        self.open = np.ones(len(jobs), dtype=bool)  # neither placed nor with a reservation
        self.has_first = np.zeros(len(capacity.names), dtype=bool)  # pools whose first job that cannot start is known
        self.could = np.zeros(order.accepts.shape, dtype=bool)  # there is room
        self.fits = np.zeros(order.accepts.shape, dtype=bool)  # there is room, and the job accepts it
        for pool in range(len(capacity.names)):
            self._refresh(pool)

    def run(self) -> None:
        """Place jobs until none can start. In each pool the first that cannot start is delayed by no job after it."""
        import numpy as np

        while True:
            can_start = self.fits.any(axis=1) & self.open
            next_up = int(can_start.argmax()) if can_start.any() else len(self.jobs)
            if next_up == len(self.jobs):
                break
            is_first = (self.order.table.units[:next_up] <= self.capacity.size)[:, ~self.has_first].any(axis=1)
            stuck = np.flatnonzero(self.open[:next_up] & is_first & ~self.could[:next_up].any(axis=1))
            if stuck.size:
                self._reserve(int(stuck[0]))
            else:
                self._start(next_up)
        placed = {submit.job_id for submit in self.placed}
        for row in range(len(self.jobs)):
            if not any(self._others_wait(pool) and self._has_room(pool) for pool in range(len(self.capacity.names))):
                break
            if self._job(row).job_id not in placed:
                self._queue_behind_others(row)

    def _start(self, row: int) -> None:
        """Submit a job to the pool with the least cost, of those that can start it now."""
        pool, units, limit_s = self._demand(row, self._cheapest(row))
        self.open[row] = False
        self._submit(row, pool, "starts now")
        self.capacity.start_job(pool, units, self.capacity.now_s + limit_s)
        self._refresh(pool)

    def _cheapest(self, row: int) -> int:
        """Return where a job starts now: the pool of the least cost, with the price of the units, or the fastest.

        Another than the fastest must leave as large a free block, or room for a job as large as any that runs.
        """
        import numpy as np

        could, free, takes = self.could[row], self.capacity.free, self.order.takes_s[row]
        units = np.where(could, self.order.table.units[row], 0.0)
        # The price is a mean over time. In an almost empty pool, small jobs find room all the same.
        scarcity = (1.0 - (free - units) / np.maximum(self.capacity.size, 1.0)) ** 4
        block = (free - np.diag(units)).max(axis=1)
        fastest = int(np.argmin(np.where(could, takes, inf)))
        may = self.fits[row] & (block >= min(self.largest, block[fastest]))
        cost = np.where(may, takes * (1.0 + units * self.order.price * scarcity), inf)
        return int(np.argmin(cost)) if may.any() else fastest

    def _reserve(self, row: int) -> None:
        """Reserve units for a job in every pool where it is the first that cannot start: it will use one of them."""
        self.open[row] = False
        for pool in self._sorted(row):
            is_open = self.capacity.is_open(pool, self._demand(row, pool)[2])
            if is_open and not self.has_first[pool] and self.capacity.shadow_s[pool] == inf:
                self.capacity.reserve(pool, float(self.order.table.units[row, pool]))
                self._refresh(pool)
            self.has_first[pool] = True

    def _queue_behind_others(self, row: int) -> None:
        """Submit a job to the queue of its best pool, if others wait there: they would take all units that it needs.

        Contested pools without room in our share of the queue are passed over; in other pools the job waits for a
        later decision.
        """
        pools = [pool for pool in self._sorted(row) if self._has_room(pool) or not self._others_wait(pool)]
        if pools and self._others_wait(pools[0]):
            self._submit(row, pools[0], "waits behind others in this queue")
            self.capacity.waiting[pools[0]] += 1

    def _has_room(self, pool: int) -> bool:
        return self.capacity.waiting[pool] < self.capacity.pools[pool].max_pending

    def _others_wait(self, pool: int) -> bool:
        return self.capacity.pools[pool].others_pending > 0

    def _sorted(self, row: int) -> list[int]:
        """Return the pools large enough for a job, by its expected end."""
        ends, units = self.order.ends_s[row], self.order.table.units[row]
        return sorted((p for p in range(len(ends)) if units[p] <= self.capacity.size[p]), key=lambda p: (ends[p], p))

    def _refresh(self, pool: int) -> None:
        import numpy as np

        table, now_s = self.order.table, self.capacity.now_s
        admitted = self.capacity.admits(pool, table.units[:, pool], now_s + table.limit_s[:, pool])
        open_ = self.capacity.opens_s(pool, np.full(len(self.jobs), now_s), table.limit_s[:, pool]) == now_s
        self.could[:, pool] = admitted & open_
        self.fits[:, pool] = self.order.accepts[:, pool] & self.could[:, pool]

    def _demand(self, row: int, pool: int) -> tuple[int, float, float]:
        return pool, float(self.order.table.units[row, pool]), float(self.order.table.limit_s[row, pool])

    def _submit(self, row: int, pool: int, why: str) -> None:
        self.placed.append(Submit(job_id=self._job(row).job_id, pool=self.capacity.names[pool], reason=why))

    def _job(self, row: int) -> PendingJob:
        return self.jobs[int(self.order.index[row])]
