"""The step log: what survives a kill, and what it adds up to."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pitools.core.errors import DataError
from pitools.run import steps


def write(folder: Path, rank: int, losses: list[float]) -> None:
    log = steps.StepLog(folder, rank)
    for number, loss in enumerate(losses):
        log.write(
            step=number,
            loss=loss,
            wall_s=1.0 if number else 5.0,
            input_s=0.1,
            compute_s=0.6,
            comm_s=0.2,
            rank_samples=8,
        )
    log.close()


def test_a_line_cut_short_is_left_out(tmp_path: Path) -> None:
    """A rank that is killed loses the step it was in, and no more."""
    write(tmp_path, 0, [3.0, 2.0])
    path = tmp_path / "0.jsonl"
    path.write_bytes(path.read_bytes() + b'{"schema":"pit.step/1","t":')
    assert [step.loss for step in steps.read_step_log(path)] == [3.0, 2.0]


def test_what_is_no_step_log_is_told(tmp_path: Path) -> None:
    """A whole line that is no step is damage, not a kill."""
    (tmp_path / "0.jsonl").write_text("{}\n")
    with pytest.raises(DataError, match="not a step log"):
        steps.read_step_log(tmp_path / "0.jsonl")


def test_a_loss_that_is_no_number_is_none(tmp_path: Path) -> None:
    """A run that diverged can still be read."""
    write(tmp_path, 0, [1.0, math.nan, math.inf])
    assert [step.loss for step in steps.read_step_log(tmp_path / "0.jsonl")] == [1.0, None, None]


def test_the_summary_adds_up(tmp_path: Path) -> None:
    """Shares are of rank 0's wall time and sum to one; the step time leaves the compiling step out."""
    for rank in (0, 1):
        write(tmp_path, rank, [3.0, 2.0, 1.0])
    summary = steps.summarize_steps(steps.read_step_log(tmp_path / f"{rank}.jsonl") for rank in (1, 0))
    assert summary is not None
    assert (summary.ranks, summary.steps, summary.first_loss, summary.last_loss) == (2, 3, 3.0, 1.0)
    assert summary.step_s == 1.0
    shares = [summary.input_share, summary.compute_share, summary.comm_share, summary.other_share]
    assert shares == pytest.approx([0.3 / 7, 1.8 / 7, 0.6 / 7, 4.3 / 7])


def test_no_steps_are_no_summary() -> None:
    """A run that made no step has nothing to add up."""
    assert steps.summarize_steps([[], []]) is None


def test_metrics_of_any_number_can_be_read(tmp_path: Path) -> None:
    """A success that is a bool, or NumPy's mean, is a number: it neither ends the program nor hides the step."""
    log = steps.StepLog(tmp_path, 0)
    metrics: Any = {"won": True, "count": 3, "mean": np.mean([0.0, 1.0]), "single": np.float32(0.5), "bad": math.nan}
    log.write(step=0, loss=1.0, wall_s=1.0, input_s=0, compute_s=0, comm_s=0, rank_samples=1, metrics=metrics)
    log.close()
    (step,) = steps.read_step_log(tmp_path / "0.jsonl")
    assert step.metrics == {"won": 1.0, "count": 3.0, "mean": 0.5, "single": 0.5, "bad": None}
