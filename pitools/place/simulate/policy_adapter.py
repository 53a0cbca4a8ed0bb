"""Convert the simulated state to the records that a policy gets from the real queue."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pitools.place.policy.runtime_predictor import JobFeatures, RuntimePredictor
from pitools.place.simulate.model import Trace
from pitools.place.simulate.pool_scheduler import PoolScheduler, QueueEntry
from pitools.place.simulate.workload import Workload
from pitools.place.types import PendingJob, PlacementOption, PoolState, Submit, Ticket, Withdraw

DecideFunction = Callable[
    [float, Sequence[PendingJob], Mapping[str, PoolState], Sequence[Ticket]], Sequence[Submit | Withdraw]
]


class PolicyAdapter:
    """Holds the records of pending jobs, and makes those of pools and tickets from the current state."""

    def __init__(self, trace: Trace, work: Workload, predictor: RuntimePredictor | None) -> None:
        self.trace, self.work, self.predictor = trace, work, predictor
        self.described = work.scenario.pools
        self.pool_index = {pool.pool: number for number, pool in enumerate(self.described)}
        self.waiting: dict[str, tuple[int, PendingJob]] = {}
        self.placed_s: dict[tuple[int, int], float] = {}

    def add_waiting(self, job: int, fits: Sequence[int]) -> None:
        """Add a job that is to be placed."""
        run_s = self.predictor.mean_s(self._features(job)) if self.predictor else self.work.limit_s[job]
        options = tuple(
            PlacementOption(
                pool=self.described[pool].pool,
                units=self.work.units_on(job, pool),
                run_s=run_s / self.work.speeds[pool],
                limit_s=self.work.limit_on(job, pool),
            )
            for pool in fits
        )
        job_id = self.trace.job_id[job]
        pending = PendingJob(job_id=job_id, submit_s=self.work.submit_s[job], options=options, tier=self.work.tier[job])
        self.waiting[job_id] = job, pending

    def add_start(self, job: int) -> None:
        """Remove a job that has started."""
        self.waiting.pop(self.trace.job_id[job], None)

    def add_end(self, job: int) -> None:
        """Add the run time of a job that has ended to the predictor."""
        if self.predictor:
            self.predictor.add_run(self._features(job), self.trace.run_s[job])

    def add_submission(self, job: int, pool: int, now_s: float) -> None:
        """Record when a ticket joined a queue."""
        self.placed_s[pool, job] = now_s

    def job_index(self, job_id: str) -> int:
        """Return a pending job's index in the trace."""
        return self.waiting[job_id][0]

    def jobs(self) -> list[PendingJob]:
        """Return the pending jobs, in order of submission; a failed one is appended."""
        return [job for _, job in self.waiting.values()]

    def pools(
        self, now_s: float, sites: Sequence[PoolScheduler], is_unreachable: Sequence[bool]
    ) -> dict[str, PoolState]:
        """Return the state of each pool. In a maintenance window nothing is free before its end."""
        pools = {}
        for pool, site, dark in zip(self.described, sites, is_unreachable, strict=True):
            running, free = [(end_s, units) for end_s, _, units in site.running], site.free
            opens_s = max((to_s for from_s, to_s in pool.maintenance_windows if from_s <= now_s < to_s), default=now_s)
            if opens_s > now_s and free:
                running, free = sorted([*running, (opens_s, free)]), 0
            pools[pool.pool] = PoolState(
                pool=pool.pool,
                units=pool.gpus,
                free=free,
                running=running,
                max_pending=pool.max_pending,
                speed=pool.speed,
                is_unreachable=dark,
                maintenance_windows=[window for window in pool.maintenance_windows if window[1] > now_s],
            )
        return pools

    def tickets(self, queued: Sequence[Mapping[int, QueueEntry]]) -> list[Ticket]:
        """Return the pending tickets, in order of submission."""
        every = sorted((entry[1], pool, job) for pool, entries in enumerate(queued) for job, entry in entries.items())
        return [
            Ticket(job_id=self.trace.job_id[job], pool=self.described[pool].pool, submitted_s=self.placed_s[pool, job])
            for _, pool, job in every
        ]

    def _features(self, job: int) -> JobFeatures:
        trace = self.trace
        kind = f"{trace.owner[job]} {trace.job_name[job]}".strip() or f"{trace.rank_score[job]:g}" * (
            trace.rank_score[job] > 0
        )
        return JobFeatures(limit_s=self.work.limit_s[job], units=trace.gpus[job], kind=kind)
