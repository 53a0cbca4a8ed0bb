"""Publish a folder atomically: it is built under a hidden name on the same file system, then renamed."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from pitools.core.fs import from_os_error, fsync_dir

_REMOVED_ERRNOS = (errno.ENOENT, errno.ESTALE)  # a removed folder; ESTALE: on NFS
BUILD_DIR = ".tmp"


def publish_dir(temporary: Path, final: Path, *, synced: bool = False) -> bool:
    """Sync a folder's names and rename it to `final`. Return False if another process published `final` first.

    The writer syncs the files' bytes. synced: the names in subfolders are synced, too. Raises NoSpace or ClusterError.
    """
    try:
        fsync_dirs(temporary, recursive=not synced)
        created = [final.parent] if not final.parent.exists() else []
        final.parent.mkdir(parents=True, exist_ok=True)
        # rename(2) onto a non-empty folder fails: another process was first.
        try:
            os.rename(temporary, final)
        except OSError:
            if not final.is_dir():
                _remove_empty(created)
                raise
            return False
        fsync_dir(final.parent)
        if created:
            fsync_dir(final.parent.parent)
    except OSError as error:
        if error.errno in _REMOVED_ERRNOS and final.is_dir():
            return False  # another process has just renamed it
        raise from_os_error(error, final) from error
    return True


def fsync_dirs(top: Path, *, recursive: bool) -> None:
    """Sync the names in a folder, so that they survive power loss. recursive: and in all below it. Raises OSError."""
    for folder in (folder for folder, _, _ in os.walk(top)) if recursive else [top]:
        fsync_dir(Path(folder))


def _remove_empty(folders: list[Path]) -> None:
    """Remove empty folders that this process created, innermost first."""
    with contextlib.suppress(OSError):
        for folder in folders:
            folder.rmdir()
