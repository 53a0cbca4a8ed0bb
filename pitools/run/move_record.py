"""The record of a run's move to another site: `<run>/move.json`."""

from __future__ import annotations

import contextlib
from pathlib import Path

from pitools.core.errors import PitError, TryLater
from pitools.core.locks import lock
from pitools.core.record import Record
from pitools.run import run_folder
from pitools.run.attempt_records import Verdict

MOVE_FILE = "move.json"
MOVE_LOCK = ".move"  # held by the moving process


class MoveIntent(Record, frozen=True, kw_only=True, tag="pit.move/1"):
    """A run's move, written before its first step. new_run_id: the run's id at the target site. t: when the move began.
    stop_requested: whether the move has begun to end the run's job."""

    new_run_id: str
    target_site: str
    t: str
    stop_requested: bool = False


def completed_move(run_dir: Path) -> MoveIntent | None:
    """Return the move of a run that was moved; None without a move, or before its end. Raises DataError."""
    verdict = run_folder.read_record(run_dir / "verdict.json", Verdict)
    return run_folder.read_record(run_dir / MOVE_FILE, MoveIntent) if verdict and verdict.code == "moved" else None


def interrupted_move(run_dir: Path) -> TryLater | None:
    """Return the error for a run whose move was interrupted, and which nothing continues until the move is repeated.

    None for any other run, and for one of another user. Raises DataError.
    """
    verdict = run_folder.read_record(run_dir / "verdict.json", Verdict)
    if verdict is None or verdict.code != "moving":
        return None
    with contextlib.suppress(PitError), lock(run_dir / MOVE_LOCK, f"the move of run {run_dir.name}"):
        if intent := run_folder.read_record(run_dir / MOVE_FILE, MoveIntent):
            hint = f"pit launch move {run_dir.name} --site {intent.target_site}; or: pit launch cancel {run_dir.name}"
            return TryLater(f"its move to {intent.target_site} was interrupted", where=str(run_dir), hint=hint)
    return None
