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
from pitools.launch.slurm_cache import CachedState
from pitools.launch.submission import local_process
from pitools.monitor.live import followed_runs, ledgers
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


def test_a_state_is_renewed_without_a_change_in_the_folder(
    make_site: MakeSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of a job as soon as Slurm says another, that of a process of this machine within 11 s."""
    slurm, local = make_site("east", "slurm"), make_site("here")
    slurm.add(job_id="7")
    local.add()
    for runs in (slurm, local):
        set_times(runs.root, lambda _: 1e9)
    followed = FollowedRuns(slurm.root, slurm.site)

    def state(of: FollowedRuns, of_job: str = "UNKNOWN") -> str:
        (run,) = of.poll({"7": CachedState(state=of_job, age_s=0)})
        return run.record.state if run.record else ""

    states = ["COMPLETING", "RUNNING", "SUSPENDED"]
    assert [state(followed, of_job) for of_job in states] == states
    followed = FollowedRuns(local.root, local.site)
    assert state(followed) == "RUNNING"
    monkeypatch.setattr(local_process, "is_alive", lambda _: False)
    now_s = time.time()
    assert state(followed) == "RUNNING"
    monkeypatch.setattr(time, "time", lambda: now_s + 11)
    assert state(followed) == "FAILED"


def test_the_newest_runs_are_followed(make_site: MakeSite, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than so many of a site."""
    runs = make_site("east")
    names = [runs.add(age_s=age_s).name for age_s in (90, 80, 70)]
    monkeypatch.setattr(followed_runs, "MAX_RUNS", 2)
    assert [run.run_dir.name for run in FollowedRuns(runs.root, runs.site).poll({})] == names[1:]


def test_ledgers_are_made_in_order_and_renewed_after_a_change(
    make_site: MakeSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of running runs first, then the newest; after 30 s that of a run which went on, and no other."""
    runs, made = make_site("east"), list[str]()
    for name, age_s, state in (("old", 90, "RUNNING"), ("done", 70, "COMPLETED"), ("last", 60, "FAILED")):
        runs.log(runs.add(name, age_s=age_s, state=state), 0, 3)
    (site,) = make_feeds(["east"])
    assert site.runs
    assert site.ledgers
    monkeypatch.setattr(ledgers, "run_ledger", lambda path: made.append(path.name.split("-")[0]))
    site.runs.answer = Answer(site.runs._call(), 0.0, None)
    for _ in range(5):
        site.ledgers._call()
    assert made == ["old", "last", "done"]
    (went_on,) = [run for run in site.runs.answer.value or () if run.run_dir.name.startswith("old")]
    others = [run for run in site.runs.answer.value or () if run is not went_on]
    site.runs.answer = Answer([*others, went_on._replace(step_at=9.0)], 0.0, None)
    site.ledgers._call()
    monkeypatch.setattr(time, "monotonic", lambda clock=time.monotonic: clock() + 31)
    for _ in range(3):
        site.ledgers._call()
    assert made[3:] == ["old"]


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
