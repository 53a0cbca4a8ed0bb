"""The hang watch: what stands still, what only takes long, and what keeps no log."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from pitools.launch.job import hang_watch
from pitools.launch.job.hang_watch import HangDetector, HangLimits, load_limits
from pitools.launch.job.straggler import FACTOR, WINDOW_STEPS, StragglerDetector, slow_ranks
from pitools.launch.request import HangWatch
from pitools.run import run_folder
from pitools.run.steps import Step, StepLog

QUICK = HangLimits(factor=5, min_s=0.2, first_step_s=0.6)


class Clock:
    """The watch's clocks, which go on when a test says so: what it waits for is no time of the machine's."""

    def __init__(self) -> None:
        self.passed_s = 0.0

    def monotonic(self) -> float:
        return self.passed_s

    def time(self) -> float:
        return time.time() + self.passed_s

    def sleep(self, s: float) -> None:
        self.passed_s += s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    created = Clock()
    monkeypatch.setattr(hang_watch, "time", created)
    return created


@pytest.fixture
def logs(tmp_path: Path) -> Iterator[list[StepLog]]:
    """The logs of three ranks."""
    created = [StepLog(tmp_path / "steps", rank) for rank in range(3)]
    yield created
    for log in created:
        log.close()


def write(log: StepLog, step: int, wall_s: float = 0.01) -> None:
    log.write(step=step, loss=1.0, wall_s=wall_s, input_s=0, compute_s=wall_s, comm_s=0, rank_samples=1)


def test_ranks_without_a_log_are_not_judged(tmp_path: Path, clock: Clock) -> None:
    """A program that writes no steps is none of the watch's business, whatever it does."""
    watch = HangDetector(tmp_path / "steps", HangLimits(1, 0.01, 0.01))
    assert watch.poll() is None
    clock.sleep(0.1)
    assert watch.poll() is None


def test_a_standstill_names_the_ranks_behind(tmp_path: Path, clock: Clock, logs: list[StepLog]) -> None:
    """After the longer of the two limits, the last step and the ranks that did not reach it are said."""
    watch = HangDetector(tmp_path / "steps", QUICK)
    for step in range(4):
        for log in logs:
            write(log, step)
        assert watch.poll() is None
    write(logs[0], 4)
    write(logs[2], 4)
    assert watch.poll() is None
    clock.sleep(0.25)
    hang = watch.poll()
    assert hang is not None
    assert (hang.step, hang.slow_ranks, hang.median_step_s) == (4, (1,), 0.01)
    assert hang.stalled_s == 0.25


def test_slow_steps_have_longer(tmp_path: Path, clock: Clock, logs: list[StepLog]) -> None:
    """What is usual for this run is what counts, beyond the least."""
    watch = HangDetector(tmp_path / "steps", HangLimits(factor=100, min_s=0.1, first_step_s=9))
    for step in range(3):
        write(logs[0], step, wall_s=0.005 if step else 50.0)  # the first one compiles
    watch.poll()
    assert watch.median_step_s() == 0.005
    clock.sleep(0.2)
    assert watch.poll() is None
    clock.sleep(0.35)
    assert watch.poll() is not None


def test_the_first_steps_have_an_allowance_of_their_own(tmp_path: Path, clock: Clock, logs: list[StepLog]) -> None:
    """A compilation of minutes is no hang, but it has to end."""
    watch = HangDetector(tmp_path / "steps", QUICK)
    write(logs[0], 0)
    watch.poll()
    clock.sleep(0.3)
    assert watch.poll() is None
    clock.sleep(0.4)
    assert watch.poll() is not None


def test_a_beat_is_a_word(tmp_path: Path, clock: Clock, logs: list[StepLog]) -> None:
    """A rank that says that it is at a checkpoint keeps all from being ended, for as long as it asked for."""
    watch = HangDetector(tmp_path / "steps", QUICK)
    for step in range(3):
        write(logs[0], step)
    watch.poll()
    for _ in range(3):
        clock.sleep(0.15)
        logs[0].heartbeat()
        assert watch.poll() is None
    logs[0].heartbeat(60.0)
    watch.poll()
    clock.sleep(0.3)
    assert watch.poll() is None
    write(logs[0], 3)  # the checkpoint is done: from here on steps are expected again
    watch.poll()
    clock.sleep(0.3)
    assert watch.poll() is not None


def test_a_closed_log_ends_what_is_expected(tmp_path: Path, clock: Clock, logs: list[StepLog]) -> None:
    """After its last step a program may save for longer than a step takes."""
    watch = HangDetector(tmp_path / "steps", QUICK)
    for step in range(3):
        write(logs[0], step)
    logs[0].close()
    watch.poll()
    clock.sleep(0.3)
    assert watch.poll() is None


