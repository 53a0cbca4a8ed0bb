"""A run that is taken to another site, or was: `<run>/move.json`."""

from __future__ import annotations

from pathlib import Path

from pitools.core.record import Record
from pitools.run import run_folder
from pitools.run.attempt_records import Verdict

FILE = "move.json"


class Move(Record, frozen=True, kw_only=True, tag="pit.move/1"):
    """Where a run is taken, and what it is called there. ended: whether its job here was ended for it."""

    to: str
    site: str
    t: str
    ended: bool = False


def moved(run_dir: Path) -> Move | None:
    """Where a run goes on that was moved away; None for one that was not, or not to the end. Raises DataError."""
    given = run_folder.read_record(run_dir / "verdict.json", Verdict)
    return run_folder.read_record(run_dir / FILE, Move) if given and given.code == "moved" else None
