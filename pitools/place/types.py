"""The input and output records of a placement decision: jobs, pools, tickets, submissions, withdrawals.

The dispatcher and the simulator both build them; `policy.decide` reads nothing else. Times are seconds on one clock:
Unix time, or the clock of a trace.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


def site_of(pool: str) -> str:
    """Return the site of a pool, whose name is `site/partition`."""
    return pool.partition("/")[0]


class PlacementOption(msgspec.Struct, frozen=True, kw_only=True):
    """One pool where a job could run.

    units: GPUs that the job would hold, or nodes in a pool without GPUs. run_s: expected run time, with the effects of
    topology and failures. limit_s: time limit of the submission. copy_s: time to copy missing data before the
    submission; the start is expected after the longer of copy and wait.
    """

    pool: str
    units: int
    run_s: float
    limit_s: float
    copy_s: float = 0.0


class PendingJob(msgspec.Struct, frozen=True, kw_only=True):
    """One pending job of the queue over all sites. tier: jobs of higher tiers go first."""

    job_id: str
    submit_s: float
    options: tuple[PlacementOption, ...]
    tier: int = 0


class PoolState(msgspec.Struct, frozen=True, kw_only=True):
    """One partition of one site, as of its last snapshot.

    units: schedulable units, in use or not. free: idle units that no pending job of others needs; others are all jobs
    outside of this queue. running: (end by time limit, schedulable units) of every running job, ascending.
    others_pending: units that pending jobs of others request. others_pending_s: the sum of their units x time limit.
    max_pending: how many of our tickets may wait in this pool. speed: of its nodes, relative to other pools.
    is_unreachable: the site does not answer; nothing is submitted to it. maintenance_windows: (from, to) in which
    nothing may run; a job whose limit reaches into a window starts after it.
    """

    pool: str
    units: int
    free: int
    running: Sequence[tuple[float, int]] = ()
    others_pending: int = 0
    others_pending_s: float = 0.0
    max_pending: int = 4
    speed: float = 1.0
    is_unreachable: bool = False
    maintenance_windows: Sequence[tuple[float, float]] = ()

    @property
    def units_held_for_others(self) -> int:
        """Return the idle units that are not free, as others' pending jobs need them."""
        idle = self.units - sum(units for _, units in self.running)
        return max(0, idle - self.free) if self.others_pending else 0

    def opens_s(self, start_s: float, limit_s: float) -> float:
        """Return the first time, not before start_s, at which a job with this limit overlaps no maintenance window."""
        for from_s, to_s in sorted(self.maintenance_windows):
            if start_s < to_s and start_s + limit_s > from_s:
                start_s = to_s
        return start_s


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """Our job in the queue of a pool, pending since submitted_s. A job has at most one ticket; Slurm starts it."""

    job_id: str
    pool: str
    submitted_s: float


class Submit(msgspec.Struct, frozen=True, kw_only=True):
    """Decision: submit this job to this pool. reason: text for `list`."""

    job_id: str
    pool: str
    reason: str = ""


class Withdraw(msgspec.Struct, frozen=True, kw_only=True):
    """Decision: withdraw this job's ticket from this pool. A ticket that has started is left to run."""

    job_id: str
    pool: str
    reason: str = ""
