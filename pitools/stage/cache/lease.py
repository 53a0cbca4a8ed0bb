"""Leases: a set is not removed while a process holds its lease file with flock LOCK_SH; the kernel releases it at exit.

A shell can lease too: `flock --shared ROOT/.leases/VERSION command`. The file's mtime is the last use. A job's prolog
instead locks the byte at the job's id, so that the job itself may evict what only its own prolog leases.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pitools.core.errors import ClusterError, DataError, PitError, TryLater, UsageError
from pitools.core.locks import lock_within, share_byte
from pitools.stage.cache.layout import LEASES, OBJECTS, require_safe, touch_lease
from pitools.stage.cache.layout import is_leased as is_leased

# An evictor holds the file exclusively only for a rename.
_LOCK_TIMEOUT_S = 10.0
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@contextmanager
def leased_set(path: Path, *, inheritable: bool = False, touch: bool = True) -> Iterator[Path]:
    """Lease the set at `<root>/objects/<version>` for the block; yield its path.

    touch: set its last use to now, and again at the end. Raises as `acquire`.
    """
    descriptor = acquire(path, inheritable=inheritable, touch=touch)
    try:
        yield path
    finally:
        if touch:
            _touch(descriptor)
        # Closed, not unlocked: loader processes forked in the block keep the lease until they end.
        os.close(descriptor)


@contextmanager
def try_lease(path: Path, *, touch: bool) -> Iterator[None]:
    """Lease the set at `path` for the block, if it is one and can be leased: a root may be read-only."""
    with contextlib.ExitStack() as stack:
        if path.parent.name == OBJECTS and (path.parent.parent / LEASES).is_dir():
            with contextlib.suppress(PitError):
                stack.enter_context(leased_set(path, touch=touch))
        yield


def acquire(path: Path, *, inheritable: bool = False, touch: bool = True) -> int:
    """Return a descriptor that leases the set at `path` until its last duplicate is closed.

    inheritable: a program executed by this process with open descriptors keeps the lease. Raises DataError when there
    is no set, TryLater, UsageError, ClusterError.
    """
    root, version = split_staged_path(path)
    require_safe(root, reading=True)
    descriptor = _open_lease_file(root, version)
    try:
        if not lock_within(descriptor, fcntl.LOCK_SH, timeout_s=_LOCK_TIMEOUT_S):
            message, hint = "its lease file is locked by another process", "find it with lslocks; run this again later"
            raise TryLater(message, where=str(root / LEASES / version), hint=hint)
        # Checked under the lock: an evictor may have removed the set before, and cannot any more.
        if not _is_present(path):
            raise DataError("no staged set", where=str(path), hint="stage it: pit-stage run SOURCE --to ROOT")
        if touch:
            _touch(descriptor)
        os.set_inheritable(descriptor, inheritable)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def acquire_for_job(path: Path, job_id: int) -> int:
    """Return a descriptor that leases the set at `path` for a job, against all evictors but the job's own. Raises as
    `acquire`.
    """
    descriptor = acquire(path, touch=False)
    try:
        share_byte(descriptor, job_id)
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    except OSError as error:
        os.close(descriptor)
        raise ClusterError(f"cannot be leased for a job: {error.strerror}", where=str(path)) from error
    return descriptor


def split_staged_path(path: Path) -> tuple[Path, str]:
    """Return root and version of `<root>/objects/<version>`. Raises UsageError for another path."""
    path = path.absolute()
    if path.parent.name != OBJECTS:
        raise UsageError("not a staged set", where=str(path), hint="give the path of `pit-stage run`'s record")
    return path.parent.parent, path.name


def last_used(root: Path, version: str) -> float:
    """Return a version's last use, Unix time; 0 when unknown."""
    try:
        return (root / LEASES / version).lstat().st_mtime
    except OSError:
        return 0.0


def _open_lease_file(root: Path, version: str) -> int:
    path = root / LEASES / version
    try:
        with contextlib.suppress(FileNotFoundError):
            return os.open(path, _READ_FLAGS)
        if not _is_present(root / OBJECTS / version):
            hint = "stage it: pit-stage run SOURCE --to ROOT"
            raise DataError("no staged set", where=str(root / OBJECTS / version), hint=hint)
        path.parent.mkdir(mode=0o700, exist_ok=True)  # an older root has none
        touch_lease(root, version)
        return os.open(path, _READ_FLAGS)
    except OSError as error:
        hint = "check that the root is shared and was staged by this version of pitools"
        raise ClusterError(f"its lease file cannot be opened: {error.strerror}", where=str(path), hint=hint) from error


def _is_present(path: Path) -> bool:
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except OSError:
        return False


def _touch(descriptor: int) -> None:
    # Fails for users who may only read the root; an evictor that finds the lease held does it for them.
    with contextlib.suppress(OSError):
        os.utime(descriptor)
