"""A folder that is whole or absent: built under a hidden name on the same file system, then renamed."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from pitools.core.fs import from_os_error, fsync_dir

_REMOVED_ERRNOS = (errno.ENOENT, errno.ESTALE)  # what a folder's absence is called, also by NFS
STAGING_DIR = ".tmp"


def publish_dir(temporary: Path, final: Path, *, synced: bool = False) -> bool:
    """Sync a filled folder's names and rename it to `final`; False when another process had published `final` first.

    The files' own bytes are for the writer to sync. synced: the names in the folders below, too, are on the disk
    already. Raises NoSpace or ClusterError.
    """
    try:
        sync_names(temporary, below=not synced)
        made = [final.parent] if not final.parent.exists() else []
        final.parent.mkdir(parents=True, exist_ok=True)
        # rename(2) onto a folder that is not empty fails: that is how a lost race shows.
        try:
            os.rename(temporary, final)
        except OSError:
            if not final.is_dir():
                _remove_empty(made)
                raise
            return False
        fsync_dir(final.parent)
        if made:
            fsync_dir(final.parent.parent)
    except OSError as error:
        if error.errno in _REMOVED_ERRNOS and final.is_dir():
            return False  # another process has just renamed it
        raise from_os_error(error, final) from error
    return True


def sync_names(top: Path, *, below: bool) -> None:
    """Make the names in a folder survive power loss, with `below` also in all folders below it. Raises OSError."""
    for folder in (folder for folder, _, _ in os.walk(top)) if below else [top]:
        fsync_dir(Path(folder))


def _remove_empty(folders: list[Path]) -> None:
    """Remove folders that this process made, innermost first, as far as they are empty."""
    with contextlib.suppress(OSError):
        for folder in folders:
            folder.rmdir()
