"""Who reads a checkpoint and who saves: flock(2), which any death ends.

A checkpoint's own manifest is what its readers lock, so that the lock moves with it; nothing else has to be kept.
Where a file system has no locks, readers read without, and nobody may clean up after others.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from pitools.checkpoint.store.manifest import FILE_NAME
from pitools.core.errors import DataError, TryLater
from pitools.core.fs import os_error

WRITER = ".writer"
# The ranks of an attempt that was killed may take some seconds to die.
_TIMEOUT_S = 30.0
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
# Of `writing`, in this process: forked children let go of them.
_held: set[int] = set()
_GONE = "another process removed it or moved it aside; look again for the newest"


@contextmanager
def reading(step_dir: Path, *, timeout_s: float = _TIMEOUT_S) -> Iterator[None]:
    """Keep a checkpoint where it is for as long as the block runs. Raises DataError when it is gone, TryLater."""
    path = step_dir / FILE_NAME
    try:
        descriptor = os.open(path, os.O_RDONLY | _FLAGS)
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=str(path), hint=_GONE) from error
    try:
        if flock(descriptor, fcntl.LOCK_SH, timeout_s=timeout_s) is False:
            raise TryLater("another process is about to remove this checkpoint", where=str(step_dir), hint=_GONE)
        # Only now: who removes may have been faster, and none can come from here on.
        if not _same(descriptor, path):
            raise DataError("this checkpoint is gone", where=str(step_dir), hint=_GONE)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def alone(step_dir: Path) -> Iterator[bool]:
    """Whether a checkpoint stands there and nobody reads it; while the block runs, none begins to. Raises OSError."""
    path = step_dir / FILE_NAME
    try:
        # For writing: over NFS an exclusive flock is a write lock.
        descriptor = os.open(path, os.O_RDWR | _FLAGS)
    except FileNotFoundError:
        descriptor = -1
    try:
        yield descriptor >= 0 and flock(descriptor, fcntl.LOCK_EX) is not False and _same(descriptor, path)
    finally:
        if descriptor >= 0:
            os.close(descriptor)


@contextmanager
def writing(folder: Path, *, timeout_s: float = _TIMEOUT_S) -> Iterator[bool]:
    """Be the one process that saves into a folder; yields whether that is sure, so that leftovers may be removed.

    Raises TryLater when another process saves there, NoSpace, ClusterError.
    """
    path = folder / WRITER
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | _FLAGS, 0o644)
    except OSError as error:
        raise os_error(error, path) from error
    # Where nobody closes it, this runs when the interpreter ends and names have gone.
    pid, getpid, close, held = os.getpid(), os.getpid, os.close, _held
    try:
        had = flock(descriptor, fcntl.LOCK_EX, timeout_s=timeout_s)
        if had is False:
            who = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another process"
            what, hint = f"{who} saves checkpoints here", "does an older attempt of this run still live? end it first"
            raise TryLater(what, where=str(folder), hint=hint)
        _sign(descriptor)
        _let_children_go()
        _held.add(descriptor)
        yield had is True
    finally:
        held.discard(descriptor)
        if getpid() == pid:
            close(descriptor)


def flock(descriptor: int, how: int, *, timeout_s: float = 0.0) -> bool | None:
    """Take a lock within a time; whether it was had, None where the file system has none. Raises OSError."""
    until, pause = time.monotonic() + timeout_s, 0.001
    while True:
        try:
            fcntl.flock(descriptor, how | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            pass
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return None
            raise
        if time.monotonic() >= until:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.2)


@lru_cache(maxsize=1)
def _let_children_go() -> None:
    """A data loader's forked worker that outlives a killed rank would go on to hold its lock."""

    def after() -> None:
        while _held:
            os.close(_held.pop())

    os.register_at_fork(after_in_child=after)


def _same(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except OSError:
        return False


def _sign(descriptor: int) -> None:
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    except OSError:  # a full disk takes nobody's lock away
        pass
