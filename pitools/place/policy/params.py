"""The parameters of a decision."""

from __future__ import annotations

import msgspec

HOUR_S = 3600.0


class PolicyParams(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of the order of jobs, their placement, and the treatment of starving jobs.

    Jobs are ordered by tier, then by expected run time on their best pool, shortest first.

    max_slowdown: a job starts in a pool only if its time to the end there is at most this many times the best of all
    pools; else it waits for a faster pool. queue_weight: weight of the work ahead of a job in its expected wait.
    limit_usage: expected used share of the rest of a running job's time limit.

    max_reserved_jobs: number of jobs, first in order, that get a reservation if they do not fit.

    starvation_s, starvation_share: a job starves once it is older than starvation_s and than starvation_share x the
    time that all pools together need for all pending jobs (its wait in one fair queue). Starving jobs come first within
    their tier, in the order of submission. They take any pool; up to starvation_tickets of them wait in pools' queues
    if they do not fit.
    short_job_s: jobs with a shorter expected run on their best pool come before starving ones: together they delay
    others little, and hundreds of them must not wait for one long job.

    hysteresis, move_s, min_wait_before_move_s: a pending ticket older than min_wait_before_move_s is withdrawn if
    another pool can start the job now and end it earlier by more than hysteresis x move_s, the cost of a move.
    """

    max_slowdown: float = 2.0
    queue_weight: float = 1.0
    limit_usage: float = 0.3
    max_reserved_jobs: int = 2
    starvation_s: float = 9 * HOUR_S
    starvation_share: float = 1.0
    starvation_tickets: int = 2
    short_job_s: float = 600.0
    hysteresis: float = 2.0
    move_s: float = 300.0
    min_wait_before_move_s: float = 600.0
