"""Make the ledgers of a site's runs, one after the other, in a thread that takes little of a core."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping

from pitools.ledger.records import RunLedger
from pitools.ledger.run_ledger import run_ledger
from pitools.monitor.live.feed import Feed
from pitools.monitor.live.followed_runs import FollowedRun
from pitools.run.run_folder import run_id_sort_key

_SHARE, _FIRST_SHARE = 0.002, 0.03  # of a core; while a run has none yet
_EVERY_S = 0.2
_RENEW_S = 30.0  # of a run that goes on


class Ledgers(Feed[dict[str, RunLedger]]):
    """The ledgers by run id, each as it was when it was last made; of a run that cannot be accounted there is none.

    They are made of the runs' folders alone, without the rows of `sacct`.
    """

    def __init__(self, runs: Feed[list[FollowedRun]]) -> None:
        super().__init__("ledgers", self._renew, _EVERY_S)
        self._runs = runs
        self._made: dict[str, tuple[float, object]] = {}

    def _renew(self) -> dict[str, RunLedger]:
        """Make the ledger that is due most, if one is."""
        runs = {run.run_dir.name: run for run in self._runs.answer.value or ()}
        self._made = {name: made for name, made in self._made.items() if name in runs}
        ledgers = {name: ledger for name, ledger in (self.answer.value or {}).items() if name in runs}
        name = self._next(runs)
        self.share = _FIRST_SHARE if name not in self._made else _SHARE
        if name:
            self._made[name] = time.monotonic(), _version(runs[name])
            with contextlib.suppress(Exception):  # damaged in any way: the ledgers of the others are made
                ledgers[name] = run_ledger(runs[name].run_dir)
        return ledgers

    def _next(self, runs: Mapping[str, FollowedRun]) -> str:
        """Return the run whose ledger is due, "" for none: new ones first, then running ones, then the newest."""
        now_s, due = time.monotonic(), []
        for name, run in runs.items():
            made_s, version = self._made.get(name, (-_RENEW_S, None))
            if run.record and run.record.attempts and now_s - made_s >= _RENEW_S and version != _version(run):
                due.append((version is None, run.record.state == "RUNNING", run_id_sort_key(name), name))
        return max(due)[3] if due else ""


def _version(run: FollowedRun) -> tuple[object, ...]:
    """Return what changes with a run's ledger."""
    return run.step_at, run.ended_at, run.record and run.record.attempts
