"""A cancel of a run that was asked for, and is not yet carried out: `<run>/cancel.json`."""

from __future__ import annotations

from pathlib import Path

import msgspec

from pitools.core.record import Record, decode_json

FILE = "cancel.json"


class Cancel(Record, frozen=True, kw_only=True, tag="pit.cancel/1"):
    """A cancel that was asked for. t: when; "" where the file is damaged."""

    t: str = ""


def read(run_dir: Path) -> Cancel | None:
    """Return the cancel that is still to be carried out; None where none was asked for.

    Counts only where the run's owner, or root, asked: others may be allowed to write in the folder, and Slurm decides
    what they may end. Raises what reading raises.
    """
    path = run_dir / FILE
    try:
        if path.lstat().st_uid not in (run_dir.stat().st_uid, 0):
            return None
        return decode_json(path.read_bytes(), Cancel)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError:
        return Cancel()
