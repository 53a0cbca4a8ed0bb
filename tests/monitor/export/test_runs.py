"""Ledgers, recoveries and staging of runs as counters."""

from __future__ import annotations

import getpass
import itertools
import os
import pwd
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_maker import EPOCH, add_attempt, add_rank, add_steps, end_attempt, finish, make_run, row, text

from pitools.core.errors import PitError
from pitools.core.record import decode_json
from pitools.ledger import believed
from pitools.ledger.records import RunLedger, State
from pitools.ledger.run_ledger import ledgers_of, owner
from pitools.monitor.export import runs
from pitools.monitor.export.collect import WORKERS, run_cycle
from pitools.monitor.export.samples import Samples
from pitools.monitor.export.state import WorkerState, totals_of
from pitools.run import run_folder
from pitools.run.attempt_records import AttemptStart, Decision, Verdict
from pitools.site.schema import Site
from pitools.slurm.parse_accounting import ACCOUNTING_FORMAT
from pitools.slurm.records import AccountingRow
from pitools.stage.stage import StageResult

NAME = "bc-20270115-080000-abcdef"


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


_SACCT = """#!{python} -IS
import sys
asked = next(word for word in sys.argv if word.startswith("--jobs="))[7:].split(",")
sep = next(word for word in sys.argv if word.startswith("--delimiter="))[12:]
header, *rows = open("{rows}").read().splitlines()
known = [row for row in rows if {{*row.split("|")[:2], row.split("_")[0]}} & {{*asked}}]
print(*(row.replace("|", sep) for row in [header, *known]), sep="\\n")
"""


@pytest.fixture
def accounting(tmp_path: Path) -> Callable[..., None]:
    """A sacct that knows these rows, and prints those of the jobs for which it is asked."""

    def write(*rows: AccountingRow) -> None:
        lines = ["|".join(ACCOUNTING_FORMAT)]
        for one in rows:
            submit, start, end = (moment[:19] or "Unknown" for moment in (one.submit, one.start, one.end))
            tres = ",".join(f"{name}={count}" for name, count in one.alloc_tres.items())
            lines.append(
                f"{one.job_id}|{one.raw_id}|{one.name}|{one.user}|lab|normal|gpu|{one.state}|0:0|{submit}|{start}|{end}"
                f"|{one.elapsed_s}|60|{one.nodes}|n1|||{tres}"
            )
        (tmp_path / "rows").write_text("\n".join(lines))
        (tmp_path / "alpha" / "sacct").write_text(_SACCT.format(python=sys.executable, rows=tmp_path / "rows"))

    return write


def of_job(start: float | None, end: float | None, job_id: str = "7", **fields: Any) -> AccountingRow:
    known = {"nodes": 2, "alloc_tres": {"gres/gpu": "8"}, "user": getpass.getuser(), "name": NAME}
    return row(0, start, end, job_id=job_id, **{**known, **fields})


def test_only_what_accounting_knows_is_believed(world: tuple[Site, Path], accounting: Callable[..., None]) -> None:
    """Of forged folders nothing counts: unknown jobs of many nodes, another user's job, copies of a run's folder."""
    site, run_dir = world
    accounting(of_job(95, None, name="other"), of_job(95, None, "8", user="another"))
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


def test_a_copy_and_another_name_count_nothing(world: tuple[Site, Path], accounting: Callable[..., None]) -> None:
    """A start belongs to the run whose id is the job's name, whatever else has its files."""
    site, run_dir = world
    accounting(of_job(95, None, name=f"{NAME}.1"))
    honest, state = runs.query_runs(site, WorkerState(), frozenset({"7"}))
    shutil.copytree(run_dir, run_dir.with_name(f"{NAME}.bak"))
    shutil.copytree(run_dir, run_dir.with_name("a-20000101-000000-aaaaaa"))
    for before in (WorkerState(), state):
        gauges, after = runs.query_runs(site, before, frozenset({"7"}))
        assert values(gauges) == values(honest)
        assert values(totals_of(after)) == pytest.approx(values(totals_of(state)))
    finish(run_dir, 290)
    for before in (WorkerState(), state):
        gauges, after = runs.query_runs(site, before, frozenset({"7"}))
        assert values(totals_of(after))["pit_runs_ended_total", "succeeded"] == 1
        assert "pit_runs" not in [key[0] for key in values(gauges)]
    (run_dir / "verdict.json").unlink()
    run_dir.rename(run_dir.with_name("b-20000101-000000-bbbbbb"))
    gauges, after = runs.query_runs(site, state, frozenset({"7"}))
    assert "pit_runs" not in [key[0] for key in values(gauges)]
    assert values(totals_of(after)) == values(totals_of(state))


def test_a_link_is_of_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user's link to a run's folder takes no start of its owner's."""
    (tmp_path / "link").symlink_to(tmp_path)
    uids = {
        path: SimpleNamespace(st_uid=pwd.getpwnam(name).pw_uid) for path, name in (("link", "bin"), ("run", "daemon"))
    }
    monkeypatch.setattr(Path, "lstat", lambda path: uids[path.name])
    assert [owner(tmp_path / name) for name in ("link", "run")] == ["bin", "daemon"]


