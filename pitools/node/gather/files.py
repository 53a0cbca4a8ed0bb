"""Read the files and folders that checks name."""

from __future__ import annotations

import errno
import grp
import os
import stat
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from pitools.core import trust
from pitools.node.gather.mounts import mount_points
from pitools.node.gather.read import Query, read_text
from pitools.node.types import Row

_TEXT_BYTES = 1 << 16
_KINDS: tuple[tuple[Callable[[int], bool], str], ...] = (
    (stat.S_ISREG, "file"),
    (stat.S_ISDIR, "directory"),
    (stat.S_ISSOCK, "socket"),
    (stat.S_ISFIFO, "pipe"),
)


def read_files(query: Query) -> Iterator[Row]:
    """Yield the rows of table `files`. Raises OSError if mounts cannot be read."""
    mounts = mount_points(query.proc)
    for path in query.names_left():
        yield {"path": path, "responds": False}
        yield {"path": path, **_facts(path, mounts)}


def _facts(path: str, mounts: Collection[str]) -> Row:
    try:
        status = Path(path).stat()
    except (FileNotFoundError, NotADirectoryError):
        return {"exists": False, "responds": True}
    except PermissionError:
        return {"exists": None, "responds": True}
    except (OSError, ValueError):  # ESTALE, ENOTCONN, EIO
        return {"responds": False}
    kind = next((name for is_kind, name in _KINDS if is_kind(status.st_mode)), "device")
    return {
        "exists": True,
        "kind": kind,
        "mode": f"{stat.S_IMODE(status.st_mode):04o}",
        "user": trust.user_name(status.st_uid),
        "group": _group_name(status.st_gid),
        "size_bytes": status.st_size,
        "age_s": round(time.time() - status.st_mtime, 1),
        "is_mount_point": os.path.realpath(path) in mounts,
        "is_writable": _is_writable(path) if kind == "directory" else None,
        "text": read_text(path, limit=_TEXT_BYTES) if kind == "file" else None,
        "responds": True,
    }


def _group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def _is_writable(folder: str) -> bool | None:
    """Return whether a file can be written in a folder, one without a name."""
    try:
        file = os.open(folder, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EISDIR):  # NFS and other file systems without such files
            return os.access(folder, os.W_OK)
        return False
    try:
        return os.write(file, b"\n") == 1
    except OSError:
        return False
    finally:
        os.close(file)
