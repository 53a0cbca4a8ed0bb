"""One rank's output: the program's own, whole."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from pitools.launch import plan as planning

MakePlan = Callable[..., planning.Plan]
Pit = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def log(make_plan: MakePlan, tmp_path: Path) -> Path:
    """The log of rank 0 of a run's second attempt."""
    run = tmp_path / "runs" / "x-20260101-000000-abc123"
    plan = msgspec.structs.replace(make_plan("local"), site="local")
    path = run / "attempts" / "1" / "logs" / "0.out"
    path.parent.mkdir(parents=True)
    (run / "plan.json").write_bytes(msgspec.json.encode(plan))
    path.write_text("loss 0.5\n")
    return path


def test_logs_are_the_programs_own(pit: Pit, log: Path) -> None:
    """Where none began, why staging failed; a rank without a word is named as such."""
    run = str(log.parents[3])
    assert pit("launch", "logs", run).stdout == "loss 0.5\n"
    log.rename(log.with_name("lost"))
    (log.parent / "stage.n1.out").write_text("pit: 3 of 9 GiB\n")
    (log.parent / "stage.n2.out").write_text("pit: error: no space left\n")
    log.parent.with_name("exit.json").write_text("{}")
    assert pit("launch", "logs", run).stdout == "pit: error: no space left\n"
    log.write_text("")
    done = pit("launch", "logs", run)
    assert (done.returncode, done.stdout, "rank 0 has printed nothing" in done.stderr) == (0, "", True)
