"""A cache of the states of a user's jobs, shared by all of the user's processes: one squeue serves all of them.

A file holds the last squeue answer of each cluster. The first process to find it due queries all jobs of the user; the
other processes read, or wait for, that answer. sacct is queried only for jobs that slurmctld has dropped. For any
number of processes, the calls to both daemons stay within `rate_limit.py`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from pitools.core.errors import ClusterError, Unreachable
from pitools.core.locks import lock_or_timeout
from pitools.core.user_dirs import ensure_private_dir, xdg_dir
from pitools.launch.slurm_cache import refresh, store
from pitools.launch.slurm_cache.store import CachedAnswers, QueryFailure
from pitools.site.connect import client
from pitools.site.schema import Site
from pitools.slurm import argv, job_components
from pitools.slurm.states import UNKNOWN, is_final

__all__ = ["CachedState", "cached_states", "invalidate", "require_states"]


class CachedState(msgspec.Struct, frozen=True, kw_only=True):
    """The cached state of one job.

    state: UNKNOWN after a failed query, or if neither slurmctld nor accounting has the job; a final state stays. age_s:
    seconds since the last successful query, infinite without one. failure: of the last query, None if it succeeded.
    lost: whether neither daemon has had the job in repeated queries over a minute or more. reason, start: of a pending
    job, Slurm's reason and expected start; "" for none.
    """

    state: str
    age_s: float
    failure: QueryFailure | None = None
    lost: bool = False
    reason: str = ""
    start: str = ""


def cached_states(site: Site, ids: Sequence[str], *, max_age_s: float = math.inf) -> dict[str, CachedState]:
    """Return the cached state of each job of a site, after a query if one is due. Cheap to call often.

    max_age_s: query for a newer answer than this, within the rate limit. A failed query does not raise: it is in
    `failure`. Raises ClusterError for a cache folder that other users can write to.
    """
    # An invalid job id would make the query fail for all others.
    valid_ids = [job_id for job_id in ids if argv.is_job_id(job_id)]
    answers = _refresh_if_due(site, valid_ids, max_age_s) if valid_ids else CachedAnswers()
    now, squeue_states, pending = time.time(), answers.states(), job_components.pending_by_id(answers.jobs)
    cached = {job_id: _state_of(answers, squeue_states, job_id, now) for job_id in ids}
    for job_id in pending.keys() & cached.keys():
        row = pending[job_id]
        cached[job_id] = msgspec.structs.replace(cached[job_id], reason=row.reason, start=row.start)
    return cached


def _refresh_if_due(site: Site, ids: Sequence[str], max_age_s: float) -> CachedAnswers:
    path = _cache_path(site)
    answers = store.read_cache(path)
    if not refresh.is_due(answers, ids, time.time(), max_age_s):
        return answers
    # A caller with an older answer for all its jobs does not wait for another process's query.
    states = answers.states()
    has_all = all(job_id in states or job_id in answers.accounts for job_id in ids)
    with lock_or_timeout(path.with_suffix(".lock"), 0 if has_all else 2 * site.connection.timeout_s) as is_locked:
        answers = store.read_cache(path)
        return refresh.refresh(client(site), path, answers, ids, max_age_s) if is_locked else answers


def require_states(site: Site, ids: Sequence[str], *, max_age_s: float = math.inf) -> dict[str, str]:
    """Return the state of each job; UNKNOWN, never a finished state, for a job in neither slurmctld nor accounting.

    Raises Unreachable, or ClusterError, if the last query failed and not all jobs have ended.
    """
    cached = cached_states(site, ids, max_age_s=max_age_s)
    for job in cached.values():
        if job.failure and job.state == UNKNOWN:
            kind = Unreachable if job.failure.retry else ClusterError
            raise kind(job.failure.message, where=job.failure.where, hint=job.failure.hint)
    return {job_id: job.state for job_id, job in cached.items()}


def invalidate(site: Site) -> None:
    """Make a new query due, after a submission or cancellation. Raises the errors of `cached_states`."""
    path = _cache_path(site)
    with lock_or_timeout(path.with_suffix(".lock"), site.connection.timeout_s) as is_locked:
        if is_locked:
            store.write_cache(path, msgspec.structs.replace(store.read_cache(path), wait_s=0.0))


def _cache_path(site: Site) -> Path:
    # Not $XDG_RUNTIME_DIR, which a cron job does not have.
    problem = "cache of job states: other users can write to it"
    return (
        ensure_private_dir(xdg_dir("XDG_CACHE_HOME", ".cache") / "pitools" / "slurm-cache", problem)
        / f"{store.cache_key(site)}.json"
    )


def _state_of(answers: CachedAnswers, squeue_states: Mapping[str, str], job_id: str, now: float) -> CachedState:
    account = answers.accounts.get(job_id)
    answered_s, last_state, failure = answers.queried_at_s, squeue_states.get(job_id, ""), answers.squeue_failure
    if not last_state:
        failure = failure or answers.accounting_failure
        answered_s, last_state = (account.queried_at_s, account.state) if account else (answered_s, "")
    age_s = max(0.0, now - answered_s) if answered_s else math.inf
    if is_final(last_state):
        return CachedState(state=last_state, age_s=age_s)
    lost = account is not None and last_state == UNKNOWN and account.tries >= refresh.LOST_AFTER_TRIES
    return CachedState(
        state=UNKNOWN if failure else last_state or UNKNOWN,
        age_s=age_s,
        failure=failure,
        lost=lost,
    )
