"""What the queue notes of its tickets' waits, for those that come after: see clusters/local_history.py.

It is told from what the tick knows anyway, and asks nobody. What cannot be noted is not: no job waits for that.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache

from pitools.core.errors import PitError
from pitools.place.clusters import local_history, pools
from pitools.place.dispatch.journal import EntryKind, QueueJob, QueueTicket
from pitools.place.estimate import wait_model
from pitools.place.types import PlacementOption, PoolState, Submit

_WAITING_STATES = ("intended", "waiting", "taken")
_RAN = (EntryKind.STARTED, EntryKind.ENDED)


class WaitRecorder:
    """Says of each ticket that is placed in a tick how long it will wait: until enough of what runs has ended."""

    def __init__(self, pools: Mapping[str, PoolState], options: Callable[[str], Sequence[PlacementOption]]) -> None:
        self._pools, self._options = pools, options
        self._ahead: Counter[str] = Counter()
        self._noted = lru_cache(local_history.read_waits)
        self._said = lru_cache(self._calibrated)

    def add_waiting(self, jobs: Sequence[QueueJob]) -> None:
        """Those of ours that wait already: they come first."""
        for job in jobs:
            for ticket in job.live:
                if ticket.state in _WAITING_STATES:
                    self._ahead[ticket.pool] += self._units(job.job_id, ticket.pool)

    def record_submission(self, submit: Submit, name: str) -> None:
        """Note what is foretold for a ticket of this name, which is in the pool's queue now."""
        pool = self._pools[submit.pool]
        option = next((one for one in self._options(submit.job_id) if one.pool == submit.pool), None)
        if option is None:
            return
        need = self._ahead[submit.pool] + option.units - pool.free
        self._ahead[submit.pool] += option.units
        raw_s = pools.wait_until_free_s(list(pool.running), need, time.time())
        if raw_s == float("inf"):
            return  # nobody can tell
        raw_s = float(round(raw_s))
        features = {
            "units": float(option.units),
            "limit_s": option.limit_s,
            "ahead": pool.others_pending / pool.units if pool.units else 0.0,
        }
        with contextlib.suppress(PitError):
            said = self._said(submit.pool, raw_s, tuple(features.items()))
            local_history.record_predicted(submit.pool.partition("/")[0], name, submit.pool, raw_s, features, said)

    def _units(self, job_id: str, pool: str) -> int:
        return next((one.units for one in self._options(job_id) if one.pool == pool), 0)

    def _calibrated(
        self, pool: str, raw_s: float, features: tuple[tuple[str, float], ...]
    ) -> wait_model.Quantiles | None:
        mine = [line for line in self._noted(pool.partition("/")[0]) if line.pool == pool]
        return wait_model.calibrate(raw_s, dict(features), mine, time.time())


def record_wait_end(ticket: QueueTicket, kind: EntryKind, started_at: str, is_cancelled: bool) -> None:
    """Note the end of a wait, if an entry of the journal is one. started_at: when Slurm says that it started.

    Comes before the entry: it is safe to repeat, and without it the ticket would seem to wait for ever.
    """
    if ticket.state not in _WAITING_STATES or kind not in (*_RAN, EntryKind.VOID, EntryKind.REFUSED):
        return
    started_s = None
    if kind in _RAN and not is_cancelled:
        started_s = time.time()
        with contextlib.suppress(ValueError):
            started_s = min(started_s, datetime.fromisoformat(started_at).timestamp())
    with contextlib.suppress(PitError):
        local_history.record_ended(ticket.site, ticket.name, ticket.pool, started_s=started_s)


def record_site_transfer(site: str, n_bytes: int, wall_s: float) -> None:
    """Note how long data took to get there."""
    with contextlib.suppress(PitError):
        local_history.record_transfer(site, n_bytes, wall_s)
