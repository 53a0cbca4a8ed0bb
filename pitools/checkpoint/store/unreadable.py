"""Checkpoints that a run could not read, though they are there, and went on without.

They stay where they are, for a server that comes back; `.unread.step_<n>` beside one says why. Until it has been read
again it is no progress of the run: `latest` passes it by, and it is not removed for being old.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from pitools.core import timestamps
from pitools.core.errors import PitError
from pitools.core.fs import write_atomic

PREFIX = ".unread."


def mark(step_dir: Path, why: str) -> None:
    """Leave word that it could not be read. Best effort: where nothing can be written, nothing is removed either."""
    with contextlib.suppress(OSError, PitError):
        write_atomic(_mark(step_dir), f"{timestamps.now()} {why}\n")


def is_marked(step_dir: Path) -> bool:
    """Whether there is word of it."""
    return os.path.lexists(_mark(step_dir))


def reason(step_dir: Path) -> str:
    """What was left as word; "" for none."""
    try:
        with _mark(step_dir).open(errors="replace") as file:
            return file.read(500).strip()
    except OSError:
        return ""


def clear(step_dir: Path) -> None:
    """It can be read, or is no longer there."""
    with contextlib.suppress(OSError):
        _mark(step_dir).unlink(missing_ok=True)


def _mark(step_dir: Path) -> Path:
    return step_dir.with_name(f"{PREFIX}{step_dir.name}")
