"""What Slurm says of our jobs, asked once for every terminal and cron job of a user: `states`, `ask`, `changed`.

A folder keeps the last answer of each cluster. Whoever finds it due asks, for all of the user's jobs at once; the
others read, or wait for, that answer. Accounting is asked about jobs that slurmctld has forgotten, and nothing else.
However many look, both daemons together get no more than `rate_limit.py` allows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from pitools.core.errors import ClusterError, Unreachable
from pitools.core.locks import taken
from pitools.core.user_dirs import ensure_private_dir, xdg_dir
from pitools.launch.slurm_cache import refresh, store
from pitools.launch.slurm_cache.store import CachedAnswers, QueryFailure
from pitools.site.connect import client
from pitools.site.schema import Site
from pitools.slurm import argv, job_components
from pitools.slurm.states import UNKNOWN, is_finished

__all__ = ["CachedState", "cached_states", "invalidate", "require_states"]


class CachedState(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one job.

    state: UNKNOWN where the last question failed, or where nobody knows the job; a state that is final stays. age_s:
    since the last good answer was asked for, infinite where there was none. last_known_state: the last state that was
    told, "" for none. failure: why there is no newer answer, None where there is one. lost: asked again and again, for
    a minute or more, neither slurmctld nor accounting has ever heard of it. reason, start: of a job that waits, why and
    when it is expected to start, as Slurm said last; "" where it does not say.
    """

    state: str
    age_s: float
    last_known_state: str = ""
    failure: QueryFailure | None = None
    lost: bool = False
    reason: str = ""
    start: str = ""


def cached_states(site: Site, ids: Sequence[str], *, max_age_s: float = math.inf) -> dict[str, CachedState]:
    """What is known of each job of a site, for next to nothing: call it as often as you like.

    max_age_s: have it newer than this where that can be afforded; else it is as new as everybody's. A question that
    fails raises nothing: it is no answer, and says so. Raises ClusterError where others can write to what is kept.
    """
    # What is no job id is nobody's, and must not spoil the question for the others.
    good = [job_id for job_id in ids if argv.is_job_id(job_id)]
    found = _refresh_if_due(site, good, max_age_s) if good else CachedAnswers()
    now, known, waiting = time.time(), found.states(), job_components.pending_by_id(found.jobs)
    told = {job_id: _state_of(found, known, job_id, now) for job_id in ids}
    for job_id in waiting.keys() & told.keys():
        row = waiting[job_id]
        told[job_id] = msgspec.structs.replace(told[job_id], reason=row.reason, start=row.start)
    return told


def _refresh_if_due(site: Site, ids: Sequence[str], max_age_s: float) -> CachedAnswers:
    path = _cache_path(site)
    found = store.read_cache(path)
    if not refresh.is_due(found, ids, time.time(), max_age_s):
        return found
    # Who knows enough does not wait for what another is asking.
    known = found.states()
    knows = all(job_id in known or job_id in found.accounts for job_id in ids)
    with taken(path.with_suffix(".lock"), 0 if knows else 2 * site.connection.timeout_s) as had:
        found = store.read_cache(path)
        return refresh.refresh(client(site), path, found, ids, max_age_s) if had else found


def require_states(site: Site, ids: Sequence[str], *, max_age_s: float = math.inf) -> dict[str, str]:
    """The state of each job; UNKNOWN, never a finished state, for what neither slurmctld nor accounting knows.

    Raises Unreachable, or ClusterError, where the last question failed and not all have ended.
    """
    said = cached_states(site, ids, max_age_s=max_age_s)
    for told in said.values():
        if told.failure and told.state == UNKNOWN:
            kind = Unreachable if told.failure.retry else ClusterError
            raise kind(told.failure.message, where=told.failure.where, hint=told.failure.hint)
    return {job_id: told.state for job_id, told in said.items()}


def invalidate(site: Site) -> None:
    """Our jobs there are other ones than they were: what is kept is asked for again. Raises as `states`."""
    path = _cache_path(site)
    with taken(path.with_suffix(".lock"), site.connection.timeout_s) as had:
        if had:
            store.write_cache(path, msgspec.structs.replace(store.read_cache(path), wait_s=0.0))


def _cache_path(site: Site) -> Path:
    # Not $XDG_RUNTIME_DIR, which a cron job has not.
    what = "what is kept here says which jobs have ended, and others can write to it"
    return (
        ensure_private_dir(xdg_dir("XDG_CACHE_HOME", ".cache") / "pitools" / "slurm-cache", what)
        / f"{store.cache_key(site)}.json"
    )


def _state_of(found: CachedAnswers, known: Mapping[str, str], job_id: str, now: float) -> CachedState:
    account = found.accounts.get(job_id)
    answered_s, was, failure = found.queried_at_s, known.get(job_id, ""), found.failed
    if not was:
        failure = failure or found.accounting_failure
        answered_s, was = (account.queried_at_s, account.state) if account else (answered_s, "")
    age_s = max(0.0, now - answered_s) if answered_s else math.inf
    if is_finished(was):
        return CachedState(state=was, age_s=age_s, last_known_state=was)
    lost = account is not None and was == UNKNOWN and account.tries >= refresh.LOST_AFTER_TRIES
    return CachedState(
        state=UNKNOWN if failure else was or UNKNOWN, age_s=age_s, last_known_state=was, failure=failure, lost=lost
    )
