"""A cancel of a run that was asked for, and is not yet carried out: `<run>/cancel.json`."""

from __future__ import annotations

from pathlib import Path

import msgspec

from pitools.core.record import Record, decode_json

CANCEL_FILE = "cancel.json"


class CancelRequest(Record, frozen=True, kw_only=True, tag="pit.cancel/1"):
    """A cancel that was asked for. t: when; "" where the file is damaged. refused_by_slurm: by Slurm, in its words; "":
    not."""

    t: str = ""
    refused_by_slurm: str = ""


def pending_cancel(run_dir: Path) -> CancelRequest | None:
    """Return the cancel that is still to be carried out; None where none was asked for, or Slurm has refused it."""
    asked = last_cancel(run_dir)
    return None if asked is None or asked.refused_by_slurm else asked


def last_cancel(run_dir: Path) -> CancelRequest | None:
    """Return the cancel that was asked for last, also one that was refused; None where there is none.

    Counts only where the run's owner, or root, asked: others may be allowed to write in the folder, and Slurm decides
    what they may end. Raises what reading raises.
    """
    path = run_dir / CANCEL_FILE
    try:
        if path.lstat().st_uid not in (run_dir.stat().st_uid, 0):
            return None
        return decode_json(path.read_bytes(), CancelRequest)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError:
        return CancelRequest()
