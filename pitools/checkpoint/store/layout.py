"""The layout of a run's checkpoint folder, and the names in it.

<checkpoints>/
    owner.json                  pit.checkpoint-owner/1: the run of the checkpoints, and its state (`owner.py`)
    step_<n>/                   the checkpoint after n steps: published by one rename, and never changed
        payload/                the framework's files
        state_schema.json       name → type and shape of all that the state holds (`state_schema.py`)
        rng_states.json         every rank's random generators (`rng_state.py`)
        manifest.json           pit.checkpoint/1: written last
    latest -> step_<n>          for people and scripts; pitools uses `lookup.py`
    quarantine/step_<n>.<stamp>/    a damaged one and reason.json (`quarantine.py`)
    .step_<n>.<token>/          being saved, or left by a save that was killed
    .old.step_<n>.<token>/      being removed
    .unreadable.step_<n>        why a run resumed from an older one than step_<n> (`unreadable.py`)
    .writer                     lock of the one process that saves here (`locks.py`)
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from pitools.checkpoint.store.manifest import MAX_STEP, is_inside
from pitools.core.errors import ClusterError, DataError, UsageError
from pitools.core.fs import from_os_error

PAYLOAD, DIGESTS_DIR, QUARANTINE, LATEST, OLD_PREFIX = "payload", ".digests", "quarantine", "latest", ".old."
_STEP = re.compile(r"step_(0|[1-9][0-9]{0,14})")
_UNPUBLISHED = re.compile(r"\.step_(0|[1-9][0-9]{0,14})\.([\w-]{1,64})", re.ASCII)
_TOKEN = re.compile(r"[\w-]{1,64}", re.ASCII)


def step_path(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint after `step` steps."""
    return folder / f"step_{step}"


def step_of(path: Path) -> int | None:
    """Return the steps in a folder's name; None if it is not a checkpoint's."""
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match else None


def unpublished_path(folder: Path, step: int, token: str) -> Path:
    """Return the path of a save's unpublished folder, the same at every rank. Raises UsageError for an invalid name."""
    if not 0 <= step <= MAX_STEP or not _TOKEN.fullmatch(token):
        raise UsageError(f"no checkpoint can have step {step} and token {token!r}", where=str(folder))
    return folder / f".step_{step}.{token}"


def parse_unpublished(path: Path) -> tuple[int, str] | None:
    """Return the step and token in an unpublished folder's name; None if it is not one."""
    match = _UNPUBLISHED.fullmatch(path.name)
    return (int(match[1]), match[2]) if match else None


def payload_path(checkpoint_dir: Path) -> Path:
    """Return the framework's folder in an unpublished folder or a checkpoint."""
    return checkpoint_dir / PAYLOAD


def create_payload_dir(unpublished_dir: Path) -> Path:
    """Create an unpublished folder and its payload, at every rank, and return the payload; safe to repeat: a barrier
    would cost more than creating it twice. Raises NoSpace, ClusterError.
    """
    try:
        (unpublished_dir / DIGESTS_DIR).mkdir(parents=True, exist_ok=True)
        payload_path(unpublished_dir).mkdir(exist_ok=True)
    except OSError as error:
        raise from_os_error(error, unpublished_dir) from error
    return payload_path(unpublished_dir)


def remove_tree(path: Path) -> None:
    """Remove an unpublished folder as far as possible; the next save removes the rest."""
    with contextlib.suppress(OSError):
        if path.is_symlink():
            path.unlink()
    shutil.rmtree(path, ignore_errors=True)


def last_change(folder: Path) -> float:
    """Return the newest modification time in a folder, in seconds since 1970; 0 if it is gone."""
    try:
        return max([folder.lstat().st_mtime, *(entry.stat().st_mtime for _, entry in walk_files(folder))])
    except OSError:
        return 0.0


def listed_steps(folder: Path) -> list[int]:
    """Return the steps in the names of checkpoints, newest first; [] without a folder. Raises ClusterError."""
    return sorted((step for path in _list_dir(folder) if (step := step_of(path)) is not None), reverse=True)


def leftovers(folder: Path) -> list[Path]:
    """Return what unfinished saves and removals left."""
    prefixes = (f"{OLD_PREFIX}step_", f".{LATEST}.")
    return [path for path in _list_dir(folder) if path.name.startswith(prefixes) or parse_unpublished(path)]


def walk_files(top: Path, skip: str = "") -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield (relative path, entry) of all but folders, without following links. skip: a folder. Raises OSError."""
    todo = [""]
    while todo:
        prefix = todo.pop()
        with os.scandir(top / prefix) as entries:
            for entry in entries:
                if not entry.is_dir(follow_symlinks=False):
                    yield f"{prefix}{entry.name}", entry
                elif prefix or entry.name != skip:
                    todo.append(f"{prefix}{entry.name}/")


def file_sizes(unpublished_dir: Path, is_wanted: Callable[[str], bool] = lambda _: True) -> dict[str, int]:
    """Return the bytes of each wanted file of an unpublished folder. Raises DataError for a special file, OSError.

    Only wanted files are stat'ed: a thousand ranks that each stat every file would slow down the file servers.
    """
    sizes = {}
    for path, entry in walk_files(unpublished_dir, skip=DIGESTS_DIR):
        if not entry.is_file(follow_symlinks=False) or not is_inside(path):
            raise DataError(
                f"{path!r}: not a regular file, or an unprintable name: a checkpoint cannot hold it",
                where=str(unpublished_dir),
            )
        if is_wanted(path):
            sizes[path] = entry.stat(follow_symlinks=False).st_size
    return sizes


def _list_dir(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        reason = os.strerror(error.errno or errno.EIO)
        hint = f"check that the file system is mounted: ls {folder}"
        raise ClusterError(f"cannot be listed: {reason}", where=str(folder), hint=hint) from error
