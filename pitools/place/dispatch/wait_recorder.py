"""Record the predicted and actual waits of the queue's tickets in clusters/wait_log.py, for later predictions.

Recording makes no query. A record that cannot be written is dropped: no job waits for it.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache

from pitools.core.errors import PitError
from pitools.place.clusters import pools, wait_log
from pitools.place.dispatch.journal import EntryKind, QueueJob, QueueTicket
from pitools.place.estimate import wait_model
from pitools.place.types import PlacementOption, PoolState, Submit, site_of

_RAN = (EntryKind.STARTED, EntryKind.STOPPED, EntryKind.ENDED)


class WaitRecorder:
    """Records the predicted wait of each ticket submitted in a tick, from Slurm's estimate as `pools` computes it."""

    def __init__(self, pools: Mapping[str, PoolState], options: Callable[[str], Sequence[PlacementOption]]) -> None:
        self._pools, self._options = pools, options
        self._ahead: Counter[str] = Counter()
        self._read_waits = lru_cache(wait_log.read_waits)
        self._predict = lru_cache(self._calibrated)

    def add_pending(self, jobs: Sequence[QueueJob]) -> None:
        """Count the units of our pending tickets: they start before the tickets of this tick."""
        for job in jobs:
            for ticket in job.live:
                if ticket.is_queued:
                    self._ahead[ticket.pool] += self._units(job.job_id, ticket.pool)

    def record_submission(self, submit: Submit, name: str) -> None:
        """Record the predicted wait of a ticket of this name, which is in the pool's queue now."""
        pool = self._pools[submit.pool]
        option = next((o for o in self._options(submit.job_id) if o.pool == submit.pool), None)
        if option is None:
            return
        own_units = self._ahead[submit.pool]
        self._ahead[submit.pool] += option.units
        estimate_s = pools.estimate_start_s(pool, self._ahead[submit.pool], option.limit_s, time.time())
        if estimate_s == float("inf"):
            return  # unknown
        estimate_s = float(round(estimate_s))
        features = wait_model.log_features(pool, option.units, option.limit_s, own_units=own_units)
        with contextlib.suppress(PitError):
            quantiles = self._predict(submit.pool, estimate_s, tuple(features.items()))
            wait_log.record_predicted(site_of(submit.pool), name, submit.pool, estimate_s, features, quantiles)

    def _units(self, job_id: str, pool: str) -> int:
        return next((option.units for option in self._options(job_id) if option.pool == pool), 0)

    def _calibrated(
        self, pool: str, estimate_s: float, features: tuple[tuple[str, float], ...]
    ) -> wait_model.Quantiles | None:
        waits = [wait for wait in self._read_waits(site_of(pool)) if wait.pool == pool]
        return wait_model.calibrate(estimate_s, dict(features), waits, time.time())


def record_wait_end(ticket: QueueTicket, kind: EntryKind, started_at: str, is_cancelled: bool) -> None:
    """Record the end of a wait, if an entry of this kind ends it. started_at: start time by Slurm, if known.

    To be called before the entry is written: a repeated record does no harm, a missing one is a wait without an end.
    """
    if not ticket.is_queued or kind not in (*_RAN, EntryKind.VOID, EntryKind.REFUSED, EntryKind.DEFERRED):
        return
    started_s = None
    if kind in _RAN and not is_cancelled:
        started_s = time.time()
        with contextlib.suppress(ValueError):
            started_s = min(started_s, datetime.fromisoformat(started_at).timestamp())
    with contextlib.suppress(PitError):
        wait_log.record_ended(ticket.site, ticket.name, ticket.pool, started_s=started_s)


def record_site_transfer(site: str, n_bytes: int, wall_s: float) -> None:
    """Record the duration of a transfer to a site."""
    with contextlib.suppress(PitError):
        wait_log.record_transfer(site, n_bytes, wall_s)
