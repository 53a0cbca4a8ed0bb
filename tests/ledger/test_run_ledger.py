"""The ledger of a run: where its time went, by known timelines."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import pytest

from pitools.core.errors import DataError
from pitools.ledger import evidence
from pitools.ledger.records import RunLedger, State
from pitools.ledger.recoveries import read_recoveries
from pitools.ledger.run_ledger import describe, run_ledger
from pitools.run import run_folder
from pitools.run.attempt_records import Cause
from tests.ledger.run_maker import (
    EPOCH,
    add_attempt,
    add_rank,
    add_receipt,
    add_steps,
    end_attempt,
    finish,
    make_run,
    row,
    text,
)


def of(ledger: RunLedger) -> dict[str, float]:
    """The states that have seconds."""
    assert sum(ledger.seconds.values()) == pytest.approx(ledger.allocated_s)
    return {state.value: pytest.approx(value, abs=2e-3) for state, value in ledger.seconds.items() if value > 1e-6}


def test_a_run_without_faults(tmp_path: Path) -> None:
    """Start, staging, compile, input, a save, the last save and the rest of the allocation, each for its seconds."""
    run = make_run(tmp_path, nodes=2, gpus=4)
    attempt = add_attempt(run, 11, 60, nodes=2)
    add_receipt(attempt, 12, 17)
    save = [0.0] * 9 + [2.0]
    add_steps(attempt, 0, 20, [5.0] + [1.0] * 8 + [3.0], input_s=0.25, checkpoint_s=save)
    manifest = run / "checkpoints" / "step_10" / "manifest.json"
    manifest.parent.mkdir(parents=True)
    manifest.write_text(f'{{"schema": "pit.checkpoint/1", "step": 10,\n "t": "{text(40)}"}}')
    finish(run, 61)
    ledger = run_ledger(run, [row(0, 10, 62, nodes=2)])
    assert of(ledger) == {
        "start": 8 * 5, "staging": 8 * 5, "compile": 8 * 4, "input": 8 * 2.5, "checkpoint": 8 * (2 + 4),
        "productive": 8 * 7.5, "idle": 8 * 22,
    }  # fmt: skip
    assert (ledger.resource, ledger.count, ledger.nodes, ledger.allocated_s) == ("gpu", 4, 2, 8 * 52)
    assert (ledger.queue_s, ledger.since, ledger.until) == (10, text(10), text(62))
    assert not ledger.is_running
    assert (ledger.goodput, ledger.greatest_loss) == (pytest.approx(7.5 / 52), "idle")
    assert describe(ledger) == "goodput 14 %; greatest loss: idle 42 %"


def test_a_rank_that_dies_and_the_steps_made_again(tmp_path: Path) -> None:
    """Steps after the restored one are lost; from the last step of an attempt to the next one's first is recovery."""
    run = make_run(tmp_path)
    first = add_attempt(run, 0, 13)
    add_steps(first, 0, 2, [1.0] * 10)
    second = add_attempt(run, 14, 40, saved_steps=5)
    add_steps(second, 0, 18, [1.0] * 20, first=5)
    ledger = run_ledger(run)
    assert of(ledger) == {"start": 2, "productive": 5 + 20, "lost": 5, "recovery": 6, "idle": 2}


def test_a_program_that_begins_again_in_one_attempt(tmp_path: Path) -> None:
    """Its first step compiles, also if it has the number of the last; half a second between steps is one of neither."""
    run = make_run(tmp_path)
    attempt = add_attempt(run, 0, 12)
    end = add_steps(attempt, 0, 0, [1.0] * 4)
    end = add_steps(attempt, 0, end + 0.5, [4.0, 1.0], first=3)
    add_steps(attempt, 0, end + 0.5, [1.0], first=5)
    ledger = run_ledger(run)
    assert of(ledger) == {"productive": 6, "lost": 1, "compile": 3, "unaccounted": 1, "idle": 1}


def test_starts_that_go_back_in_one_allocation(tmp_path: Path) -> None:
    """The begin of the last that is before another's takes no time twice: what was until then is recovery."""
    run = make_run(tmp_path)
    for restart, began in enumerate((0, 20, 15)):
        add_steps(add_attempt(run, began, began + 10, restart=restart), 0, began, [1.0] * 2, first=9 * restart)
    assert of(run_ledger(run, [row(0, 0, 40)])) == {"productive": 2, "recovery": 18, "idle": 20}


