"""One process at a time decides about a run: flock(2) on `<run>/.lock`, which the kernel frees on any death."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pitools.core.errors import ClusterError, TryLater
from pitools.core.files import os_error

# A file system without locks: verdicts are safe without one, for only one can make the file; so are submissions, for
# two of one number have one name, and of such jobs one has leave to run.
NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK}


@contextmanager
def held(path: Path, what: str, *, wait_s: float = 0.0) -> Iterator[None]:
    """Hold a lock file, waiting for it so long at most. Raises TryLater where another process has it, ClusterError."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except PermissionError as error:
        hint = "only they can do this; anybody who may read it can use `pit launch show`, `why` and `logs`"
        raise ClusterError(f"{what} is {_owner(path.parent)}'s", where=str(path.parent), hint=hint) from error
    except OSError as error:
        raise os_error(error, path) from error
    try:
        if not _take(descriptor, path, time.monotonic() + wait_s):
            raise TryLater(f"{what} is being looked after by another process", where=str(path.parent))
        yield
    finally:
        os.close(descriptor)


def _owner(path: Path) -> str:
    try:
        return path.owner()
    except (OSError, KeyError):
        return "somebody else"


def _take(descriptor: int, path: Path, until: float) -> bool:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(0.05)
        except OSError as error:
            if error.errno in NO_LOCKS:
                return True
            raise os_error(error, path) from error
