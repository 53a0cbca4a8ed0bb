"""Make the ledgers of a site's runs, one after the other, in a thread that takes little of a core."""

from __future__ import annotations

import contextlib
import threading
import time

from pitools.ledger.records import RunLedger
from pitools.ledger.run_ledger import run_ledger
from pitools.monitor.live.feed import Feed
from pitools.monitor.live.followed_runs import FollowedRun
from pitools.run.run_folder import run_id_sort_key

_SHARE, _FIRST_SHARE = 0.005, 0.1  # of a core; while a run has none yet
_MIN_WAIT_S = 0.2
_RENEW_S = 30.0  # of a run that goes on


class Ledgers:
    """The ledgers by run id, each as it was when it was last made; of a run that cannot be accounted there is none."""

    def __init__(self, runs: Feed[list[FollowedRun]]) -> None:
        self.by_run: dict[str, RunLedger] = {}
        self._runs = runs
        self._made: dict[str, tuple[float, object]] = {}
        self._stop = threading.Event()

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._run, name="ledgers", daemon=True).start()

    def stop(self) -> None:
        """Make no more."""
        self._stop.set()

    def _run(self) -> None:
        wait_s = _MIN_WAIT_S
        while not self._stop.wait(wait_s):
            began_s, made = time.thread_time(), len(self._made)
            if run := self._next():
                self._make(run)
            share = _FIRST_SHARE if len(self._made) > made else _SHARE
            wait_s = max(_MIN_WAIT_S, (time.thread_time() - began_s) / share)

    def _make(self, run: FollowedRun) -> None:
        name = run.run_dir.name
        self._made[name] = time.monotonic(), _version(run)
        with contextlib.suppress(Exception):  # damaged in any way: the ledgers of the others are made
            self.by_run[name] = run_ledger(run.run_dir)

    def _next(self) -> FollowedRun | None:
        """Return the run whose ledger is due: running ones and new ones first."""
        now_s = time.monotonic()
        due = []
        runs = self._runs.answer.value or []
        for name in self._made.keys() - {run.run_dir.name for run in runs}:
            del self._made[name]
            self.by_run.pop(name, None)
        for run in runs:
            record = run.record  # once: the feed's thread sets it to None
            made_s, version = self._made.get(run.run_dir.name, (-_RENEW_S, None))
            if record and record.attempts and now_s - made_s >= _RENEW_S and version != _version(run):
                due.append((version is None, record.state == "RUNNING", run_id_sort_key(run.run_dir.name), run))
        return max(due, key=lambda each: each[:3])[3] if due else None


def _version(run: FollowedRun) -> tuple[object, ...]:
    """Return what changes with a run's ledger."""
    record = run.record
    return run.step_at, run.ended_at, record and record.attempts