def test_steps_are_lost_before_they_are_made_again(tmp_path: Path) -> None:
    """An attempt that has restored step 5 and died at once says what was lost, as long as no later one says more."""
    run = make_run(tmp_path)
    add_steps(add_attempt(run, 0, 12), 0, 2, [1.0] * 10)
    add_attempt(run, 20, 25, restart=1, saved_steps=5)
    assert run_ledger(run).seconds[State.LOST] == pytest.approx(5)
    add_steps(add_attempt(run, 30, 40, restart=2), 0, 32, [1.0] * 5, first=8)
    assert run_ledger(run).seconds[State.LOST] == pytest.approx(2)
    add_steps(add_attempt(run, 50, 60, restart=3), 0, 52, [1.0], first=3)
    assert run_ledger(run).seconds[State.LOST] == pytest.approx(7 + 5)


def test_a_clean_requeue_is_no_productive_step(tmp_path: Path) -> None:
    """Two hours in the queue between step 99 and step 100 are no allocated time, and no progress by the calendar."""
    run = make_run(tmp_path)
    add_steps(add_attempt(run, 0, 1000), 0, 0, [10.0] * 100)
    add_steps(add_attempt(run, 8200, 9200, restart=1, saved_steps=100), 0, 8200, [10.0] * 100, first=100)
    ledger = run_ledger(run)
    assert (ledger.goodput, ledger.queue_s) == (pytest.approx(1.0), pytest.approx(7200))
    assert ledger.calendar_goodput == pytest.approx(2000 / 9200)


def test_tasks_of_an_array_wait_for_none_while_one_runs(tmp_path: Path) -> None:
    """The calendar has no free time between two short tasks beside a long one."""
    run = make_run(tmp_path)
    for began, ended in ((0, 100), (0, 10), (50, 60)):
        job_id = f"7_{began}{ended}"
        add_steps(add_attempt(run, began, ended, job_id=job_id), 0, began, [1.0] * (ended - began), first=began)
    ledger = run_ledger(run)
    assert (ledger.allocations, ledger.calendar_goodput) == (3, ledger.goodput)


def test_ranks_wait_for_the_slowest(tmp_path: Path) -> None:
    """A rank's time in collectives beyond that of the last to come is straggler wait; a slow input is that rank's."""
    run = make_run(tmp_path)
    attempt = add_attempt(run, 0, 10)
    add_steps(attempt, 0, 0, [1.0] * 10, comm_s=0.5)
    add_steps(attempt, 1, 0, [1.0] * 10, comm_s=0.1, input_s=0.4)
    assert of(run_ledger(run)) == {"straggler": 2.0, "input": 2.0, "productive": 6.0}


def test_ranks_do_not_wait_for_a_step_that_was_made_before(tmp_path: Path) -> None:
    """All wait as long in the steps that are made again; in the first of them, one did not."""
    run = make_run(tmp_path)
    attempt = add_attempt(run, 0, 30)
    for rank in (0, 1):
        end = add_steps(attempt, rank, 0, [1.0] * 10, comm_s=rank / 2)
        add_steps(attempt, rank, end, [1.0] * 20, comm_s=0.5)
    assert of(run_ledger(run)) == {"lost": 10, "productive": 20}


@pytest.mark.parametrize("wall", [1.0, 301.0])
def test_a_job_that_was_suspended(tmp_path: Path, wall: float) -> None:
    """For 300 s between two steps: exactly known; in one of them: by the share of each state."""
    run = make_run(tmp_path)
    attempt = add_attempt(run, 0, 1000)
    add_steps(attempt, 0, 10, [1.0] * 400)
    end = add_steps(attempt, 0, 711 - wall, [wall], first=400)
    add_steps(attempt, 0, end, [1.0] * 279, first=401)
    ledger = run_ledger(run, [row(0, 0, 1000, elapsed_s=700)])
    assert ledger.allocated_s == 700
    assert ledger.goodput == pytest.approx(680 / 700, abs=0 if wall == 1 else 0.02)
    assert set(of(ledger)) == {"start", "productive", "idle"}


@pytest.mark.parametrize("missing", [("start.json",), ("start.json", "exit.json")])
def test_an_attempt_without_its_begin_is_in_its_jobs_allocation(tmp_path: Path, missing: tuple[str, ...]) -> None:
    """The job is that of its end, or else the run's only one: no second allocation beside the row's."""
    run = make_run(tmp_path)
    attempt = add_attempt(run, 1, 30)
    add_steps(attempt, 0, 5, [1.0] * 20)
    for name in missing:
        (attempt / name).unlink()
    ledger = run_ledger(run, [row(0, 0, 30)])
    assert of(ledger) == {"start": 5, "productive": 20, "idle": 5}
    assert ledger.is_accounted


def test_parts_that_are_longer_than_their_step(tmp_path: Path) -> None:
    """A save takes its time before an input, and both no more than the step."""
    run = make_run(tmp_path)
    add_steps(add_attempt(run, 0, 10), 0, 0, [1.0] * 10, checkpoint_s=0.75, input_s=0.5)
    assert of(run_ledger(run)) == {"checkpoint": 7.5, "input": 2.5}


