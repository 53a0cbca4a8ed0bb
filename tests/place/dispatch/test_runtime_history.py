"""What ended jobs teach of those that wait."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from pitools.core import timestamps
from pitools.launch.request import Request
from pitools.place.dispatch import store
from pitools.place.dispatch.journal import EntryKind, JournalEntry, QueuedRequest, append_entry
from pitools.place.dispatch.runtime_history import MIN_RUNS, RuntimeHistory
from pitools.place.types import PlacementOption

OPTION = PlacementOption(pool="x/gpu", units=1, run_s=36000.0, limit_s=36000.0)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PIT_QUEUE", str(tmp_path / "place"))
    return store.queue_dir()


def asked(name: str = "bc", owner: str = "ada") -> QueuedRequest:
    return store.make_request(Request(name=name, command="true", time="10h"), ("x",), user=owner)


def ended(place: Path, run_s: float, count: int = 1, pool: str = "x/gpu", *, began_as: str = "started") -> None:
    """So many jobs that ran so long there. began_as: the kind of the entry before the end."""
    for job in store.enqueue(place, [asked() for _ in range(count)]):
        began = datetime.now(UTC) - timedelta(days=1)
        for case, after_s, state in (("submit", 0.0, ""), (began_as, 30.0, ""), ("ended", 30 + run_s, "COMPLETED")):
            t = timestamps.to_rfc3339(began + timedelta(seconds=after_s))
            append_entry(job, JournalEntry(t=t, kind=EntryKind(case), ticket=1, pool=pool, state=state))
        store.archive(place, job)


def test_a_kind_is_expected_to_run_as_it_ran(place: Path) -> None:
    """Ten hours asked for, half an hour used: after a few of them that is what the next is expected to take."""
    runtime_history = RuntimeHistory(place)
    ended(place, 1800.0, MIN_RUNS - 1)
    runtime_history.update(lambda _: 1.0)
    assert runtime_history.with_predicted_run(asked(), OPTION, lambda _: 1.0) is OPTION
    ended(place, 1800.0, 40)
    runtime_history.update(lambda _: 1.0)
    assert 900 < runtime_history.with_predicted_run(asked(), OPTION, lambda _: 1.0).run_s < 3600
    assert runtime_history.with_predicted_run(asked(owner="bob"), OPTION, lambda _: 1.0) is OPTION
    brief = PlacementOption(pool="x/gpu", units=1, run_s=60.0, limit_s=36000.0)
    assert runtime_history.with_predicted_run(asked(), brief, lambda _: 1.0) is brief


def test_speed_counts(place: Path) -> None:
    """What took an hour where nodes are half as fast takes a quarter of that where they are twice as fast."""
    runtime_history = RuntimeHistory(place)
    ended(place, 3600.0, 40, pool="x/slow")
    speeds = {"x/slow": 0.5, "x/gpu": 1.0, "x/fast": 2.0}
    runtime_history.update(speeds.__getitem__)
    slow = PlacementOption(pool="x/slow", units=1, run_s=72000.0, limit_s=72000.0)
    fast = PlacementOption(pool="x/fast", units=1, run_s=18000.0, limit_s=36000.0)
    took = {
        item.pool: runtime_history.with_predicted_run(asked(), item, speeds.__getitem__).run_s
        for item in (slow, OPTION, fast)
    }
    assert took["x/slow"] == pytest.approx(2 * took["x/gpu"]) == pytest.approx(4 * took["x/fast"])


def test_what_never_ran_teaches_nothing(place: Path) -> None:
    """A job whose last ticket ended before its first command has no run time."""
    ended(place, 5.0, MIN_RUNS, began_as="void")
    runtime_history = RuntimeHistory(place)
    runtime_history.update(lambda _: 1.0)
    assert runtime_history.with_predicted_run(asked(), OPTION, lambda _: 1.0) is OPTION


def test_what_cannot_be_read_teaches_nothing(place: Path) -> None:
    """A broken journal, a file and a folder that is no job are passed over, once."""
    ended(place, 1800.0)
    (job,) = (place / "done").iterdir()
    (job / "journal.jsonl").write_text("x\n")
    (place / "done" / "notes").write_text("")
    (place / "done" / "empty").mkdir()
    runtime_history = RuntimeHistory(place)
    runtime_history.update(lambda _: 1.0)
    assert runtime_history.with_predicted_run(asked(), OPTION, lambda _: 1.0) is OPTION
