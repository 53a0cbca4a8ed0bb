"""What a run is said to be, when its folder and Slurm do not speak at the same moment."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pitools.launch import plan as planning
from pitools.launch import status
from pitools.run import folder
from pitools.site.load import load

MakePlan = Callable[..., planning.Plan]


class EndsWhileAsked:
    """A Slurm in which the job ends, and its script leaves word, between the question and the answer."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    def state_of(self, ids: list[str]) -> dict[str, str]:
        ended = folder.Attempt(job_id=ids[0], exit_code=7, ended="2026-01-01T00:00:00Z")
        folder.write(self.run_dir / "attempts" / "0" / "exit.json", ended)
        return {ids[0]: "FAILED"}


def test_a_run_that_ends_while_slurm_is_asked(
    make_plan: MakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finished state never comes without the exit code that the folder has by then."""
    run_dir = tmp_path / "r"
    run_dir.mkdir()
    (run_dir / "plan.json").write_bytes(msgspec.json.encode(make_plan("alpha")))
    folder.write(run_dir / "job.json", folder.JobRef(job_id="5", site="alpha", submitted="2026-01-01T00:00:00Z"))
    slurm: Any = EndsWhileAsked(run_dir)
    monkeypatch.setattr(status, "client", lambda site: slurm)
    run = status.show(run_dir, load("alpha"))
    assert (run.state, run.exit_code, run.attempts) == ("FAILED", 7, 1)