def test_several_jobs_and_their_queues(tmp_path: Path) -> None:
    """Each start of a job is an allocation by Slurm's times; a start without an attempt is not accounted for.

    Another job's rows are left out, also those of an older job that had the same number.
    """
    run = make_run(tmp_path, submitted=0)
    add_steps(add_attempt(run, 11, 20), 0, 12, [1.0] * 8)
    add_steps(add_attempt(run, 51, 60, restart=2), 0, 53, [1.0] * 5, first=8)
    rows = [row(0, 10, 21), row(21, 30, 33), row(33, 50, 62), row(0, 5, 900, job_id="8"), row(-90, -80, -70)]
    ledger = run_ledger(run, rows)
    assert of(ledger) == {"start": 2 + 3, "productive": 13, "idle": 1 + 4, "unaccounted": 3}
    assert (ledger.allocations, ledger.attempts, ledger.queue_s) == (3, 2, 10 + 9 + 17)
    assert ledger.calendar_goodput == pytest.approx(13 / 52)


def test_slurms_whole_seconds_cut_no_step(tmp_path: Path) -> None:
    """Slurm rounds both times down: the allocation is as long as it says, and as late as the steps are."""
    run = make_run(tmp_path)
    add_steps(add_attempt(run, 1.0, 11.8), 0, 1.8, [1.0] * 10)
    ledger = run_ledger(run, [row(0, 0, 11)])
    assert of(ledger) == {"start": 1, "productive": 10}
    quick = make_run(tmp_path / "quick")  # its attempt begins at once, and its last step ends just before the job
    add_steps(add_attempt(quick, 0.05, 11.8), 0, 1.7, [1.0] * 10)
    assert of(run_ledger(quick, [row(0, 0, 11)])) == {"start": 0.9, "productive": 10, "idle": 0.1}
    full = make_run(tmp_path / "full")  # no later than its first step
    add_steps(add_attempt(full, 0.05, 11.8), 0, 0.25, [1.0] * 11)
    assert of(run_ledger(full, [row(0, 0, 11)])) == {"productive": 11}


@pytest.mark.parametrize("has_record", [True, False])
def test_a_program_without_a_step_log(tmp_path: Path, has_record: bool) -> None:
    """Its start and staging are known, and what its ranks did is not; its goodput is unknown."""
    run = make_run(tmp_path)
    attempt = add_attempt(run, 1, 30)
    add_receipt(attempt, 2, 4)
    if has_record:
        add_rank(attempt, 6)
    ledger = run_ledger(run, [row(0, 0, 33)])
    ranks = {"start": 4, "staging": 2, "unaccounted": 24} if has_record else {"start": 28, "staging": 2}
    assert of(ledger) == {**ranks, "idle": 3}
    assert (ledger.goodput, ledger.calendar_goodput, describe(ledger)) == (None, None, "")


def test_a_running_run(tmp_path: Path) -> None:
    """Until now; what follows its last step is not accounted for, and a pending job is queued until now."""
    run = make_run(tmp_path)
    assert run_ledger(run, now=EPOCH + 9).queue_s == 9
    add_steps(add_attempt(run, 10, None, time_limit_at=text(100)), 0, 12, [1.0] * 5)
    ledger = run_ledger(run, now=EPOCH + 20)
    assert ledger.is_running
    assert of(ledger) == {"start": 2, "productive": 5, "unaccounted": 3}
    assert run_ledger(run, [row(0, 10, None)], now=EPOCH + 20).seconds == ledger.seconds
    assert run_ledger(run, now=EPOCH + 101).allocated_s == pytest.approx(7)  # lost without a record
    finish(run, 18)
    over = run_ledger(run, [row(0, 10, None)], now=EPOCH + 900)  # sacct has not heard of its end
    assert (over.is_running, over.allocated_s) == (False, pytest.approx(7))


def test_clocks_that_are_set_back(tmp_path: Path) -> None:
    """Steps follow each other in the order of the log, and attempts in that of their numbers."""
    run = make_run(tmp_path)
    attempt = add_attempt(run, 3600, None)
    add_steps(attempt, 0, 3601, [1.0] * 5)
    add_steps(attempt, 0, 6, [1.0] * 5, first=5)
    end_attempt(attempt, 12)
    add_steps(add_attempt(run, 13, 20), 0, 14, [1.0] * 5, first=10)
    ledger = run_ledger(run)
    assert of(ledger) == {"start": 1, "productive": 15, "recovery": 1, "idle": 1}


def test_a_clock_that_is_set_back_and_right_again(tmp_path: Path) -> None:
    """Twice, by an hour for two steps: no second is missing, and a longer pause is one for the rest of its length."""
    run = make_run(tmp_path)
    attempt = add_attempt(run, 0, 40)
    for first, count, error_s in ((0, 10, 0), (10, 2, -3600), (12, 8, 0), (20, 2, -3600), (22, 8, 5)):
        add_steps(attempt, 0, first + error_s, [1.0] * count, first=first)
    assert of(run_ledger(run)) == {"productive": 30, "unaccounted": 5, "idle": 5}


