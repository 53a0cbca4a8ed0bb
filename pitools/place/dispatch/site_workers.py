"""Act at several sites in parallel: a thread and a lock for each site, and a time-out for all.

An action that outlives the time-out goes on, while its tick ends. Ticks leave the site out until the action or its
process has ended, as the site's lock is held until then. The threads are no daemons: the process waits for them at its
exit, because an upload that every tick broke off might never be complete.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from pitools.core.errors import PitError, TryLater
from pitools.place.clusters.parallel import site_error
from pitools.place.dispatch import store

ACTION_TIMEOUT_S = 60.0


class SiteBusy(TryLater):
    """An action goes on at the site longer than its tick."""


class SiteWorkers:
    """The sites' locks and threads of one tick."""

    def __init__(self, queue_dir: Path) -> None:
        self._queue_dir = queue_dir
        self._mutex = threading.Lock()
        self._locks: dict[str, int] = {}
        self._running: set[str] = set()
        self._is_closed = False

    def lock(self, site: str) -> None:
        """Lock a site for this tick. Raises SiteBusy while an action of an earlier tick goes on there."""
        descriptor = store.try_lock(self._queue_dir / f"site.{site}.lock")
        if descriptor is None:
            raise SiteBusy("an action of an earlier tick goes on there", where=site, hint="see: pit place list")
        self._locks[site] = descriptor

    def run(self, sites: Iterable[str], act: Callable[[str], None], faults: dict[str, PitError]) -> None:
        """Call `act` for these sites, except where an action still goes on; record errors and time-outs as faults."""
        outcomes: dict[str, BaseException | None] = {}

        def work(site: str) -> None:
            try:
                act(site)
                outcomes[site] = None
            except BaseException as error:  # noqa: BLE001 - intents are in the journals; the next tick resolves them
                outcomes[site] = error
            finally:
                self._finish(site)

        threads = {
            site: threading.Thread(target=work, args=(site,)) for site in sorted(sites) if site not in self._running
        }
        self._running.update(threads)
        deadline = time.monotonic() + ACTION_TIMEOUT_S
        for thread in threads.values():
            thread.start()
        for site, thread in threads.items():
            thread.join(max(0.0, deadline - time.monotonic()))
            message = f"an action takes longer than {ACTION_TIMEOUT_S:g} s"
            outcome = outcomes.get(site, SiteBusy(message, where=site, hint="the site is left out until it ends"))
            if isinstance(outcome, Exception):
                faults[site] = site_error(site, outcome)
        for outcome in outcomes.values():
            if outcome is not None and not isinstance(outcome, Exception):
                raise outcome

    def _finish(self, site: str) -> None:
        with self._mutex:
            self._running.discard(site)
            if self._is_closed:
                os.close(self._locks.pop(site))

    def close(self) -> None:
        """Release the locks of the sites where no action goes on; the others are released at its end."""
        with self._mutex:
            self._is_closed = True
            for site in self._locks.keys() - self._running:
                os.close(self._locks.pop(site))