@pytest.mark.parametrize("allowed_s", [120, 200])
def test_the_time_of_a_suspended_job_does_not_count(
    tmp_path: Path, clock: Clock, logs: list[StepLog], allowed_s: int
) -> None:
    """Slurm stops the watch and the ranks for an hour: a step, or a save, then has what was left to it before."""
    watch = HangDetector(tmp_path / "steps", HangLimits(factor=5, min_s=120, first_step_s=1800))
    for step in range(3):
        write(logs[0], step)
    if allowed_s > 120:
        logs[0].heartbeat(allowed_s)
    assert watch.poll_if_due() is None
    clock.sleep(9)
    assert watch.poll_if_due() is None
    clock.sleep(3600)
    polls = [bool(watch.poll_if_due()) for _ in range(allowed_s // 5) if not clock.sleep(5)]  # type: ignore[func-returns-value]
    assert polls.index(True) == allowed_s // 5 - 1


def test_storage_that_is_away_is_no_hang(tmp_path: Path, clock: Clock, logs: list[StepLog]) -> None:
    """Where the logs cannot be looked at, time does not count."""
    watch = HangDetector(tmp_path / "steps", QUICK)
    for step in range(3):
        write(logs[0], step)
    watch.poll()
    (tmp_path / "steps").rename(tmp_path / "away")
    clock.sleep(0.3)
    assert watch.poll() is None


def test_a_thousand_ranks_cost_little(tmp_path: Path) -> None:
    """A look at a thousand logs takes a fraction of a second, however long they are."""
    steps = tmp_path / "steps"
    log = StepLog(steps, 0)
    for step in range(2000):
        write(log, step)
    log.close()
    text = (steps / "0.jsonl").read_bytes()
    for rank in range(1, 1000):
        (steps / f"{rank}.jsonl").write_bytes(text[-2000:])
    watch = HangDetector(steps, QUICK)
    began = time.process_time()
    for _ in range(3):
        os.utime(steps / "7.jsonl")
        watch.poll()
    assert time.process_time() - began < 1.0


def test_limits_come_from_the_request(tmp_path: Path) -> None:
    """The plan's `[watch]`; without a plan the defaults; "0" turns the watch off."""
    plan = tmp_path / "plan.json"
    assert load_limits(plan) == HangLimits(10.0, 120.0, 1800.0)
    watch = HangWatch(hang_factor=3, min_stall="5s", first_step="1m")
    plan.write_bytes(msgspec.json.encode({"request": {"watch": watch}}))
    assert load_limits(plan) == HangLimits(3.0, 5.0, 60.0)
    plan.write_bytes(msgspec.json.encode({"request": {"watch": HangWatch(min_stall="0")}}))
    assert load_limits(plan) is None
    plan.write_text('{"request":')
    assert load_limits(plan) == HangLimits()


def made(rank: int, own_s: float) -> list[Step]:
    return [
        Step(
            t="",
            rank=rank,
            step=step,
            loss=1.0,
            wall_s=1.0,
            input_s=own_s / 4,
            compute_s=own_s * 3 / 4,
            comm_s=0.1,
            rank_samples=1,
        )
        for step in range(WINDOW_STEPS + 5)
    ]


def test_a_straggler_is_slow_by_its_own_work() -> None:
    """Wall time is the same for all; input and computation tell who the others wait for."""
    ranks = {rank: made(rank, 0.5) for rank in range(4)}
    assert slow_ranks(ranks) == {}
    ranks[2] = made(2, 0.5 * FACTOR * 1.1)
    assert list(slow_ranks(ranks)) == [2]
    assert slow_ranks(ranks)[2] == pytest.approx((0.715, 0.5))
    ranks[2][-8:] = made(2, 0.5)[-8:]  # not persistently
    assert slow_ranks(ranks) == {}
    assert slow_ranks({0: made(0, 9.0)}) == {}


def test_a_straggler_is_said_once(tmp_path: Path) -> None:
    """One event for each rank, with its node."""
    attempt = tmp_path / "attempts" / "0"
    attempt.mkdir(parents=True)
    (attempt / "hostfile").write_text("n1\nn1\nn2\nn2\n")
    watch = StragglerDetector(tmp_path, attempt)
    ranks = {0: made(0, 0.5), 1: made(1, 0.5), 2: made(2, 2.0), 3: made(3, 0.5)}
    for _ in range(3):
        watch.record_events(ranks)
    (line,) = (tmp_path / "events.jsonl").read_text().splitlines()
    assert '"event":"straggler"' in line
    assert '"rank":2,"node":"n2"' in line
    assert run_folder.attempt_dirs(tmp_path) == [attempt]
