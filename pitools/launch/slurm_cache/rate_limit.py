"""How often a cluster's daemons may be asked, and when it is worth it. Pure.

A bucket of calls that fills slowly: 7 at once, and 18 more in ten minutes, so never more than 25 in any ten. What a
command costs is what slurmctld (`sdiag`) and slurmdbd (`sacctmgr show stats`) count: squeue asks for the jobs and for
the partitions; sacct logs in, asks, and logs out. One that fails costs the same.
"""

from __future__ import annotations

MOST, A_SECOND = 7.0, 18 / 600
SQUEUE, SACCT = 2, 3
FIRST_S = 2.0
_MOVING_S, _STILL_S = 30.0, 120.0  # the longest interval while states change, and while none does
_FIRST_FAILED_S = 5.0
_FIRST_GONE_S, _LAST_GONE_S = 5.0, 600.0


def left(calls: float, at_s: float, now: float) -> float:
    """Calls in the bucket now that held so many at a moment; a clock that was set back fills nothing."""
    return min(MOST, max(0.0, calls) + max(0.0, now - at_s) * A_SECOND)


def interval_s(before_s: float, *, moved: bool, fresh: bool) -> float:
    """Seconds to the next squeue after an answer: doubled each time, from the first again for a job that is new."""
    grown = FIRST_S if fresh else max(FIRST_S, 2 * before_s)
    return min(grown, _MOVING_S if moved else _STILL_S)


def after_failure_s(times: int) -> float:
    """Seconds to wait after the n-th failure in a row."""
    return float(min(_STILL_S, _FIRST_FAILED_S * 2 ** min(times - 1, 10)))


def gone_s(tries: int) -> float:
    """Seconds until accounting is asked again about a job of which it could not say, n times, that it has ended."""
    return float(min(_LAST_GONE_S, _FIRST_GONE_S * 3 ** min(tries - 1, 10)))
