"""The constants of a decision, each in terms that can be explained to whoever waits."""

from __future__ import annotations

from pitools.core.record import Record

HOUR_S = 3600.0


class PolicyParams(Record, frozen=True, kw_only=True, tag="pit.policy-params/1"):
    """How jobs are ordered, what they wait for, and what is done for those that wait long.

    The shortest go first, by expected run time on the best pool; tiers come before any order.

    max_slowdown: a job starts in a pool with room only if it would end within so many times the time to its best end
    anywhere; else it waits for a faster one. queue_weight: what waits ahead of it is expected to cost it so many times
    the time that all pools together need for it. limit_usage: of the time up to a running job's limit, so much is
    expected to be used.

    reserve: of the jobs that do not fit, so many that are first in order keep a pool from filling up before them.
    starvation_s, starvation_share: a job is old at the age of starvation_s, but not before starvation_share x the time
    that all pools together need for whatever waits, which is how long it would have waited in one fair line. Old jobs
    come first within their tier, as submitted, take any pool, and wait in its queue where they do not fit:
    starvation_tickets of them at a time. Only brief jobs, expected to run no longer than short_job_s on their best
    pool, come before them: all of those together delay nobody by much, and hundreds of them must not wait for one long
    job.

    hysteresis, move_s, min_wait_before_move_s: a waiting ticket is withdrawn where another pool could start the job now
    and end it earlier by more than hysteresis x move_s, what a move costs, and not within min_wait_before_move_s of its
    placing.
    """

    max_slowdown: float = 2.0
    queue_weight: float = 1.0
    limit_usage: float = 0.3
    reserve: int = 2
    starvation_s: float = 9 * HOUR_S
    starvation_share: float = 1.0
    starvation_tickets: int = 2
    short_job_s: float = 600.0
    hysteresis: float = 2.0
    move_s: float = 300.0
    min_wait_before_move_s: float = 600.0
