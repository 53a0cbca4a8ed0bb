"""The rate limit of queries to a cluster's daemons, and the intervals between them. Pure functions.

A token bucket of calls: 7, refilled by 18 in ten minutes, so at most 25 in any ten. The costs are the calls that
slurmctld (`sdiag`) and slurmdbd (`sacctmgr show stats`) count: squeue requests the jobs and the partitions; sacct opens
a connection, queries, and closes it. A failed command costs the same.
"""

from __future__ import annotations

BUCKET_CALLS, CALLS_PER_S = 7.0, 18 / 600
SQUEUE_COST, SACCT_COST = 2, 3
FIRST_INTERVAL_S = 2.0
_BUSY_MAX_S, _IDLE_MAX_S = 30.0, 120.0  # the longest interval while states change, and while none does
_FIRST_RETRY_S = 5.0
_FIRST_ACCOUNTING_S, _MAX_ACCOUNTING_S = 5.0, 600.0


def calls_left(calls: float, as_of_s: float, now: float) -> float:
    """Return the calls in the bucket now that contained `calls` at `as_of_s`; a clock set back adds none."""
    return min(BUCKET_CALLS, max(0.0, calls) + max(0.0, now - as_of_s) * CALLS_PER_S)


def interval_s(last_interval_s: float, *, changed: bool, new_job: bool) -> float:
    """Return the seconds to the next squeue: twice the last interval, or the first interval for a new job."""
    next_interval_s = FIRST_INTERVAL_S if new_job else max(FIRST_INTERVAL_S, 2 * last_interval_s)
    return min(next_interval_s, _BUSY_MAX_S if changed else _IDLE_MAX_S)


def retry_after_s(times: int) -> float:
    """Return the seconds to wait after the n-th consecutive failure."""
    return float(min(_IDLE_MAX_S, _FIRST_RETRY_S * 2 ** min(times - 1, 10)))


def accounting_retry_s(tries: int) -> float:
    """Return the seconds to the next sacct for a job for which it has had no end in n tries."""
    return float(min(_MAX_ACCOUNTING_S, _FIRST_ACCOUNTING_S * 3 ** min(tries - 1, 10)))
