"""What is followed is what a reader of everything sees, at the cost of what has changed."""

from __future__ import annotations

import itertools
import math
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pitools.launch.monitor import status
from pitools.launch.monitor.run_snapshot import RunSnapshot
from pitools.monitor.live.feed import Answer
from pitools.monitor.live.followed_runs import FollowedRuns
from pitools.monitor.live.site_feeds import make_feeds
from tests.monitor.fleet import Runs

MakeSite = Callable[..., Runs]


def set_times(root: Path, new_s: Callable[[float], float]) -> None:
    """Change the times of all folders."""
    for folder, _, _ in os.walk(root, topdown=False):
        changed_s = new_s(Path(folder).stat().st_mtime)
        os.utime(folder, (changed_s, changed_s))


@pytest.mark.parametrize("seed", range(2))
def test_what_is_followed_is_what_is_there(make_site: MakeSite, seed: int) -> None:
    """After each of 60 changes in any order, the records are those of a reader that reads every file again.

    Also on a file system whose times are whole seconds.
    """
    runs, chance = make_site("east"), random.Random(seed)
    followed = FollowedRuns(runs.root, runs.site)
    attempts: dict[Path, int] = {}
    steps: dict[Path, int] = {}
    for _ in range(60):
        change = chance.choice(["add", "steps", "steps", "attempt", "end", "again", "progress", "nothing"])
        open_runs = [run for run in attempts if not (run / "verdict.json").exists()]
        run_dir = chance.choice(open_runs) if open_runs else None
        if change == "add" or run_dir is None:
            run_dir = runs.add(age_s=chance.randrange(9999))
            attempts[run_dir], steps[run_dir] = 0, 0
        elif change == "steps":
            runs.log(run_dir, steps[run_dir], steps[run_dir] + 2, attempt=attempts[run_dir])
            steps[run_dir] += 2
        elif change == "attempt":
            runs.end(run_dir, attempts[run_dir], "PREEMPTED", 1)
            attempts[run_dir] += 1
            runs.start(run_dir, attempts[run_dir], 1)
        elif change == "end":
            runs.end(run_dir, attempts[run_dir], chance.choice(["COMPLETED", "FAILED"]), 1)
        elif change == "again" and (ended := [run for run in attempts if (run / "verdict.json").exists()]):
            (ended[0] / "verdict.json").unlink()
        elif change == "progress":
            (run_dir / "progress").write_text(str(chance.randrange(1000)))
        set_times(runs.root, math.floor)
        polled = {run.run_dir: run.record for run in followed.poll({})}
        fresh = status.run_statuses(sorted(attempts), runs.site)
        assert polled == {Path(record.run_dir): record for record in fresh}


def test_only_what_changed_is_read(make_site: MakeSite, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 20 runs none is read again while nothing changes; one that goes on is, and a step costs no reading at all."""
    runs = make_site("east")
    run_dirs = [runs.add(state=state, age_s=60 + n) for n, state in enumerate(["COMPLETED", "RUNNING"] * 10)]
    for run_dir in run_dirs:
        runs.log(run_dir, 0, 5)
    set_times(runs.root, lambda _: 1e9)
    read: list[Path] = []
    whole = RunSnapshot.read
    monkeypatch.setattr(RunSnapshot, "read", lambda path: read.append(path) or whole(path))
    followed = FollowedRuns(runs.root, runs.site)

    def polled() -> list[Path]:
        read.clear()
        followed.poll({})
        return read

    assert sorted(polled()) == sorted(run_dirs)
    assert polled() == []
    runs.log(run_dirs[1], 5, 9)
    assert polled() == []
    assert {run.run_dir: run.record.steps for run in followed.poll({}) if run.record}[run_dirs[1]] == 9
    runs.end(run_dirs[1], 0, "FAILED", 0)
    assert polled() == [run_dirs[1]]


def test_a_damaged_run_hides_no_other(make_site: MakeSite) -> None:
    """Its problem is there while it lasts, and the others' records are."""
    runs = make_site("east")
    damaged, other = runs.add(), runs.add()
    plan = (damaged / "plan.json").read_bytes()
    (damaged / "plan.json").write_bytes(b"{")
    followed = FollowedRuns(runs.root, runs.site)
    first, second = followed.poll({})
    assert (first.record, second.record and second.record.run_id) == (None, other.name)
    assert first.problem
    (damaged / "plan.json").write_bytes(plan)
    assert [run.problem for run in followed.poll({})] == [None, None]


def test_what_the_screen_has_stays_as_it_was(make_site: MakeSite) -> None:
    """While the thread reads on, no run that it has handed out changes."""
    runs = make_site("east")
    run_dir = runs.add()
    followed = FollowedRuns(runs.root, runs.site)
    (first,) = followed.poll({})
    runs.log(run_dir, 0, 5)
    (second,) = followed.poll({})
    (run_dir / "plan.json").write_bytes(b"{")
    (third,) = followed.poll({})
    assert [run.record and run.record.steps for run in (first, second, third)] == [0, 5, None]
    assert [bool(run.problem) for run in (first, second, third)] == [False, False, True]


def test_a_ledger_goes_with_its_run(make_site: MakeSite) -> None:
    """Of a run that is no longer there nothing is kept; of a damaged one nothing is made, and the others' are."""
    runs = make_site("east")
    damaged, run_dir = runs.add(), runs.add()
    runs.log(run_dir, 0, 5)
    (site,) = make_feeds(["east"])
    assert site.runs
    assert site.ledgers
    site.runs.answer = Answer(site.runs._call(), 0.0, None)
    (damaged / "plan.json").write_bytes(b"{")
    for _ in range(3):
        site.ledgers.answer = Answer(site.ledgers._call(), 0.0, None)
    assert set(site.ledgers.answer.value or ()) == {run_dir.name}
    site.runs.answer = Answer([], 0.0, None)
    assert site.ledgers._call() == {}


def test_each_run_soon_has_its_first_ledger(make_site: MakeSite, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ten ledgers of 0.1 s CPU the first are made within 34 s, 3 % of a core; then renewing takes 0.2 %."""
    runs, waits = make_site("east"), list[float]()
    for _ in range(10):
        runs.add()
    (site,) = make_feeds(["east"])
    assert site.runs
    assert site.ledgers
    site.runs.answer = Answer(site.runs._call(), 0.0, None)
    monkeypatch.setattr(time, "thread_time", itertools.count(0.0, 0.1).__next__)
    monkeypatch.setattr(site.ledgers._stop, "is_set", lambda: len(waits) == 10)
    monkeypatch.setattr(site.ledgers._stop, "wait", waits.append)
    site.ledgers._run()
    assert len(site.ledgers.answer.value or ()) == 10
    assert sum(waits) < 34
    waits.pop()
    site.runs.answer = Answer([run._replace(step_at=9.0) for run in site.runs._call()], 0.0, None)
    monkeypatch.setattr(time, "monotonic", lambda clock=time.monotonic: clock() + 31)
    site.ledgers._run()
    assert waits[-1] == pytest.approx(50)
