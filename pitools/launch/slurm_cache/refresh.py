"""Whether to ask, and asking: by whoever holds the lock, for everybody who wanted to know."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from pitools.core.errors import PitError
from pitools.launch.slurm_cache import rate_limit, store
from pitools.launch.slurm_cache.store import Account, Failure, Kept
from pitools.slurm import job_components
from pitools.slurm.client import Client
from pitools.slurm.errors import SlurmError, SlurmReason
from pitools.slurm.states import UNKNOWN, is_finished

LOST_TRIES = 4  # a minute and more, see budget.gone_s
_RENEWED_S, _WANTED_S = 300.0, 900.0  # how often interest is told again, and how long it lasts
_REMEMBERED_S = 86400.0
_AT_ONCE = 1000  # ids in one sacct: a command line has an end


def is_due(found: Kept, ids: Sequence[str], now: float, max_age_s: float) -> bool:
    """Whether there is something to write down or to ask, and calls left for it."""
    if any(_is_news(found, job_id, now) for job_id in ids):
        return True
    cost = _cost(bool(_gone(found, now)), _is_queue_due(found, ids, now, max_age_s))
    return bool(cost) and rate_limit.left(found.calls, found.calls_s, now) >= cost


def _cost(is_gone: bool, is_queue_due: bool) -> int:
    # Both at once or none: accounting costs more, and would otherwise never find enough calls left.
    return is_gone * rate_limit.SACCT + is_queue_due * rate_limit.SQUEUE


def turn(slurm: Client, path: Path, found: Kept, ids: Sequence[str], max_age_s: float) -> Kept:
    """What is known after asking what is due: slurmctld, then accounting about what slurmctld has forgotten.

    What a question costs is written down before it is asked: whoever dies over it has asked. Raises NoSpace, or
    ClusterError, where that cannot be written: then nothing is asked.
    """
    now = time.time()
    before, found = found, _wanted(found, ids, now)
    gone, is_queue_due = _gone(found, now), _is_queue_due(found, ids, now, max_age_s)
    calls = rate_limit.left(found.calls, found.calls_s, now)
    if is_queue_due and calls >= _cost(bool(gone), is_queue_due):
        found = _queue(slurm, _spent(path, found, rate_limit.SQUEUE, now))
        now = time.time()
        gone, calls, is_queue_due = _gone(found, now), rate_limit.left(found.calls, found.calls_s, now), False
    if gone and calls >= _cost(True, is_queue_due):
        found = _accounts(slurm, _spent(path, found, rate_limit.SACCT, now), gone[:_AT_ONCE])
    if found != before:
        with contextlib.suppress(PitError):  # what was learnt is learnt all the same
            store.write(path, found)
    return found


def _is_news(found: Kept, job_id: str, now: float) -> bool:
    """Whether it is to be written down that somebody wants to know of this job."""
    account = found.accounts.get(job_id)
    if account and is_finished(account.state):
        return False
    return now - found.wanted.get(job_id, (0.0, 0.0))[1] > _RENEWED_S


def _wanted(found: Kept, ids: Sequence[str], now: float) -> Kept:
    news = [job_id for job_id in ids if _is_news(found, job_id, now)]
    if not news:
        return found
    wanted = {job_id: times for job_id, times in found.wanted.items() if now - times[1] < _WANTED_S}
    wanted |= {job_id: (wanted.get(job_id, (now, now))[0], now) for job_id in news}
    accounts = {
        job_id: account
        for job_id, account in found.accounts.items()
        if job_id in wanted or now - account.asked_s < _REMEMBERED_S
    }
    return replace(found, wanted=wanted, accounts=accounts)


def _is_queue_due(found: Kept, ids: Sequence[str], now: float, max_age_s: float) -> bool:
    if found.failed and now < found.failed.t_s + rate_limit.after_failure_s(found.failed.times):
        return False
    states = found.states()
    accounts = found.accounts
    left = [job_id for job_id in ids if job_id not in accounts or not is_finished(accounts[job_id].state)]
    # Of a job that somebody asked about only after the last answer, that answer says nothing.
    is_new = any(
        job_id not in states and job_id not in accounts and found.wanted.get(job_id, (now, now))[0] > found.asked_s
        for job_id in left
    )
    gap_s = min(found.wait_s, rate_limit.FIRST_S if is_new else max(rate_limit.FIRST_S, max_age_s))
    return bool(left) and now - found.asked_s >= gap_s


def _gone(found: Kept, now: float) -> list[str]:
    """Jobs that slurmctld does not know, and about which accounting is to be asked now."""
    failed = found.unaccounted
    if not found.asked_s or (failed and now < failed.t_s + rate_limit.after_failure_s(failed.times)):
        return []
    states = found.states()

    def is_due(job_id: str) -> bool:
        account = found.accounts.get(job_id)
        if account is None:
            return True
        return not is_finished(account.state) and now >= account.asked_s + rate_limit.gone_s(account.tries)

    return [
        job_id
        for job_id, (first, last) in found.wanted.items()
        if job_id not in states and first <= found.asked_s and now - last < _WANTED_S and is_due(job_id)
    ]


def _spent(path: Path, found: Kept, calls: int, now: float) -> Kept:
    found = replace(found, calls=rate_limit.left(found.calls, found.calls_s, now) - calls, calls_s=now)
    store.write(path, found)
    return found


def _queue(slurm: Client, found: Kept) -> Kept:
    began = time.time()
    try:
        jobs = slurm.mine()
    except PitError as error:
        return replace(found, failed=_failure(error, found.failed))
    before, now = found.states(), job_components.queued(jobs)
    # What was seen to have ended and is then forgotten cannot come back: accounting need not be asked.
    ended = {
        job_id: Account(state, found.asked_s)
        for job_id, state in before.items()
        if job_id in found.wanted and job_id not in now and is_finished(state)
    }
    accounts = {job_id: account for job_id, account in (found.accounts | ended).items() if job_id not in now}
    moved = any(now.get(job_id) != before.get(job_id) for job_id in found.wanted)
    fresh = any(
        first > found.asked_s and not is_finished(now.get(job_id, "COMPLETED"))
        for job_id, (first, _) in found.wanted.items()
    )
    wait_s = rate_limit.interval_s(found.wait_s, moved=moved, fresh=fresh)
    return replace(found, asked_s=began, jobs=tuple(jobs), wait_s=wait_s, failed=None, accounts=accounts)


def _accounts(slurm: Client, found: Kept, gone: Sequence[str]) -> Kept:
    began = time.time()
    try:
        jobs = slurm.accounting(gone, attempts=False)
    except PitError as error:
        if not isinstance(error, SlurmError) or error.reason is not SlurmReason.ACCOUNTING_DISABLED:
            return replace(found, unaccounted=_failure(error, found.unaccounted))
        jobs = []  # a cluster without accounting has said all that it will ever say
    said = job_components.accounted(job_components.Row(job.job_id, job.raw_id, job.state) for job in jobs)
    accounts = dict(found.accounts)
    for job_id in gone:
        tries = accounts[job_id].tries if job_id in accounts else 0
        # slurmctld does not have it, so it does not run: accounting may lag, and has lost the ends of jobs for good.
        state = said.get(job_id, UNKNOWN)
        accounts[job_id] = Account(state if is_finished(state) else UNKNOWN, began, tries + 1)
    return replace(found, accounts=accounts, unaccounted=None)


def _failure(error: PitError, before: Failure | None) -> Failure:
    return Failure(
        what=error.what,
        where=error.where,
        hint=error.hint,
        retry=error.retry,
        t_s=time.time(),
        times=before.times + 1 if before else 1,
    )
