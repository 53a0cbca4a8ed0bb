"""Ledgers, recoveries and staging of runs as counters."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_maker import EPOCH, add_attempt, add_rank, add_steps, finish, make_run, text

from pitools.ledger.records import RunLedger, State
from pitools.monitor.export import runs
from pitools.monitor.export.samples import Samples
from pitools.monitor.export.state import WorkerState, totals_of
from pitools.run import run_folder
from pitools.run.attempt_records import Decision, Verdict
from pitools.site.schema import Site
from pitools.stage.stage import StageResult


def ledger(seconds: dict[State, float], *, is_running: bool = True) -> RunLedger:
    texts = dict.fromkeys(("run_id", "name", "site", "user", "source", "since", "until", "greatest_loss"), "")
    numbers = dict.fromkeys(("count", "nodes", "attempts", "allocations", "queue_s"), 1)
    return RunLedger(
        **texts, **numbers, resource="gpu", allocated_s=sum(seconds.values()), seconds=seconds, goodput=None,
        calendar_goodput=None, is_running=is_running,
    )  # fmt: skip


@settings(max_examples=50)
@given(st.lists(st.lists(st.floats(0, 1e5), min_size=len(State), max_size=len(State)), max_size=8))
def test_seconds_are_counted_once(looks: list[list[float]]) -> None:
    """Whatever a ledger moves between states: no counter goes down, and in all no more is counted than allocated."""
    counted: dict[str, float] = {}
    allocated = 0.0
    for values in looks:
        one = ledger(dict(zip(State, values, strict=True)))
        allocated = max(allocated, one.allocated_s)
        counts, before = Samples(), counted
        counted = runs.count_seconds(one, before, counts)
        assert all(value[0] >= 0 for value in counts.values())
        assert all(counted[name] >= value for name, value in before.items())
        assert sum(counted.values()) <= allocated * (1 + 1e-9) + 1e-6


def test_lost_steps_move_by_and_by() -> None:
    """Steps that turn out lost are counted as lost while they are made again; at the end all is as in the ledger."""
    seen = [(100.0, 0.0), (60.0, 45.0), (60.0, 60.0), (80.0, 60.0), (200.0, 60.0)]
    counted: dict[str, float] = {}
    for productive, lost in seen:
        counted = runs.count_seconds(ledger({State.PRODUCTIVE: productive, State.LOST: lost}), counted, Samples())
        assert sum(counted.values()) == pytest.approx(max(100.0, productive + lost))
    assert (counted["productive"], counted["lost"]) == (pytest.approx(200), pytest.approx(60))


@pytest.fixture
def world(make_site: Callable[..., Site], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Site, Path]:
    """A site, and its run: an attempt that a node's failure ended, and one that goes on, 300 s after the epoch."""
    site = make_site()
    run_dir = make_run(Path(site.paths.runs), nodes=2, gpus=4)
    first = add_attempt(run_dir, 0, 100, nodes=2)
    add_steps(first, 0, 10, [10.0] * 9)
    staged = StageResult(
        dataset="demo", version="1", source="", path="", state="staged", files=1, bytes=1000, copied_bytes=300,
        verified_bytes=0, wall_s=2.0, node="n1", peer_bytes=200,
    )  # fmt: skip
    (first / "nodes" / "n1").mkdir(parents=True)
    run_folder.write_record(first / "nodes" / "n1" / "demo.json", staged)
    run_folder.write_record(first / "decision.json", Decision(attempt="0", action="resubmit", kind="node", reason=""))
    second = add_attempt(run_dir, 130, None, nodes=2)
    add_rank(second, 140)
    add_steps(second, 0, 150, [10.0] * 5, first=9)
    monkeypatch.setattr(time, "time", lambda: EPOCH + 300)
    return site, run_dir


def values(samples: Samples) -> dict[object, float]:
    return {(name, *labels): one[0] for (name, labels), one in samples.items()}


def test_a_run_is_counted_once_and_to_its_end(world: tuple[Site, Path]) -> None:
    """Its recovery, staging and end are counted when they are there, and by no later look again."""
    site, run_dir = world
    _, state = runs.query_runs(site, WorkerState(), None)
    totals = totals_of(state)
    assert values(totals)["pit_recoveries_total", "node"] == 1
    recovery = totals["pit_recovery_seconds", ()]
    assert (sum(recovery[:-1]), recovery[-1]) == (1, 40)  # from exit.json to rank 0
    staged = {key[1]: value for key, value in values(totals).items() if key[0] == "pit_stage_bytes_total"}
    assert staged == {"source": 300, "peer": 200, "linked": 0, "node": 500}
    gauges, again = runs.query_runs(site, state, None)
    assert values(totals_of(again)) == pytest.approx(values(totals))
    assert values(gauges)["pit_runs", "running"] == 1
    finish(run_dir, 300)
    (run_dir / "attempts" / "1" / "exit.json").write_bytes((run_dir / "attempts" / "0" / "exit.json").read_bytes())
    gauges, over = runs.query_runs(site, again, None)
    ended = values(totals_of(over))
    assert ended["pit_runs_ended_total", "succeeded"] == 1
    assert ("pit_runs", "running") not in values(gauges)
    assert all(ended[key] >= value for key, value in values(totals).items())
    assert values(totals_of(runs.query_runs(site, over, None)[1])) == pytest.approx(ended)


def test_a_run_whose_mark_was_dropped_is_not_counted_again(world: tuple[Site, Path]) -> None:
    """It began before the last look: what is in its folder was counted then."""
    site, _ = world
    _, state = runs.query_runs(site, WorkerState(), None)
    late = msgspec.structs.replace(state, runs={}, clocks={"runs": EPOCH + 10_000})
    assert values(totals_of(runs.query_runs(site, late, None)[1])) == values(totals_of(state))


def test_a_run_that_waits_is_counted_once(make_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its wait in the queue is what the last look has seen, not the sum of all; its end, without a start, is one."""
    site, state = make_site(), WorkerState()
    run_dir = make_run(Path(site.paths.runs))
    for look in range(1, 9):
        if look == 5:
            verdict = Verdict(state="stopped", code="cancelled", kind="cancelled", reason="", t=text(1300), attempts=0)
            run_folder.write_record(run_dir / "verdict.json", verdict)
        monkeypatch.setattr(time, "time", lambda now_s=EPOCH + 300 * look: now_s)
        _, state = runs.query_runs(site, state, None)
        found = values(totals_of(state))
        assert found["pit_run_queue_seconds_total",] == 300 * min(look, 4)
        assert found["pit_runs_ended_total", "cancelled"] == (look >= 5)


@pytest.mark.parametrize(("stalled_s", "idle"), [(599, 0), (601, 8)])
def test_held_idle_gpus_are_those_without_steps(world: tuple[Site, Path], stalled_s: float, idle: float) -> None:
    """Of a run whose job runs and that logs steps; of another job, and without a step log, nothing is said."""
    site, run_dir = world
    steps = run_dir / "attempts" / "1" / "steps" / "0.jsonl"
    os.utime(steps, (EPOCH + 300 - stalled_s,) * 2)
    found = values(runs.query_runs(site, WorkerState(), frozenset({"7"}))[0])
    assert (found["pit_held_idle_gpus",], found["pit_held_watched_gpus",]) == (idle, 8)
    for jobs in (None, frozenset({"8"})):
        assert ("pit_held_idle_gpus",) not in values(runs.query_runs(site, WorkerState(), jobs)[0])
    shutil.rmtree(steps.parent)
    assert ("pit_held_idle_gpus",) not in values(runs.query_runs(site, WorkerState(), frozenset({"7"}))[0])
