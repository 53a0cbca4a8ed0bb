"""Decide whether a query is due, and run it: by the process with the lock, for the jobs of all processes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from pitools.core.errors import PitError
from pitools.launch.slurm_cache import rate_limit, store
from pitools.launch.slurm_cache.store import AccountedJob, CachedAnswers, QueryFailure
from pitools.slurm import job_components
from pitools.slurm.client import Client
from pitools.slurm.errors import SlurmError, SlurmReason
from pitools.slurm.states import UNKNOWN, is_final

LOST_AFTER_TRIES = 4  # over a minute or more, see rate_limit.accounting_retry_s
_INTEREST_RENEW_S, _INTEREST_S = 300.0, 900.0  # how often a caller renews its interest in a job, and its lifetime
_ACCOUNT_TTL_S = 86400.0
_MAX_IDS_PER_CALL = 1000  # in one sacct, for the limit on a command line's length


def is_due(cached: CachedAnswers, ids: Sequence[str], now: float, max_age_s: float) -> bool:
    """Return whether interest is to be recorded, or a query is due and within the rate limit."""
    if any(_must_record_interest(cached, job_id, now) for job_id in ids):
        return True
    cost = _call_cost(bool(_ids_for_accounting(cached, now)), _is_queue_due(cached, ids, now, max_age_s))
    return bool(cost) and rate_limit.calls_left(cached.bucket_calls, cached.bucket_as_of_s, now) >= cost


def _call_cost(is_accounting_due: bool, is_queue_due: bool) -> int:
    # Both or neither: sacct costs more, and squeue alone would leave too few calls for it each time.
    return is_accounting_due * rate_limit.SACCT_COST + is_queue_due * rate_limit.SQUEUE_COST


def refresh(slurm: Client, path: Path, cached: CachedAnswers, ids: Sequence[str], max_age_s: float) -> CachedAnswers:
    """Run the queries that are due: squeue, then sacct for jobs that slurmctld has dropped. Return the new cache.

    The cost of a query is written before it, so that a killed process has paid for it. Raises NoSpace, or ClusterError,
    where that cannot be written; nothing is queried then.
    """
    now = time.time()
    old, cached = cached, _record_interest(cached, ids, now)
    dropped_ids, is_queue_due = _ids_for_accounting(cached, now), _is_queue_due(cached, ids, now, max_age_s)
    calls = rate_limit.calls_left(cached.bucket_calls, cached.bucket_as_of_s, now)
    if is_queue_due and calls >= _call_cost(bool(dropped_ids), is_queue_due):
        cached = _query_squeue(slurm, _charge_calls(path, cached, rate_limit.SQUEUE_COST, now))
        now = time.time()
        dropped_ids, calls, is_queue_due = (
            _ids_for_accounting(cached, now),
            rate_limit.calls_left(cached.bucket_calls, cached.bucket_as_of_s, now),
            False,
        )
    if dropped_ids and calls >= _call_cost(True, is_queue_due):
        cached = _query_sacct(
            slurm, _charge_calls(path, cached, rate_limit.SACCT_COST, now), dropped_ids[:_MAX_IDS_PER_CALL]
        )
    if cached != old:
        with contextlib.suppress(PitError):  # the answer is valid without being cached
            store.write_cache(path, cached)
    return cached


def _must_record_interest(cached: CachedAnswers, job_id: str, now: float) -> bool:
    """Return whether the interest in this job is to be recorded, or renewed."""
    account = cached.accounts.get(job_id)
    if account and is_final(account.state):
        return False
    return now - cached.interest.get(job_id, (0.0, 0.0))[1] > _INTEREST_RENEW_S


def _record_interest(cached: CachedAnswers, ids: Sequence[str], now: float) -> CachedAnswers:
    new_ids = [job_id for job_id in ids if _must_record_interest(cached, job_id, now)]
    if not new_ids:
        return cached
    interest = {job_id: times for job_id, times in cached.interest.items() if now - times[1] < _INTEREST_S}
    interest |= {job_id: (interest.get(job_id, (now, now))[0], now) for job_id in new_ids}
    accounts = {
        job_id: account
        for job_id, account in cached.accounts.items()
        if job_id in interest or now - account.queried_at_s < _ACCOUNT_TTL_S
    }
    return replace(cached, interest=interest, accounts=accounts)


def _is_queue_due(cached: CachedAnswers, ids: Sequence[str], now: float, max_age_s: float) -> bool:
    if cached.squeue_failure and now < cached.squeue_failure.failed_at_s + rate_limit.retry_after_s(
        cached.squeue_failure.times
    ):
        return False
    states = cached.states()
    accounts = cached.accounts
    open_ids = [job_id for job_id in ids if job_id not in accounts or not is_final(accounts[job_id].state)]
    # The last answer is older than the first request for a new job, and proves nothing about it.
    is_new = any(
        job_id not in states
        and job_id not in accounts
        and cached.interest.get(job_id, (now, now))[0] > cached.queried_at_s
        for job_id in open_ids
    )
    gap_s = min(cached.wait_s, rate_limit.FIRST_INTERVAL_S if is_new else max(rate_limit.FIRST_INTERVAL_S, max_age_s))
    return bool(open_ids) and now - cached.queried_at_s >= gap_s


def _ids_for_accounting(cached: CachedAnswers, now: float) -> list[str]:
    """Return the jobs that slurmctld has dropped, and for which sacct is due."""
    failed = cached.accounting_failure
    if not cached.queried_at_s or (failed and now < failed.failed_at_s + rate_limit.retry_after_s(failed.times)):
        return []
    states = cached.states()

    def is_due(job_id: str) -> bool:
        account = cached.accounts.get(job_id)
        if account is None:
            return True
        return not is_final(account.state) and now >= account.queried_at_s + rate_limit.accounting_retry_s(
            account.tries
        )

    return [
        job_id
        for job_id, (first, last) in cached.interest.items()
        if job_id not in states and first <= cached.queried_at_s and now - last < _INTEREST_S and is_due(job_id)
    ]


def _charge_calls(path: Path, cached: CachedAnswers, calls: int, now: float) -> CachedAnswers:
    cached = replace(
        cached,
        bucket_calls=rate_limit.calls_left(cached.bucket_calls, cached.bucket_as_of_s, now) - calls,
        bucket_as_of_s=now,
    )
    store.write_cache(path, cached)
    return cached


def _query_squeue(slurm: Client, cached: CachedAnswers) -> CachedAnswers:
    began = time.time()
    try:
        jobs = slurm.my_jobs()
    except PitError as error:
        return replace(cached, squeue_failure=_make_failure(error, cached.squeue_failure))
    old_states, new_states = cached.states(), job_components.states_from_squeue(jobs)
    # A job that squeue listed as ended and then dropped cannot restart: sacct is not needed.
    ended = {
        job_id: AccountedJob(state, cached.queried_at_s)
        for job_id, state in old_states.items()
        if job_id in cached.interest and job_id not in new_states and is_final(state)
    }
    accounts = {job_id: account for job_id, account in (cached.accounts | ended).items() if job_id not in new_states}
    is_changed = any(new_states.get(job_id) != old_states.get(job_id) for job_id in cached.interest)
    has_new_job = any(
        first > cached.queried_at_s and not is_final(new_states.get(job_id, "COMPLETED"))
        for job_id, (first, _) in cached.interest.items()
    )
    wait_s = rate_limit.interval_s(cached.wait_s, changed=is_changed, new_job=has_new_job)
    return replace(cached, queried_at_s=began, jobs=tuple(jobs), wait_s=wait_s, squeue_failure=None, accounts=accounts)


def _query_sacct(slurm: Client, cached: CachedAnswers, dropped_ids: Sequence[str]) -> CachedAnswers:
    began = time.time()
    try:
        jobs = slurm.accounting(dropped_ids, all_starts=False)
    except PitError as error:
        if not isinstance(error, SlurmError) or error.reason is not SlurmReason.ACCOUNTING_DISABLED:
            return replace(cached, accounting_failure=_make_failure(error, cached.accounting_failure))
        jobs = []  # without accounting there will never be more
    states = job_components.states_from_accounting(
        job_components.JobPart(job.job_id, job.raw_id, job.state) for job in jobs
    )
    accounts = dict(cached.accounts)
    for job_id in dropped_ids:
        tries = accounts[job_id].tries if job_id in accounts else 0
        # slurmctld does not have the job, so it does not run. Accounting may lag, and can lose the end of a job.
        state = states.get(job_id, UNKNOWN)
        accounts[job_id] = AccountedJob(state if is_final(state) else UNKNOWN, began, tries + 1)
    return replace(cached, accounts=accounts, accounting_failure=None)


def _make_failure(error: PitError, last: QueryFailure | None) -> QueryFailure:
    return QueryFailure(
        message=error.message,
        where=error.where,
        hint=error.hint,
        retry=error.retry,
        failed_at_s=time.time(),
        times=last.times + 1 if last else 1,
    )
