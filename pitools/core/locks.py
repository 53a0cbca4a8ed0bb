"""One process at a time decides about a run: flock(2) on `<run>/.lock`, which the kernel frees on any death."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pitools.core.errors import ClusterError, TryLater
from pitools.core.fs import os_error
from pitools.core.trust import user_name

# A file system without locks: verdicts are safe without one, for only one can make the file; so are submissions, for
# two of one number have one name, and of such jobs one has leave to run.
NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK}


@contextmanager
def held(path: Path, what: str, *, wait_s: float = 0.0) -> Iterator[None]:
    """Hold a lock file, waiting for it so long at most. Raises TryLater where another process has it, ClusterError."""
    try:
        descriptor = open_shared(path)
    except PermissionError as error:
        raise others(path.parent, what) from error
    except OSError as error:
        raise os_error(error, path) from error
    try:
        if not taken(descriptor, path, wait_s=wait_s):
            raise TryLater(f"{what} is being looked after by another process", where=str(path.parent))
        yield
    finally:
        os.close(descriptor)


def open_shared(path: Path, flags: int = 0) -> int:
    """A descriptor of a file that all who may write in its folder write to, made where it is missing. Raises OSError.

    Whatever the umask of whoever comes first: else nobody of a group's shared folder could take their locks after them.
    """
    flags |= os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    with contextlib.suppress(OSError):  # who may not give it away has it for themselves
        _let_group(descriptor, path.parent)
    return descriptor


def _let_group(descriptor: int, folder: Path) -> None:
    own, above = os.fstat(descriptor), folder.stat()
    if not above.st_mode & stat.S_IWGRP or own.st_uid != os.geteuid() or not stat.S_ISREG(own.st_mode):
        return
    if own.st_gid != above.st_gid:
        os.fchown(descriptor, -1, above.st_gid)
    if own.st_mode & 0o660 != 0o660:
        os.fchmod(descriptor, stat.S_IMODE(own.st_mode) | 0o660)


def taken(descriptor: int, path: Path, *, wait_s: float = 0.0) -> bool:
    """Take the lock of an open file within a time; also true where the file system has none. Raises ClusterError."""
    until = time.monotonic() + wait_s
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


def is_own(folder: Path) -> bool:
    """Whether a folder is this user's: what it says to start would be started as this user. Raises OSError."""
    return folder.stat().st_uid == os.geteuid()


def others(folder: Path, what: str) -> ClusterError:
    """The error that something is another user's."""
    hint = "only they can do this; anybody who may read it can use `pit launch show`, `why` and `logs`"
    return ClusterError(f"{what} is {owner(folder)}'s", where=str(folder), hint=hint)


def owner(path: Path) -> str:
    """The name of a folder's user, or their number."""
    try:
        return user_name(path.stat().st_uid)
    except OSError:
        return "somebody else"
