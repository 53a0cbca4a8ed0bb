"""Verify all checkpoints of a folder."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from pitools.checkpoint.store import layout, locks, lookup, quarantine, unreadable
from pitools.checkpoint.store.manifest import load_manifest
from pitools.checkpoint.store.problem import CheckpointProblem
from pitools.checkpoint.store.verify import verify_checkpoint
from pitools.core.errors import DataError, PitError
from pitools.core.progress import progress_bar
from pitools.core.record import Record

# About a second's reading.
_PROGRESS_BAR_BYTES = 1 << 30
# Before an unreadable checkpoint is moved: a server may have been away for a moment.
_PAUSE_S = 3.0


class FolderCheck(Record, frozen=True, kw_only=True, tag="pit.checkpoint-check/1"):
    """The totals of a check, without checkpoints that the run removed meanwhile. bytes: by the manifests.

    newest_good_step: the newest without damage, or null. quarantined: number of checkpoints moved aside.
    """

    path: str
    checkpoints: int
    bytes: int
    findings: int
    quarantined: int
    newest_good_step: int | None
    wall_s: float


def check_folder(
    folder: Path, steps: Sequence[int], *, threads: int = 0, move_aside: bool = False
) -> Iterator[CheckpointProblem | FolderCheck]:
    """Yield the problems of each checkpoint, newest first (a bar for each large one, on a terminal), then the totals.

    A checkpoint without damage loses its mark `.unreadable`. move_aside: move damaged and unreadable ones to the
    quarantine. Raises NoSpace, ClusterError.
    """
    started, n_bytes, checked, findings, moved = time.monotonic(), 0, 0, 0, 0
    good: int | None = None
    for step in sorted(steps, reverse=True):
        path = layout.step_path(folder, step)
        size, problems = _check_one(path, threads)
        if move_aside and problems and all(problem.problem == "unreadable" for problem in problems):
            time.sleep(_PAUSE_S)
            size, problems = _check_one(path, threads)
        if problems and step not in layout.listed_steps(folder):
            continue  # a live run has just pruned it
        yield from problems
        n_bytes, checked, findings = n_bytes + size, checked + 1, findings + len(problems)
        is_damaged = any(problem.is_damage for problem in problems)
        if all(problem.problem == "extra" for problem in problems):
            good = step if good is None else good
            if unreadable.is_marked_unreadable(path):  # it was read now: it counts as progress again
                unreadable.clear_mark(path)
                lookup.update_latest_link(folder)
        if is_damaged and move_aside:
            moved += quarantine.quarantine_checkpoint(path, problems) is not None
    yield FolderCheck(
        path=str(folder.absolute()),
        checkpoints=checked,
        bytes=n_bytes,
        findings=findings,
        quarantined=moved,
        newest_good_step=good,
        wall_s=round(time.monotonic() - started, 3),
    )


def newest_good_step(folder: Path) -> int | None:
    """Return the step of the newest checkpoint whose bytes all match its manifest, or None. Raises ClusterError."""
    for step in lookup.complete_steps(folder):
        if not any(problem.is_damage for problem in _check_one(layout.step_path(folder, step))[1]):
            return step
    return None


def _check_one(path: Path, threads: int = 0) -> tuple[int, list[CheckpointProblem]]:
    """Return a checkpoint's bytes and problems; its run does not remove it while it is read."""
    with ExitStack() as stack:
        with suppress(PitError):  # a manifest that cannot be locked is a problem that the check reports
            stack.enter_context(locks.read_lock(path))
        size = _bytes(path)
        advance = stack.enter_context(progress_bar(path.name, size, quiet=size < _PROGRESS_BAR_BYTES))
        return size, verify_checkpoint(path, threads=threads, advance=advance)


def _bytes(step_dir: Path) -> int:
    try:
        return load_manifest(step_dir).total_bytes
    except DataError:
        return 0
