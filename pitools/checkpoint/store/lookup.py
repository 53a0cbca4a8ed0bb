"""List the checkpoints of a folder by names, manifests and file sizes; `verify.py` reads their bytes."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from pitools.checkpoint.store import layout, owner, unreadable
from pitools.checkpoint.store.manifest import CheckpointManifest, load_manifest
from pitools.core.errors import DataError, PitError
from pitools.core.fs import fsync_dir


def latest_step(folder: Path) -> int | None:
    """Return the step of the newest complete checkpoint, by file sizes, or None. Raises ClusterError if the folder is
    unreadable.
    """
    return next(_iter_complete(folder), None)


def complete_steps(folder: Path) -> list[int]:
    """Return the steps of all complete checkpoints, by file sizes, newest first. Raises ClusterError."""
    return list(_iter_complete(folder))


def read_if_complete(step_dir: Path) -> CheckpointManifest | None:
    """Return the manifest of a checkpoint if every file has the size in it; else None."""
    try:
        if not stat.S_ISDIR(step_dir.lstat().st_mode):
            return None
        manifest = load_manifest(step_dir)
        if manifest.step != layout.step_of(step_dir):
            return None
        prefix = f"{step_dir}/"
        for entry in manifest.files:
            status = os.stat(prefix + entry.path, follow_symlinks=False)  # noqa: PTH116
            if status.st_size != entry.bytes or not stat.S_ISREG(status.st_mode):
                return None
    except (OSError, DataError):
        return None
    return manifest


def update_latest_link(folder: Path, *, except_step: int | None = None) -> None:
    """Point `latest` to the newest complete checkpoint, or remove it. Best effort: pitools does not read it.

    except_step: a step that is being removed.
    """
    with contextlib.suppress(OSError, PitError):
        latest = folder / layout.LATEST
        step = next((step for step in _iter_complete(folder) if step != except_step), None)
        if step is None:
            latest.unlink(missing_ok=True)
            return
        temporary = folder / f".{layout.LATEST}.{secrets.token_hex(4)}"
        temporary.symlink_to(layout.step_path(folder, step).name)
        try:
            os.replace(temporary, latest)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        fsync_dir(folder)


def _iter_complete(folder: Path) -> Iterator[int]:
    folder_owner = owner.read_owner(folder)
    for step in layout.listed_steps(folder):
        path = layout.step_path(folder, step)
        manifest = None if unreadable.is_marked_unreadable(path) else read_if_complete(path)
        # A copy out of another run's folder is no progress of this one.
        if manifest and (folder_owner is None or owner.is_owned_by(folder_owner, manifest)):
            yield step
