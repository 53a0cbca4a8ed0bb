"""Remove the working folders of abandoned ingests."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from pitools.core.fs import iter_tree, remove_tree
from pitools.store import version_state
from pitools.store.publish import BUILD_DIR

_TOO_DEEP = (errno.ENAMETOOLONG,)  # for an ingest to be at work there
# An active ingest writes more often than this, whatever --grace is.
IDLE_S = 600
# The names of an ingest's or a rebuild's folders; other files there may belong to users.
_INGEST_DIR = re.compile(r".+\.[0-9a-f]{32}(\.[0-9a-f]{8})?|rebuild\..+\.[0-9a-f]{8}")


def remove_abandoned(root: Path, grace_s: int, moment: datetime, *, dry_run: bool) -> Iterator[tuple[str, int | None]]:
    """Remove folders in `<root>/.tmp/` not written to for `grace_s` seconds (at least IDLE_S); yield name and bytes of
    each, None for the bytes of one that is kept since it was written to."""
    limit = moment.timestamp() - max(grace_s, IDLE_S)
    for path in () if (root / BUILD_DIR).is_symlink() else version_state.list_names(root / BUILD_DIR):
        if not _INGEST_DIR.fullmatch(path.name):
            continue
        size = _abandoned_bytes(path, limit)
        if size is not None and not dry_run:
            trash = root / version_state.TRASH / f"{path.name}.{os.urandom(4).hex()}.deleting"
            try:
                trash.parent.mkdir(exist_ok=True)
                os.rename(path, trash)
            except OSError:  # of another user, or just published
                continue
            remove_tree(trash)
        yield path.name, size


def _abandoned_bytes(path: Path, limit: float) -> int | None:
    """Return the bytes below a folder; None where a file changed since `limit`, or for no folder."""
    size = 0
    try:
        if path.is_symlink() or not path.is_dir() or path.stat().st_mtime > limit:
            return None
        for entry in iter_tree(path, ignored_errnos=_TOO_DEEP):
            try:
                status = entry.stat(follow_symlinks=False)
            except OSError as error:
                if error.errno in _TOO_DEEP:
                    continue
                raise
            if status.st_mtime > limit:
                return None
            size += 0 if entry.is_dir(follow_symlinks=False) else status.st_size
    except OSError:  # it is changing
        return None
    return size