@pytest.mark.parametrize("is_another", [True, False])
def test_no_folders_keep_a_run_from_being_counted(
    world: tuple[Site, Path], accounting: Callable[..., None], monkeypatch: pytest.MonkeyPatch, is_another: bool
) -> None:
    """Not those of another user at any look, and its own user's only until theirs were read."""
    site, run_dir = world
    accounting(of_job(95, 300))
    monkeypatch.setattr(believed, "MAX_JOBS", 10)
    monkeypatch.setattr(believed, "owner", lambda one: "another" if is_another and one.name > "z" else owner(one))
    for number in range(6):
        forged = run_dir.with_name(f"z-99991231-235959-{number:06}")
        forged.mkdir()
        os.link(run_dir / "plan.json", forged / "plan.json")
        for job in range(4):
            ref = run_folder.JobRef(job_id=str(1000 + 10 * number + job), site="alpha", submitted=text(0))
            run_folder.write_record(forged / "jobs" / str(job) / "job.json", ref)
    state, ended = WorkerState(), []
    finish(run_dir, 300)
    for look in range(5):
        monkeypatch.setattr(time, "time", lambda now_s=EPOCH + 2000 * (look + 1): now_s)
        _, state = runs.query_runs(site, state, None)
        ended.append(values(totals_of(state))["pit_runs_ended_total", "succeeded"])
    assert ended == ([1] * 5 if is_another else [0, 0, 1, 1, 1])


def test_an_array_counts_all_its_tasks(world: tuple[Site, Path], accounting: Callable[..., None]) -> None:
    """Also of more tasks than job ids are asked for: the array's own id gives them all."""
    site, run_dir = world
    shutil.rmtree(run_dir / "attempts")
    for task in range(150):
        start = AttemptStart(
            attempt=f"{task}.0", job_number=0, job_id=str(1000 + task), cluster="", restart_count=0, node_list="n1",
            started=text(100), nodes=2,
        )  # fmt: skip
        run_folder.write_record(run_dir / "attempts" / f"{task}.0" / "start.json", start)
    accounting(*(of_job(100, 200, f"7_{task}", raw_id=str(1000 + task)) for task in range(150)))
    _, state = runs.query_runs(site, WorkerState(), None)
    assert sum(state.runs[NAME].seconds.values()) == 150 * 100 * 8
    finish(run_dir, 300)
    one = ledgers_of(site, [run_dir])[run_dir]
    assert (one.is_accounted, one.allocations, one.queue_s) == (True, 150, 150 * 100)


def test_only_a_verdict_ends_a_run(
    world: tuple[Site, Path], accounting: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that waits for its next start stays pending; it is none while accounting does not show its jobs."""
    site, run_dir = world
    end_attempt(run_dir / "attempts" / "1", 300)
    state, found = WorkerState(), []
    for look, rows in enumerate([(of_job(95, 300), of_job(None, None))] * 3 + [()]):
        accounting(*rows)
        monkeypatch.setattr(time, "time", lambda now_s=EPOCH + 300 + 3000 * look: now_s)
        gauges, state = runs.query_runs(site, state, None)
        found.append([key[1] for key in values(gauges) if key[0] == "pit_runs"])
    assert found == [["pending"]] * 3 + [[]]


def test_without_an_answer_of_accounting_nothing_is_counted(world: tuple[Site, Path], tmp_path: Path) -> None:
    """A sacct that fails is an error of the look; one that says that there is no accounting leaves the folders."""
    (tmp_path / "alpha" / "sacct").write_text("#!/bin/sh\necho 'sacct: error: Unable to connect' >&2; exit 1\n")
    with pytest.raises(PitError):
        runs.query_runs(world[0], WorkerState(), None)


def test_runs_that_it_cannot_read_are_said_once(world: tuple[Site, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """An account that sees no run has no goodput, and would not know why."""
    monkeypatch.setattr(os, "access", lambda *_, **_more: False)
    after, first = run_cycle(world[0], WORKERS[1], WorkerState())
    monkeypatch.setattr(time, "time", lambda: EPOCH + 1000)
    again = run_cycle(world[0], WORKERS[1], after)[1]
    assert ("runs: 1 folders of runs cannot be read by this account" in first[0], again) == (True, [])


def test_a_look_is_bounded(world: tuple[Site, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """What it leaves is read by the next looks, the longest unread first, and everything is counted once."""
    site, run_dir = world
    finish(run_dir, 280)
    for number in range(6):
        shutil.copytree(run_dir, run_dir.with_name(f"bc-20270115-080000-{number:06}"))
    _, whole = runs.query_runs(site, WorkerState(), None)
    clock, state = itertools.count(0, runs.LOOK_S / 2.5), WorkerState()
    monkeypatch.setattr(runs, "believed_rows", lambda *_: None)
    for look in range(1, 9):
        clocks = SimpleNamespace(monotonic=lambda: next(clock), time=lambda now_s=EPOCH + 500 * look: now_s)
        monkeypatch.setattr(runs, "time", clocks)
        _, state = runs.query_runs(site, state, None)
        assert len(state.runs) == min(2 * look, 7)
    assert values(totals_of(state)) == pytest.approx(values(totals_of(whole)))
