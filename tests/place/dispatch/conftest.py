"""A queue over clusters in memory, which the tick takes for its sites."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from pitools.core import timestamps
from pitools.place import types
from pitools.place.dispatch import options, planner, reconcile, store, tick, tickets
from pitools.place.dispatch.journal import Entry, Job
from pitools.site.schema import Partition, Site
from tests.place.dispatch.fake_backends import SITES, Wait, World, snapshot


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., World]:
    """Makes a world, and lets the tick see it as its sites."""

    def make(seed: int, share: float) -> World:
        monkeypatch.setenv("PIT_PLACE", str(tmp_path / f"place{seed}"))
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
        made = World(store.root(), seed, share)
        write = reconcile.append

        def append(job: Job, entry: Entry) -> Job:
            made.faults.kill()
            after = write(job, entry)
            made.faults.kill()
            return after

        option = [types.Option(pool=f"{name}/train", units=1, run_s=9, limit_s=9) for name in SITES]
        monkeypatch.setattr(reconcile, "append", append)
        monkeypatch.setattr(tick, "load", lambda name: Site(name=name, partitions={"train": Partition()}))
        monkeypatch.setattr(tick, "read_snapshot", lambda site, **_: snapshot(site, made.clusters[site.name]))
        monkeypatch.setattr(tickets, "hands", lambda site: made.clusters[site.name])
        monkeypatch.setattr(options.Offers, "of", lambda *_: tuple(option))
        monkeypatch.setattr(options, "plan", lambda *_: None)
        for name in ("VOID_S", "REFUSED_S", "LEAD_S"):
            monkeypatch.setattr(planner, name, 0.0)
        return made

    return make


@pytest.fixture
def wait(monkeypatch: pytest.MonkeyPatch) -> Wait:
    """Lets so many seconds pass at once, for every clock that a tick reads."""
    now, now_s, ahead_s = timestamps.now, time.time, [0.0]
    monkeypatch.setattr(
        timestamps, "now", lambda: timestamps.text(datetime.fromisoformat(now()) + timedelta(seconds=ahead_s[0]))
    )
    monkeypatch.setattr(time, "time", lambda: now_s() + ahead_s[0])

    def pass_by(seconds: float) -> None:
        ahead_s[0] += seconds

    return pass_by
