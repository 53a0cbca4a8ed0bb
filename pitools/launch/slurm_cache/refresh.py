"""Whether to ask, and asking: by whoever holds the lock, for everybody who wanted to know."""

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
from pitools.slurm.states import UNKNOWN, is_finished

LOST_AFTER_TRIES = 4  # a minute and more, see budget.gone_s
_INTEREST_RENEW_S, _INTEREST_S = 300.0, 900.0  # how often interest is told again, and how long it lasts
_ACCOUNT_TTL_S = 86400.0
_MAX_IDS_PER_CALL = 1000  # ids in one sacct: a command line has an end


def is_due(cached: CachedAnswers, ids: Sequence[str], now: float, max_age_s: float) -> bool:
    """Whether there is something to write down or to ask, and calls left for it."""
    if any(_must_record_interest(cached, job_id, now) for job_id in ids):
        return True
    cost = _call_cost(bool(_ids_for_accounting(cached, now)), _is_queue_due(cached, ids, now, max_age_s))
    return bool(cost) and rate_limit.calls_left(cached.bucket_calls, cached.bucket_as_of_s, now) >= cost


def _call_cost(is_gone: bool, is_queue_due: bool) -> int:
    # Both at once or none: accounting costs more, and would otherwise never find enough calls left.
    return is_gone * rate_limit.SACCT_COST + is_queue_due * rate_limit.SQUEUE_COST


def refresh(slurm: Client, path: Path, cached: CachedAnswers, ids: Sequence[str], max_age_s: float) -> CachedAnswers:
    """What is known after asking what is due: slurmctld, then accounting about what slurmctld has forgotten.

    What a question costs is written down before it is asked: whoever dies over it has asked. Raises NoSpace, or
    ClusterError, where that cannot be written: then nothing is asked.
    """
    now = time.time()
    before, cached = cached, _record_interest(cached, ids, now)
    gone, is_queue_due = _ids_for_accounting(cached, now), _is_queue_due(cached, ids, now, max_age_s)
    calls = rate_limit.calls_left(cached.bucket_calls, cached.bucket_as_of_s, now)
    if is_queue_due and calls >= _call_cost(bool(gone), is_queue_due):
        cached = _query_squeue(slurm, _charge_calls(path, cached, rate_limit.SQUEUE_COST, now))
        now = time.time()
        gone, calls, is_queue_due = (
            _ids_for_accounting(cached, now),
            rate_limit.calls_left(cached.bucket_calls, cached.bucket_as_of_s, now),
            False,
        )
    if gone and calls >= _call_cost(True, is_queue_due):
        cached = _query_sacct(slurm, _charge_calls(path, cached, rate_limit.SACCT_COST, now), gone[:_MAX_IDS_PER_CALL])
    if cached != before:
        with contextlib.suppress(PitError):  # what was learnt is learnt all the same
            store.write_cache(path, cached)
    return cached


def _must_record_interest(found: CachedAnswers, job_id: str, now: float) -> bool:
    """Whether it is to be written down that somebody wants to know of this job."""
    account = found.accounts.get(job_id)
    if account and is_finished(account.state):
        return False
    return now - found.interest.get(job_id, (0.0, 0.0))[1] > _INTEREST_RENEW_S


def _record_interest(found: CachedAnswers, ids: Sequence[str], now: float) -> CachedAnswers:
    news = [job_id for job_id in ids if _must_record_interest(found, job_id, now)]
    if not news:
        return found
    wanted = {job_id: times for job_id, times in found.interest.items() if now - times[1] < _INTEREST_S}
    wanted |= {job_id: (wanted.get(job_id, (now, now))[0], now) for job_id in news}
    accounts = {
        job_id: account
        for job_id, account in found.accounts.items()
        if job_id in wanted or now - account.queried_at_s < _ACCOUNT_TTL_S
    }
    return replace(found, interest=wanted, accounts=accounts)


