"""The request to cancel a run, which its job or a later command carries out: `<run>/cancel.json`."""

from __future__ import annotations

from pathlib import Path

import msgspec

from pitools.core.record import Record, decode_json

CANCEL_FILE = "cancel.json"


class CancelRequest(Record, frozen=True, kw_only=True, tag="pit.cancel/1"):
    """A request to cancel. t: its time; "" where the file is damaged. refused_by_slurm: Slurm's error message; "" for
    none."""

    t: str = ""
    refused_by_slurm: str = ""


def pending_cancel(run_dir: Path) -> CancelRequest | None:
    """Return the request that is still to be carried out; None without one, or where Slurm has refused it."""
    request = last_cancel(run_dir)
    return None if request is None or request.refused_by_slurm else request


def is_by_owner(run_dir: Path) -> bool:
    """Return whether the request is of the run's owner, whose jobs Slurm lets them cancel. Raises OSError."""
    return (run_dir / CANCEL_FILE).lstat().st_uid == run_dir.stat().st_uid


def last_cancel(run_dir: Path) -> CancelRequest | None:
    """Return the last request, also a refused one; None without one.

    Only a file of the run's owner, or of root, counts: others may be allowed to write in the folder, and Slurm decides
    which jobs they may end. Raises OSError.
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
