"""Files that are whole or absent: written beside their place, synced, renamed."""

from __future__ import annotations

import errno
import os
import secrets
from pathlib import Path

from pitools.core.errors import ClusterError, NoSpace, PitError


def write_atomic(path: Path, data: bytes | str, *, mode: int = 0o644, durable: bool = True) -> None:
    """Write a file so that a reader, at any moment, sees the old content or the new, never a part.

    Raises NoSpace or ClusterError when the folder cannot take it.
    """
    payload = data.encode() if isinstance(data, str) else data
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(payload)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, path)
        if durable:
            sync_dir(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise os_error(error, path) from error


def sync_dir(folder: Path) -> None:
    """Make the names in a folder survive power loss."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def os_error(error: OSError, path: Path) -> PitError:
    """What a failed write means to the user: full → try later, refused → choose another place."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NoSpace(
            f"no space left: {reason}", where=str(path), hint="free space there, or choose another destination"
        )
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return ClusterError(f"cannot write: {reason}", where=str(path), hint="choose a destination you can write to")
    return ClusterError(reason, where=str(path))