def test_impossible_times_make_no_allocation(tmp_path: Path) -> None:
    """Times before the submission, after the exit or after now are left out, of steps and of other records."""
    ahead = ("9999-12-31T23:59:59Z", text(30 * 86400), text(200), "1970-01-01T00:00:09Z")
    for is_running in (True, False):
        run = make_run(tmp_path / str(is_running), gpus=4)
        attempt = add_attempt(run, 0, None if is_running else 100)
        end = add_steps(attempt, 0, 0, [1.0] * 50)
        with (attempt / "steps" / "0.jsonl").open("a") as file:
            file.writelines(f'{{"t":"{t}","step":50,"wall_s":1e9}}\n' for t in ahead)
        add_steps(attempt, 0, end, [1.0] * 50, first=50)
        assert of(run_ledger(run, now=EPOCH + 100)) == {"productive": 4 * 100}
    (attempt / "start.json").unlink()
    assert run_ledger(run, now=EPOCH + 100).allocated_s == pytest.approx(4 * 100)
    (attempt / "exit.json").write_text((attempt / "exit.json").read_text().replace("2023", "9998"))
    assert run_ledger(run, now=EPOCH + 100).allocated_s == pytest.approx(4 * 100)


def test_of_a_long_log_its_ends_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is between them is not accounted for; other files cost no more, also without steps or ends of lines."""
    run = make_run(tmp_path)
    attempt = add_attempt(run, 0, 1000)
    add_steps(attempt, 0, 0, [1.0] * 1000)
    add_steps(attempt, 1, 0, [1.0] * 10)
    log = attempt / "steps" / "0.jsonl"
    monkeypatch.setattr(evidence, "_MAX_LOG_BYTES", log.stat().st_size // 2)
    half = pytest.approx(500, abs=2)
    assert of(run_ledger(run)) == {"productive": half, "unaccounted": half}
    assert run_ledger(run).bad_logs == ""
    monkeypatch.setattr(evidence, "_MAX_LOG_BYTES", 32 << 20)
    log.write_bytes(log.read_bytes() + b"x\n" * 4_000_000)
    os.truncate(log, 1 << 40)  # a sparse file
    tracemalloc.start()
    assert of(run_ledger(run)) == {"productive": 1000}
    assert tracemalloc.get_traced_memory()[1] < 128 << 20
    tracemalloc.stop()


def test_a_recovery_lasts_until_the_ranks_begin(tmp_path: Path) -> None:
    """From the attempt's end, or its last step if it was killed with its node; impossible times are unknown."""
    run = make_run(tmp_path)
    add_attempt(run, 0, 12)
    killed = add_attempt(run, 14, None)
    add_rank(killed, 20)
    end = EPOCH + add_steps(killed, 0, 20, [1.0])
    os.utime(killed / "steps" / "0.jsonl", (end, end))
    add_rank(add_attempt(run, 30, 1e10), 40)
    add_rank(add_attempt(run, 50, 60), 55)
    add_rank(add_attempt(run, 61, 62), 1e10)
    assert [(one.attempt, one.kind, one.took_s) for one in read_recoveries(run)] == [
        ("0", "unknown", 8), ("1", "unknown", 19), ("2", "unknown", None)
    ]  # fmt: skip
    cause = Cause(attempt="0", kind="succeeded", confidence="certain", reason="")
    run_folder.write_record(run / "attempts" / "0" / "cause.json", cause)  # which needs no recovery
    assert [one.attempt for one in read_recoveries(run)] == ["1", "2"]


def test_what_is_damaged_is_left_out(tmp_path: Path) -> None:
    """A torn line, other lines, and a start that cannot be read; a folder that is no run is an error."""
    run = make_run(tmp_path)
    attempt = add_attempt(run, 0, 12)
    add_steps(attempt, 0, 1, [1.0] * 5)
    with (attempt / "steps" / "0.jsonl").open("ab") as file:
        file.write(b'{"t": "yesterday", "step": 1, "wall_s": 1}\n{}\n\xff\n{"t":"2027-01-15T')
    (attempt / "steps" / "1.jsonl").touch()
    add_steps(add_attempt(run, 13, None), 0, 13, [])  # not yet
    assert run_ledger(run).bad_logs == "rank 0 of attempt 0: 3 lines; rank 1 of attempt 0: empty"
    (add_attempt(run, 14, 20) / "start.json").write_text("{")
    assert of(run_ledger(run)) == {"start": 1, "productive": 5, "recovery": 14}
    with pytest.raises(DataError):
        run_ledger(tmp_path)
