"""The record of a run's move to another site: `<run>/move.json`."""

from __future__ import annotations

from pathlib import Path

from pitools.core.record import Record
from pitools.run import run_folder
from pitools.run.attempt_records import Verdict

MOVE_FILE = "move.json"


class MoveIntent(Record, frozen=True, kw_only=True, tag="pit.move/1"):
    """A run's move, written before its first step. new_run_id: the run's id at the target site. t: when the move began.
    job_ended: whether the move has begun to end the run's job."""

    new_run_id: str
    target_site: str
    t: str
    job_ended: bool = False


def completed_move(run_dir: Path) -> MoveIntent | None:
    """Return the move of a run that was moved; None without a move, or before its end. Raises DataError."""
    verdict = run_folder.read_record(run_dir / "verdict.json", Verdict)
    return run_folder.read_record(run_dir / MOVE_FILE, MoveIntent) if verdict and verdict.code == "moved" else None
