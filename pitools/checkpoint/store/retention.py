"""Remove old checkpoints, each by a rename first: no reader sees a part, and two processes may prune at once."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from pitools.checkpoint.store import layout, locks, lookup
from pitools.core.errors import PitError, TryLater, UsageError
from pitools.core.fs import fsync_dir
from pitools.core.record import Record

KEEP_LAST = 3
_KILLED_AFTER_S = 3600.0  # without a write: longer than any save waits
PruneState = Literal["kept", "removed", "would be removed", "failed"]


class PruneResult(Record, frozen=True, kw_only=True, tag="pit.checkpoint-pruned/1"):
    """Whether one checkpoint was removed. reason: why it was kept, or ""; of "failed", the system's error."""

    step: int
    state: PruneState
    reason: str
    path: str


def prune_checkpoints(
    folder: Path,
    keep_last: int = KEEP_LAST,
    keep_every: int = 0,
    *,
    kept_steps: Mapping[int, str] = MappingProxyType({}),
    dry_run: bool = False,
) -> list[PruneResult]:
    """Remove all but the newest `keep_last` complete checkpoints and every `keep_every`-th step, oldest first.

    kept_steps: further steps that stay, each with the reason. The newest always stays, as do incomplete checkpoints,
    those that a link beside them names, those that a process reads, and those that cannot be removed. Raises
    UsageError, ClusterError.
    """
    if keep_last < 1 or keep_every < 0:
        raise UsageError("at least one checkpoint has to stay", where=f"keep_last={keep_last} keep_every={keep_every}")
    steps = lookup.complete_steps(folder)
    checkpoints = []
    for step in reversed(steps):
        path = layout.step_path(folder, step)
        state: PruneState = "kept"
        reason = _keep_reason(step, steps[:keep_last], keep_every, kept_steps)
        if not reason and step in named_steps(folder):  # by a link that may be newer than the first removal
            reason = "named by a link"
        if not reason and dry_run:
            state = "would be removed"
        elif not reason:
            state, reason = _remove(path)
        checkpoints.append(PruneResult(step=step, state=state, reason=reason, path=str(path)))
    return checkpoints[::-1]


def named_steps(folder: Path) -> set[int]:
    """Return the steps of the checkpoints to which links in their folder point, such as `best`; `latest` is none."""
    steps = set()
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if path.is_symlink() and path.name != layout.LATEST and path.resolve().parent == folder.resolve():
                steps.add(layout.step_of(path.resolve()))
    return {step for step in steps if step is not None}


def prune_after_save(folder: Path, keep_last: int = KEEP_LAST, keep_every: int = 0) -> None:
    """Prune after a save as `prune_checkpoints` does; failures are printed, not raised: the save has succeeded."""
    try:
        for record in prune_checkpoints(folder, keep_last, keep_every):
            if record.state == "failed":
                _print(f"{record.path} cannot be removed: {record.reason}")
    except PitError as error:
        _print(str(error))


def remove_leftovers(folder: Path, *, is_only_writer: bool = False) -> list[Path]:
    """Remove the leftovers of killed saves and removals, and return them; while another process saves there, only
    those of removals.

    is_only_writer: the caller holds `locks.writer_lock`, which yielded True. Without it, a save of another node is
    taken for killed after an hour: on some file systems a lock is known to its own node alone. Raises ClusterError.
    """
    leftovers = layout.leftovers(folder)
    if not leftovers:
        return []
    oldest_live = 0.0
    with contextlib.ExitStack() as stack:
        if not is_only_writer:
            if not locks.is_own_node(folder):
                oldest_live = time.time() - _KILLED_AFTER_S
            try:
                is_only_writer = stack.enter_context(locks.writer_lock(folder, timeout_s=0, saves=False))
            except TryLater:
                is_only_writer = False
        # A removal that has begun may be finished by any process.
        removable = [
            path
            for path in leftovers
            if path.name.startswith(layout.OLD_PREFIX)
            or (is_only_writer and (not oldest_live or layout.last_change(path) < oldest_live))
        ]
        for path in removable:
            layout.remove_tree(path)
    return removable


def _keep_reason(step: int, last: Collection[int], every: int, kept: Mapping[int, str]) -> str:
    if step in kept:
        return kept[step]
    if step in last:
        return f"of the newest {len(last)}"
    return f"every {every}" if every and step % every == 0 else ""


def _remove(path: Path) -> tuple[PruneState, str]:
    """Remove a checkpoint; return its state and reason."""
    renamed = path.with_name(f"{layout.OLD_PREFIX}{path.name}.{secrets.token_hex(4)}")
    try:
        with locks.exclusive_lock(path) as free:
            if not free:
                return ("kept", "being read") if path.exists() else ("removed", "")
            os.rename(path, renamed)
            fsync_dir(path.parent)
    except FileNotFoundError:
        return "removed", ""  # by another process
    except OSError as error:  # of another user, or write-protected: continue with the others
        return "failed", str(error.strerror)
    layout.remove_tree(renamed)
    return "removed", ""


def _print(text: str) -> None:
    print(f"older checkpoints stay: {text}", file=sys.stderr, flush=True)
