"""Ledgers, recoveries and staging of runs as counters."""

from __future__ import annotations

import itertools
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_maker import EPOCH, add_attempt, add_rank, add_steps, finish, make_run, row, text

from pitools.core.errors import PitError
from pitools.core.record import decode_json
from pitools.ledger.records import RunLedger, State
from pitools.monitor.export import runs
from pitools.monitor.export.samples import Samples
from pitools.monitor.export.state import WorkerState, totals_of
from pitools.run import run_folder
from pitools.run.attempt_records import AttemptStart, Decision, Verdict
from pitools.site.schema import Site
from pitools.slurm.records import AccountingRow
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


@pytest.fixture
def accounting(world: tuple[Site, Path], monkeypatch: pytest.MonkeyPatch) -> list[AccountingRow]:
    """What sacct says: the job of the run, which runs, and one of another user."""
    known = {"nodes": 2, "alloc_tres": {"gres/gpu": "8"}}
    rows = [row(0, 95, None, user=world[1].owner(), **known), row(0, 95, None, job_id="8", user="another", **known)]
    monkeypatch.setattr(runs, "read_rows", lambda *_: rows)
    return rows


@pytest.mark.usefixtures("accounting")
def test_only_what_accounting_knows_is_believed(world: tuple[Site, Path]) -> None:
    """Of forged folders nothing counts: unknown jobs of many nodes, another user's job, copies of a run's folder."""
    site, run_dir = world
    honest, state = runs.query_runs(site, WorkerState(), frozenset({"7"}))
    assert values(totals_of(state))["pit_run_resource_seconds_total", "gpu", "start"] > 0
    assert sum(state.runs[run_dir.name].seconds.values()) <= 8 * 205  # sacct's, not the folder's
    for name, job_id in (("0", "7"), ("1", "8"), ("f", "999"), ("e", "; rm")):
        forged = run_dir.with_name(f"bc-20270115-080000-{name * 6}")
        shutil.copytree(run_dir, forged)
        run_folder.write_record(forged / "job.json", run_folder.JobRef(job_id=job_id, site="alpha", submitted=text(0)))
        for number in range(2, 9):
            start = decode_json((forged / "attempts" / "0" / "start.json").read_bytes(), AttemptStart)
            shutil.copytree(forged / "attempts" / "0", forged / "attempts" / str(number))
            add_rank(forged / "attempts" / str(number), 140)
            lie = msgspec.structs.replace(start, nodes=100_000, job_id=job_id, restart_count=number)
            run_folder.write_record(forged / "attempts" / str(number) / "start.json", lie)
    for number in (2, 3):
        shutil.copytree(forged / "attempts" / "8", run_dir / "attempts" / str(number))
    first, other = runs.query_runs(site, WorkerState(), frozenset({"7"}))
    assert values(first) == values(honest)
    assert values(totals_of(other)) == values(totals_of(state))
    later, again = runs.query_runs(site, state, frozenset({"7"}))
    assert values(later) == values(honest)
    assert values(totals_of(again)) == pytest.approx(values(totals_of(state)))


def test_without_an_answer_of_accounting_nothing_is_counted(world: tuple[Site, Path], tmp_path: Path) -> None:
    """A sacct that fails is an error of the look; one that says that there is no accounting leaves the folders."""
    (tmp_path / "alpha" / "sacct").write_text("#!/bin/sh\necho 'sacct: error: Unable to connect' >&2; exit 1\n")
    with pytest.raises(PitError):
        runs.query_runs(world[0], WorkerState(), None)


def test_a_look_is_bounded(world: tuple[Site, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """What it leaves is read by the next looks, the longest unread first, and everything is counted once."""
    site, run_dir = world
    finish(run_dir, 280)
    for number in range(6):
        shutil.copytree(run_dir, run_dir.with_name(f"bc-20270115-080000-{number:06}"))
    _, whole = runs.query_runs(site, WorkerState(), None)
    clock, state = itertools.count(0, runs.LOOK_S / 2.5), WorkerState()
    monkeypatch.setattr(runs, "_rows_by_run", lambda *_: None)
    for look in range(1, 9):
        clocks = SimpleNamespace(monotonic=lambda: next(clock), time=lambda now_s=EPOCH + 500 * look: now_s)
        monkeypatch.setattr(runs, "time", clocks)
        _, state = runs.query_runs(site, state, None)
        assert len(state.runs) == min(2 * look, 7)
    assert values(totals_of(state)) == pytest.approx(values(totals_of(whole)))
