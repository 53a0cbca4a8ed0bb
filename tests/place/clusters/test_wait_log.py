"""The log of what was foretold and what came of it."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from pitools.core.errors import Unreachable
from pitools.core.locks import lock_or_timeout
from pitools.place.clusters import wait_log


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Logs of the test's own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


def test_the_log_joins_what_was_foretold_to_what_came(home: Path) -> None:
    """In order of time, ends only once and only of what began; a line cut by a kill loses itself alone."""
    wait_log.record_predicted("x", "a", "x/gpu", 60.0, {"units": 8.0}, (1.0, 2.0, 3.0))
    path = home / "state" / "pitools" / "place-wait-log" / "x.jsonl"
    with path.open("a") as file:
        file.write('{"schema":"pit.wait-fo')
    wait_log.record_predicted("x", "b", "x/gpu", 70.0, {})
    began = time.time()
    wait_log.record_ended("x", "a", "x/gpu", started_s=began + 30)
    wait_log.record_ended("x", "a", "x/gpu", started_s=began + 99)
    wait_log.record_ended("x", "b", "x/gpu", started_s=None)
    wait_log.record_ended("x", "c", "x/gpu", started_s=began)
    lines = [(line.ticket, getattr(line, "started", None)) for line in wait_log.read_waits("x")]
    assert lines == [("a", None), ("b", None), ("b", False), ("a", True)]
    assert wait_log.read_waits("x")[0].quantiles == (1.0, 2.0, 3.0)
    assert wait_log.read_waits("y") == []
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_start_is_never_before_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm's starts are whole seconds, and clocks are set back: what started at once has started all the same."""
    now_s = time.time()
    monkeypatch.setattr(time, "time", lambda: now_s)
    for number, late_s in enumerate((-0.9, 0.0, -7200.0)):
        wait_log.record_predicted("x", str(number), "x/gpu", 60.0, {})
        wait_log.record_ended("x", str(number), "x/gpu", started_s=now_s + late_s)
    lines = wait_log.read_waits("x")
    assert [(line.ticket, getattr(line, "started", None)) for line in lines] == [
        (job, started) for job in "012" for started in (None, True)
    ]
    assert all(began.t_s <= over.t_s < began.t_s + 1 for began, over in zip(lines[::2], lines[1::2], strict=True))


def test_a_writer_that_is_stopped_holds_up_no_other(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record is given up while another process keeps the lock; what was recorded can be read meanwhile."""
    monkeypatch.setattr(wait_log, "_LOCK_S", 0.01)
    wait_log.record_predicted("x", "a", "x/gpu", 60.0, {})
    with lock_or_timeout(home / "state" / "pitools" / "place-wait-log" / "x.lock", 1.0):
        with pytest.raises(Unreachable):
            wait_log.record_predicted("x", "b", "x/gpu", 60.0, {})
        assert [line.ticket for line in wait_log.read_waits("x")] == ["a"]


def test_the_log_is_bounded(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When it is full the older half goes."""
    monkeypatch.setattr(wait_log, "MAX_LOG_BYTES", 10_000)
    for number in range(300):
        wait_log.record_transfer("x", number, 1.0)
    path = home / "state" / "pitools" / "place-wait-log" / "x.jsonl"
    assert 4_000 < path.stat().st_size < 10_200
    assert json.loads(path.read_text().splitlines()[-1])["bytes"] == 299
