"""A queue over clusters in memory, which the tick takes for its sites."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

from pitools.core import timestamps
from pitools.place import types
from pitools.place.dispatch import continuation, options, planner, queue_state, store, tick, tickets
from pitools.place.dispatch.journal import JournalEntry, QueueJob
from pitools.run.attempt_records import Cause, Decision
from pitools.site.schema import Paths, Site, SitePartition
from tests.place.dispatch.fake_backends import SITES, Wait, World, snapshot


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., World]:
    """Makes a world, and lets the tick see it as its sites."""

    def make(seed: int, share: float) -> World:
        monkeypatch.setenv("PIT_QUEUE", str(tmp_path / f"place{seed}"))
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
        created = World(store.queue_dir(), seed, share)
        write = queue_state.append_entry

        def append(job: QueueJob, entry: JournalEntry) -> QueueJob:
            created.faults.kill()
            after = write(job, entry)
            created.faults.kill()
            return after

        option = [types.PlacementOption(pool=f"{name}/train", units=1, run_s=9, limit_s=9) for name in SITES]
        monkeypatch.setattr(queue_state, "append_entry", append)
        monkeypatch.setattr(
            tick,
            "load_site",
            lambda name: Site(name=name, paths=Paths(runs="/runs"), partitions={"train": SitePartition()}),
        )
        monkeypatch.setattr(
            tick.snapshot, "read_snapshot", lambda site, **_: snapshot(site, created.clusters[site.name])
        )
        monkeypatch.setattr(tickets, "backend", lambda site: created.clusters[site.name])
        monkeypatch.setattr(options.OptionCache, "options", lambda *_: tuple(option))
        monkeypatch.setattr(options, "make_job_plan", lambda *_: SimpleNamespace(data=()))
        # What a run left: test_continuation.py.
        cause = Cause(attempt="0", kind="preempted", confidence="certain", reason="preempted")
        go_on = Decision(attempt="0", action="resubmit", kind="preempted", reason="")
        monkeypatch.setattr(continuation, "decide", lambda *_: (go_on, cause))
        monkeypatch.setattr(
            continuation,
            "submit",
            lambda plan, site, *, name, run_dir: created.clusters[site.name].submit_ticket(plan, site, name=name),
        )
        for name in ("RETRY_VOID_S", "RETRY_REFUSED_S", "LEAD_S"):
            monkeypatch.setattr(planner, name, 0.0)
        return created

    return make


@pytest.fixture
def wait(monkeypatch: pytest.MonkeyPatch) -> Wait:
    """Lets so many seconds pass at once, for every clock that a tick reads."""
    now, now_s, ahead_s = timestamps.now_rfc3339, time.time, [0.0]
    monkeypatch.setattr(
        timestamps,
        "now_rfc3339",
        lambda: timestamps.to_rfc3339(datetime.fromisoformat(now()) + timedelta(seconds=ahead_s[0])),
    )
    monkeypatch.setattr(time, "time", lambda: now_s() + ahead_s[0])

    def pass_by(seconds: float) -> None:
        ahead_s[0] += seconds

    return pass_by
