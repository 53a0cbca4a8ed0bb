"""Mark checkpoints that exist but could not be read, so that a run resumed from an older one.

They stay in place, for a server that comes back; `.unreadable.step_<n>` beside each has the reason. Until a restore
or `check` reads it whole, it does not count as progress: `latest` skips it, and retention does not remove it.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from pitools.core import timestamps
from pitools.core.errors import PitError
from pitools.core.fs import write_atomic

MARK_PREFIX = ".unreadable."


def mark_unreadable(step_dir: Path, reason: str) -> None:
    """Mark a checkpoint as unreadable. Best effort: where nothing can be written, nothing is removed either."""
    with contextlib.suppress(OSError, PitError):
        write_atomic(_mark_path(step_dir), f"{timestamps.now_rfc3339()} {reason}\n")


def is_marked_unreadable(step_dir: Path) -> bool:
    """Return whether a checkpoint is marked as unreadable."""
    return os.path.lexists(_mark_path(step_dir))


def unreadable_reason(step_dir: Path) -> str:
    """Return the time and reason in the mark; "" where there is none."""
    try:
        with _mark_path(step_dir).open(errors="replace") as file:
            return file.read(500).strip()
    except OSError:
        return ""


def clear_mark(step_dir: Path) -> None:
    """Remove the mark: the checkpoint can be read, or is gone."""
    with contextlib.suppress(OSError):
        _mark_path(step_dir).unlink(missing_ok=True)


def _mark_path(step_dir: Path) -> Path:
    return step_dir.with_name(f"{MARK_PREFIX}{step_dir.name}")