def _is_queue_due(found: CachedAnswers, ids: Sequence[str], now: float, max_age_s: float) -> bool:
    if found.failed and now < found.failed.failed_at_s + rate_limit.retry_after_s(found.failed.times):
        return False
    states = found.states()
    accounts = found.accounts
    left = [job_id for job_id in ids if job_id not in accounts or not is_finished(accounts[job_id].state)]
    # Of a job that somebody asked about only after the last answer, that answer says nothing.
    is_new = any(
        job_id not in states
        and job_id not in accounts
        and found.interest.get(job_id, (now, now))[0] > found.queried_at_s
        for job_id in left
    )
    gap_s = min(found.wait_s, rate_limit.FIRST_INTERVAL_S if is_new else max(rate_limit.FIRST_INTERVAL_S, max_age_s))
    return bool(left) and now - found.queried_at_s >= gap_s


def _ids_for_accounting(found: CachedAnswers, now: float) -> list[str]:
    """Jobs that slurmctld does not know, and about which accounting is to be asked now."""
    failed = found.accounting_failure
    if not found.queried_at_s or (failed and now < failed.failed_at_s + rate_limit.retry_after_s(failed.times)):
        return []
    states = found.states()

    def is_due(job_id: str) -> bool:
        account = found.accounts.get(job_id)
        if account is None:
            return True
        return not is_finished(account.state) and now >= account.queried_at_s + rate_limit.accounting_retry_s(
            account.tries
        )

    return [
        job_id
        for job_id, (first, last) in found.interest.items()
        if job_id not in states and first <= found.queried_at_s and now - last < _INTEREST_S and is_due(job_id)
    ]


def _charge_calls(path: Path, found: CachedAnswers, calls: int, now: float) -> CachedAnswers:
    found = replace(
        found,
        bucket_calls=rate_limit.calls_left(found.bucket_calls, found.bucket_as_of_s, now) - calls,
        bucket_as_of_s=now,
    )
    store.write_cache(path, found)
    return found


def _query_squeue(slurm: Client, found: CachedAnswers) -> CachedAnswers:
    began = time.time()
    try:
        jobs = slurm.my_jobs()
    except PitError as error:
        return replace(found, failed=_first_failure_code(error, found.failed))
    before, now = found.states(), job_components.states_from_squeue(jobs)
    # What was seen to have ended and is then forgotten cannot come back: accounting need not be asked.
    ended = {
        job_id: AccountedJob(state, found.queried_at_s)
        for job_id, state in before.items()
        if job_id in found.interest and job_id not in now and is_finished(state)
    }
    accounts = {job_id: account for job_id, account in (found.accounts | ended).items() if job_id not in now}
    moved = any(now.get(job_id) != before.get(job_id) for job_id in found.interest)
    fresh = any(
        first > found.queried_at_s and not is_finished(now.get(job_id, "COMPLETED"))
        for job_id, (first, _) in found.interest.items()
    )
    wait_s = rate_limit.interval_s(found.wait_s, changed=moved, new_job=fresh)
    return replace(found, queried_at_s=began, jobs=tuple(jobs), wait_s=wait_s, failed=None, accounts=accounts)


def _query_sacct(slurm: Client, found: CachedAnswers, gone: Sequence[str]) -> CachedAnswers:
    began = time.time()
    try:
        jobs = slurm.accounting(gone, attempts=False)
    except PitError as error:
        if not isinstance(error, SlurmError) or error.reason is not SlurmReason.ACCOUNTING_DISABLED:
            return replace(found, accounting_failure=_first_failure_code(error, found.accounting_failure))
        jobs = []  # a cluster without accounting has said all that it will ever say
    said = job_components.states_from_accounting(
        job_components.SqueueRow(job.job_id, job.raw_id, job.state) for job in jobs
    )
    accounts = dict(found.accounts)
    for job_id in gone:
        tries = accounts[job_id].tries if job_id in accounts else 0
        # slurmctld does not have it, so it does not run: accounting may lag, and has lost the ends of jobs for good.
        state = said.get(job_id, UNKNOWN)
        accounts[job_id] = AccountedJob(state if is_finished(state) else UNKNOWN, began, tries + 1)
    return replace(found, accounts=accounts, accounting_failure=None)


def _first_failure_code(error: PitError, before: QueryFailure | None) -> QueryFailure:
    return QueryFailure(
        message=error.message,
        where=error.where,
        hint=error.hint,
        retry=error.retry,
        failed_at_s=time.time(),
        times=before.times + 1 if before else 1,
    )
