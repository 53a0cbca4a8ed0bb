"""Slow ranks: found where there is one, and hardly ever where there is none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perf.performance.null_table import simulate
from pitools.core.errors import DataError
from pitools.perf.stragglers import RankTimes, find_slow_ranks, find_stragglers, read_rank_times
from pitools.run import run_folder
from pitools.run.steps import StepLog

Noise = Callable[[np.random.Generator, int, int], np.ndarray]
NOISE: dict[str, Noise] = {
    "gauss": lambda rng, steps, ranks: 0.02 * rng.standard_normal((steps, ranks)),
    "correlated": lambda rng, steps, ranks: 0.02 * simulate(rng, ranks, steps, 0.5).T,
    "heavy tails": lambda rng, steps, ranks: 0.02 * rng.standard_t(3, (steps, ranks)),
    "slow steps": lambda rng, steps, ranks: (
        0.02 * rng.standard_normal((steps, ranks)) + 0.5 * (rng.random((steps, 1)) < 0.1)
    ),
    "stalls": lambda rng, steps, ranks: (
        0.02 * rng.standard_normal((steps, ranks)) + 0.5 * (rng.random((steps, ranks)) < 0.05)
    ),
    "unequal nodes": lambda rng, steps, ranks: (
        0.02 * rng.standard_normal((steps, ranks)) + 0.006 * rng.standard_normal((1, ranks))
    ),
    "a noisy rank": lambda rng, steps, ranks: (
        0.02 * rng.standard_normal((steps, ranks)) * np.where(np.arange(ranks) == 0, 4, 1)
    ),
}


@pytest.mark.parametrize("ranks", [4, 8, 32])
@pytest.mark.parametrize("family", NOISE)
def test_false_alarms_and_power(family: str, ranks: int) -> None:
    """In 50 steps: of 200 healthy runs at most 2 have a slow rank; one that is 5 % slower is found in 90 of 100."""
    rng = np.random.default_rng([len(family), ranks])
    false = found = 0
    for _ in range(200):
        times = 1 + NOISE[family](rng, 50, ranks)
        false += bool(find_slow_ranks(times, 1.0))
        times[:, 1] *= 1.05
        found += [slow.column for slow in find_slow_ranks(times, 1.0)] == [1]
    assert false <= 2
    assert found >= 180


@pytest.mark.parametrize(("steps", "ranks"), [(5, 2), (10, 8), (20, 2), (50, 2)])
def test_the_steps_of_a_profile_and_two_ranks(steps: int, ranks: int) -> None:
    """Of 200 healthy runs with independent steps at most 4 have a slow rank; one twice as slow is found in 180."""
    rng = np.random.default_rng([steps, ranks])
    runs = [1 + 0.1 * rng.standard_normal((steps, ranks)) for _ in range(200)]
    assert sum(bool(find_slow_ranks(times, 1.0, of_profile=True)) for times in runs) <= 4
    slow = [find_slow_ranks(times + np.eye(ranks)[1], 1.0, of_profile=True) for times in runs]
    assert sum([one.column for one in found] == [1] for found in slow) >= 180


@pytest.mark.parametrize("steps", [10, 20, 40])
def test_one_of_two_ranks_is_found_in_a_profile(steps: int) -> None:
    """15 % slower, of 300 in 297, also where it is slower now more and now less; of 300 healthy pairs 3 at most."""
    rng = np.random.default_rng(steps)
    runs = [1 + 0.02 * rng.standard_normal((steps, 2)) for _ in range(300)]
    waves = 0.1 * np.sin(np.linspace(0, 6, steps))
    slow = [find_slow_ranks(each + np.outer(0.15 + waves * (number % 2), [0, 1]), 1.0, of_profile=True)
            for number, each in enumerate(runs)]  # fmt: skip
    assert sum([one.column for one in found] == [1] for found in slow) >= 297
    assert sum(bool(find_slow_ranks(each, 1.0, of_profile=True)) for each in runs) <= 3


def test_two_ranks_need_more_steps() -> None:
    """With work that is alike for 10 steps at a time: of 400 healthy pairs at most 12 have a slow rank in 30 steps."""
    rng = np.random.default_rng(6)
    levels = np.repeat(rng.uniform(0, 0.15, (400, 3, 2)), 10, axis=1)
    assert sum(bool(find_slow_ranks(1 + each + 0.01 * rng.standard_normal((30, 2)), 1.0)) for each in levels) <= 12


@pytest.mark.parametrize("ranks", [2, 32])
def test_the_error_is_bounded_without_a_least_effect(ranks: int) -> None:
    """Of 200 healthy runs with correlated steps at most 2 have a slow rank, by the p-value alone."""
    rng = np.random.default_rng(ranks)
    runs = (1 + 0.05 * simulate(rng, ranks, 50, 0.5).T for _ in range(200))
    assert sum(bool(find_slow_ranks(times, 1.0, min_effect=0.0)) for times in runs) <= 2


@given(st.integers(0, 2**32 - 1), st.integers(5, 20), st.integers(30, 60), st.floats(0.1, 1.0))
def test_those_that_are_slower_are_named(seed: int, ranks: int, steps: int, effect: float) -> None:
    """Up to a third of the ranks, in whatever unit, each with its excess."""
    rng = np.random.default_rng(seed)
    slow = rng.choice(ranks, size=rng.integers(1, ranks // 3 + 1), replace=False)
    times = 1 + 0.005 * rng.standard_normal((steps, ranks))
    times[:, slow] += effect
    found = find_slow_ranks(1000 * times, 1000.0)
    assert {one.column for one in found} == set(slow)
    assert [one.excess for one in found] == pytest.approx([1000 * effect] * len(slow), rel=0.1)


def parts(**changes: tuple[int, float]) -> RankTimes:
    """Four ranks on two nodes; part → (rank, seconds more). Collectives end together, as they do."""
    rng = np.random.default_rng(1)
    base = {"input": 0.1, "compute": 0.6, "host": 0.05, "network": 0.0}
    times = {name: value + 0.002 * rng.standard_normal((40, 4)) for name, value in base.items()}
    work = {name: times[name] for name in ("input", "compute", "host")}
    for name, (rank, seconds) in changes.items():
        times[name][:, rank] += seconds
    own = sum(work.values())
    times["network"] = times["network"] + own.max(axis=1, keepdims=True) - own + 0.2
    return RankTimes(times, (0, 1, 2, 3), {0: "n1", 1: "n1", 2: "n2", 3: "n2"})  # type: ignore[arg-type]


@pytest.mark.parametrize("cause", ["input", "compute", "host", "network"])
def test_the_cause_is_named(cause: str) -> None:
    """What takes longer, and the node; ranks that wait in the collective for the slow one are not slow."""
    (found,) = find_stragglers(parts(**{cause: (2, 0.08)}))
    assert (found.rank, found.node, found.cause) == (2, "n2", cause)
    assert found.excess_s == pytest.approx(0.08, rel=0.1)
    assert found.p < 0.01
    assert find_stragglers(parts()) == []


def test_ranks_are_compared_with_their_hardware_class() -> None:
    """Slower GPUs are no stragglers, but a slow rank among them is; a rank alone in its class is compared with none."""
    rng = np.random.default_rng(3)
    compute = 1 + 0.01 * rng.standard_normal((40, 9))
    compute[:, 4:] *= 1.3
    compute[:, 6] += 0.1
    compute[:, 8] += 0.5
    nodes = {rank: f"n{rank}" for rank in range(9)}
    times = RankTimes({"compute": compute}, tuple(range(9)), nodes)
    classes = {f"n{rank}": ("new", "old", "odd")[(rank > 3) + (rank > 7)] for rank in range(9)}
    (found,) = find_stragglers(times, classes=classes)
    assert (found.rank, found.ranks, found.excess_s) == (6, 4, pytest.approx(0.1, abs=0.02))
    assert len(find_stragglers(times)) > 1


def test_two_ranks_need_a_larger_excess() -> None:
    """One of 2 is named from 1.4 times the least effect: either could be the one that is off by what nodes differ."""
    slow = 1 + 0.001 * np.random.default_rng(4).standard_normal((50, 4))
    slow[:, 1] += 0.038
    assert [one.column for one in find_slow_ranks(slow, 1.0)] == [1]
    assert find_slow_ranks(slow[:, :2], 1.0) == []
    slow[:, 1] += 0.01
    assert [one.column for one in find_slow_ranks(slow[:, :2], 1.0)] == [1]


def write_run(folder: Path, slow: int | None = None, steps: int = 40) -> Path:
    """A run folder with an attempt of 4 ranks, whose first step compiles."""
    rng = np.random.default_rng(2)
    for rank in range(4):
        log = StepLog(folder / "attempts" / "0" / "steps", rank)
        for step in range(steps + (rank == 3)):  # rank 3 is one ahead
            compute = (0.1 if step else 5.0) * (1.2 if rank == slow else 1) + 0.001 * rng.random()
            log.write(step=step, loss=1.0, wall_s=compute + 0.02, input_s=0.01, compute_s=compute, comm_s=0.01,
                      rank_samples=8)  # fmt: skip
        log.close()
        record = run_folder.RankRecord(rank=rank, world_size=4, local_rank=rank % 2, node=f"n{rank // 2}", pid=1,
                                       coordinator="n0:1", data={})  # fmt: skip
        (folder / "attempts" / "0" / "ranks").mkdir(exist_ok=True)
        run_folder.write_record(folder / "attempts" / "0" / "ranks" / f"{rank}.json", record)
    (folder / "plan.json").write_text('{"name": "bc", "site": "here", "job": {"nodes": 2, "tasks_per_node": 2}}')
    return folder


def test_a_run_is_read_by_its_step_logs(tmp_path: Path) -> None:
    """Of the steps that all ranks have, without the first; a log that is cut in a line is read up to it."""
    run = write_run(tmp_path, slow=3)
    with (run / "attempts/0/steps/0.jsonl").open("a") as file:
        file.write('{"schema":"pit.step/1","t":')
    (run / "attempts/0/steps/0.old.jsonl").write_text("")
    times = read_rank_times(run)
    assert (times.ranks, times.parts["compute"].shape) == ((0, 1, 2, 3), (39, 4))
    (found,) = find_stragglers(times)
    assert (found.rank, found.node, found.cause, found.steps) == (3, "n1", "compute", 39)


def test_what_cannot_be_judged_is_refused(tmp_path: Path) -> None:
    """One rank, few steps, a time that is not finite, and a run without step logs."""
    for times in (np.ones((50, 1)), np.ones((19, 8)), np.ones((29, 2)), np.full((50, 8), np.nan)):
        with pytest.raises(DataError):
            find_slow_ranks(times, 1.0)
    with pytest.raises(DataError):
        read_rank_times(tmp_path)
    assert find_slow_ranks(np.ones((30, 2)), 1.0) == []
