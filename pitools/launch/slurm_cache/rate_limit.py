"""How often a cluster's daemons may be asked, and when it is worth it. Pure.

A bucket of calls that fills slowly: 7 at once, and 18 more in ten minutes, so never more than 25 in any ten. What a
command costs is what slurmctld (`sdiag`) and slurmdbd (`sacctmgr show stats`) count: squeue asks for the jobs and for
the partitions; sacct logs in, asks, and logs out. One that fails costs the same.
"""

from __future__ import annotations

BUCKET_CALLS, CALLS_PER_S = 7.0, 18 / 600
SQUEUE_COST, SACCT_COST = 2, 3
FIRST_INTERVAL_S = 2.0
_BUSY_MAX_S, _IDLE_MAX_S = 30.0, 120.0  # the longest interval while states change, and while none does
_FIRST_RETRY_S = 5.0
_FIRST_ACCOUNTING_S, _MAX_ACCOUNTING_S = 5.0, 600.0


def calls_left(calls: float, as_of_s: float, now: float) -> float:
    """Calls in the bucket now that held so many at a moment; a clock that was set back fills nothing."""
    return min(BUCKET_CALLS, max(0.0, calls) + max(0.0, now - as_of_s) * CALLS_PER_S)


def interval_s(before_s: float, *, changed: bool, new_job: bool) -> float:
    """Seconds to the next squeue after an answer: doubled each time, from the first again for a job that is new."""
    grown = FIRST_INTERVAL_S if new_job else max(FIRST_INTERVAL_S, 2 * before_s)
    return min(grown, _BUSY_MAX_S if changed else _IDLE_MAX_S)


def retry_after_s(times: int) -> float:
    """Seconds to wait after the n-th failure in a row."""
    return float(min(_IDLE_MAX_S, _FIRST_RETRY_S * 2 ** min(times - 1, 10)))


def accounting_retry_s(tries: int) -> float:
    """Seconds until accounting is asked again about a job of which it could not say, n times, that it has ended."""
    return float(min(_MAX_ACCOUNTING_S, _FIRST_ACCOUNTING_S * 3 ** min(tries - 1, 10)))
