"""Which checkpoints stay. Removal is a rename first, so that nobody ever sees a part; two who prune do no harm."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Literal

from pitools.checkpoint.store import layout, locks, lookup
from pitools.core.errors import PitError, TryLater, UsageError
from pitools.core.fs import fsync_dir
from pitools.core.record import Record

KEEP_LAST = 3
PruneState = Literal["kept", "removed", "would be removed", "failed"]


class PruneResult(Record, frozen=True, kw_only=True, tag="pit.checkpoint-pruned/1"):
    """What became of one checkpoint. reason: why it is still there, or ""; of "failed", the system's error."""

    step: int
    state: PruneState
    reason: str
    path: str


def prune_checkpoints(
    folder: Path,
    keep_last: int = KEEP_LAST,
    keep_every: int = 0,
    *,
    kept_steps: Collection[int] = (),
    dry_run: bool = False,
) -> list[PruneResult]:
    """Remove all but the newest `keep_last` whole checkpoints and those whose steps `keep_every` divides, oldest first.

    kept_steps: more that stay. The newest stays whatever is asked, as does what another process reads (`held.reading`),
    what is damaged: that is for `quarantine`, and what cannot be removed. Raises UsageError, ClusterError.
    """
    if keep_last < 1 or keep_every < 0:
        raise UsageError("at least one checkpoint has to stay", where=f"keep_last={keep_last} keep_every={keep_every}")
    steps = lookup.complete_steps(folder)
    found = []
    for step in reversed(steps):
        path = layout.step_path(folder, step)
        state: PruneState = "kept"
        reason = _keep_reason(step, steps[:keep_last], keep_every, kept_steps)
        if not reason and dry_run:
            state = "would be removed"
        elif not reason:
            state, reason = _remove(path)
        found.append(PruneResult(step=step, state=state, reason=reason, path=str(path)))
    return found[::-1]


def prune_after_save(folder: Path, keep_last: int = KEEP_LAST, keep_every: int = 0) -> None:
    """As `prune_checkpoints`, after a save: what does not go is told and never raised, for what was saved is safe."""
    try:
        for record in prune_checkpoints(folder, keep_last, keep_every):
            if record.state == "failed":
                _print(f"{record.path} cannot be removed: {record.reason}")
    except PitError as error:
        _print(str(error))


def remove_leftovers(folder: Path, *, is_only_writer: bool = False) -> list[Path]:
    """Remove what killed saves and removals left, and say what; nothing while another process saves there.

    is_only_writer: the caller is in `locks.writer_lock`, which yielded True. Raises ClusterError.
    """
    left = layout.leftovers(folder)
    if not left:
        return []
    with contextlib.ExitStack() as stack:
        if not is_only_writer:
            try:
                is_only_writer = stack.enter_context(locks.writer_lock(folder, timeout_s=0))
            except TryLater:
                is_only_writer = False
        # What is being removed is nobody's, whoever saves.
        gone = [path for path in left if is_only_writer or path.name.startswith(layout.OLD_PREFIX)]
        for path in gone:
            layout.remove_building(path)
    return gone


def _keep_reason(step: int, last: Collection[int], every: int, keep: Collection[int]) -> str:
    if step in last:
        return f"of the newest {len(last)}"
    if step in keep:
        return "asked for"
    return f"every {every}" if every and step % every == 0 else ""


def _remove(path: Path) -> tuple[PruneState, str]:
    """Remove a checkpoint; returns what became of it, and why it is still there."""
    aside = path.with_name(f"{layout.OLD_PREFIX}{path.name}.{secrets.token_hex(4)}")
    try:
        with locks.exclusive_lock(path) as free:
            if not free:
                return ("kept", "being read") if path.exists() else ("removed", "")
            os.rename(path, aside)
            fsync_dir(path.parent)
    except FileNotFoundError:
        return "removed", ""  # somebody else was faster
    except OSError as error:  # somebody else's, or write-protected: the others may go
        return "failed", str(error.strerror)
    layout.remove_building(aside)
    return "removed", ""


def _print(text: str) -> None:
    print(f"older checkpoints stay: {text}", file=sys.stderr, flush=True)
