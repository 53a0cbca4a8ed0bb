"""Lock files: flock(2) or OFD locks, which the kernel releases when the process dies; some contain their owner and its
progress.

`lock_within` refuses a file system without locks: staging is for a node's own disk. `lock` and `lock_if_supported`
continue without a lock there: they guard files that only one process can create, and submissions with unique names;
`lock` with `is_required` does not.
Lock files are never deleted: if one were deleted while a process waits for it, two processes could hold the lock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import getpass
import os
import stat
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from pitools.core import timestamps
from pitools.core.errors import ClusterError, TryLater
from pitools.core.fs import from_os_error
from pitools.core.record import Record, decode_json
from pitools.core.trust import user_name
from pitools.core.units import format_size

# A process that only tests whether a lock is held holds it for less than this; no wait is reported for it.
PROBE_S = 0.02
_REPORT_EVERY_S = 1.0
_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
# A file system without locks. Verdicts are safe there, because only one process can create the file; submissions too,
# because two of one number have the same job name, and only one job of a name may run.
_UNSUPPORTED_ERRNOS = {errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK}

# struct flock of <fcntl.h>: type, whence, start, length (0: to the end), pid.
_RANGE = struct.Struct("hhqqi4x")

ReportProgress = Callable[[int, int], None]


class LockOwner(Record, frozen=True, kw_only=True, tag="pit.stage-lock/1"):
    """The process that holds a version's lock, and its progress. job: Slurm's job id, or "". All empty if unknown."""

    pid: int = 0
    host: str = ""
    job: str = ""
    user: str = ""
    started: str = ""
    done_bytes: int = 0
    bytes: int = 0


def is_world_readable(folder: Path) -> bool:
    """Return whether all users may read a folder, and therefore the small files in it."""
    try:
        return bool(folder.stat().st_mode & stat.S_IROTH)
    except FileNotFoundError:
        return False


def open_readable_lock_file(path: Path) -> int:
    """Open a lock or lease file, and create it if missing: readable by all users if its folder is. Raises OSError."""
    try:
        return os.open(path, os.O_RDWR | _FLAGS)
    except FileNotFoundError:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | _FLAGS, 0o600)
        if is_world_readable(path.parent):
            os.fchmod(descriptor, 0o644)
        return descriptor


def flock_within(
    descriptor: int,
    mode: int,
    *,
    timeout_s: float = 0.0,
    on_wait: Callable[[], None] = lambda: None,
    take: Callable[[int, int], None] | None = None,
) -> bool | None:
    """Take a lock within a time; return whether it was taken, None on a file system without locks. Raises OSError.

    on_wait: called at most once a second. take: `lock_bytes`; flock(2) by default. Polls, because only a signal can
    interrupt a blocking flock(2).
    """
    take = take or fcntl.flock
    started, reported, pause = time.monotonic(), -_REPORT_EVERY_S, 0.001
    while True:
        try:
            take(descriptor, mode | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            pass
        except OSError as error:
            if error.errno in _UNSUPPORTED_ERRNOS:
                return None
            raise
        now = time.monotonic()
        if now - started >= timeout_s:
            return False
        if now - started > PROBE_S and now - reported >= _REPORT_EVERY_S:
            on_wait()
            reported = now
        time.sleep(pause)
        pause = min(0.05, 2 * pause)


def lock_within(descriptor: int, mode: int, *, timeout_s: float, on_wait: Callable[[], None] = lambda: None) -> bool:
    """Take a lock within a time; return whether it was taken. Raises ClusterError for a file system without locks."""
    try:
        is_locked = flock_within(descriptor, mode, timeout_s=timeout_s, on_wait=on_wait)
    except OSError as error:
        raise ClusterError(f"cannot be locked: {error.strerror}", hint="check the file system: dmesg") from error
    if is_locked is None:
        raise ClusterError("the file system has no locks", hint="stage to a node's own disk")
    return is_locked


def lock_bytes(descriptor: int, mode: int) -> None:
    """Take a lock as flock(2) does with LOCK_NB, as an OFD lock of all bytes: for files that several nodes share.

    NFS mounted with `local_lock=flock` asks its server for it, but keeps flock(2) within each node. Raises OSError.
    """
    kind = fcntl.F_RDLCK if mode & fcntl.LOCK_SH else fcntl.F_WRLCK
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _RANGE.pack(kind, os.SEEK_SET, 0, 0, 0))


def share_byte(descriptor: int, offset: int) -> None:
    """Hold a shared OFD lock of one byte, until the descriptor is closed. Raises OSError."""
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _RANGE.pack(fcntl.F_RDLCK, os.SEEK_SET, offset, 1, 0))


def has_byte_lock(descriptor: int, *, except_offset: int) -> bool:
    """Return whether another process holds a lock of any byte but `except_offset`, or of any if that is 0."""
    for start, length in ((0, except_offset), (except_offset + 1, 0)) if except_offset else ((0, 0),):
        query = _RANGE.pack(fcntl.F_WRLCK, os.SEEK_SET, start, length, 0)
        with contextlib.suppress(OSError):  # a file system without such locks
            if _RANGE.unpack(fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, query))[0] != fcntl.F_UNLCK:
                return True
    return False


@contextmanager
def lock_or_timeout(path: Path, timeout_s: float) -> Iterator[bool]:
    """Hold a lock file, created if missing; yield whether the lock was taken in time.

    Yields True on a file system without locks: for work that two processes may do at once. Raises ClusterError.
    """
    try:
        descriptor = open_readable_lock_file(path)
    except OSError as error:
        raise from_os_error(error, path) from error
    try:
        is_locked = True
        with contextlib.suppress(ClusterError):
            is_locked = lock_within(descriptor, fcntl.LOCK_EX, timeout_s=timeout_s)
        yield is_locked
    finally:
        os.close(descriptor)


@contextmanager
def publish_owner(descriptor: int) -> Iterator[ReportProgress]:
    """Write this process into a lock file, and release the lock at the end; yield `report(done, total)`, in bytes."""
    job = os.environ.get("SLURM_JOB_ID", "")
    owner_record = LockOwner(
        pid=os.getpid(), host=os.uname().nodename, job=job, user=_user(), started=timestamps.now_rfc3339()
    )
    written_at = -_REPORT_EVERY_S

    def write(data: bytes) -> None:
        with contextlib.suppress(OSError):  # on a full disk the lock is held without its owner's name
            os.pwrite(descriptor, data, 0)
            os.ftruncate(descriptor, len(data))

    def report(done_bytes: int, total: int) -> None:
        nonlocal written_at
        if time.monotonic() - written_at >= _REPORT_EVERY_S:
            written_at = time.monotonic()
            write(
                msgspec.json.encode(msgspec.structs.replace(owner_record, done_bytes=done_bytes, bytes=total)) + b"\n"
            )

    write(msgspec.json.encode(owner_record) + b"\n")
    try:
        yield report
    finally:
        if os.getpid() == owner_record.pid:
            write(b"")
            # Closing is not enough: a process forked meanwhile has this descriptor, too.
            fcntl.flock(descriptor, fcntl.LOCK_UN)


def read_lock_owner(descriptor: int) -> LockOwner:
    """Return the owner in a lock file; valid only while the lock is held."""
    try:
        return decode_json(os.pread(descriptor, 4096, 0).partition(b"\n")[0], LockOwner)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return LockOwner()  # just taken, or just released


def describe_owner(lock_owner: LockOwner) -> str:
    """Return an owner as text: `pid 71 of ada on n01, job 4711, 1.2 GiB of 10.0 GiB`."""
    if not lock_owner.pid:
        return "an unknown process"
    job = f", job {lock_owner.job}" if lock_owner.job else ""
    progress = f", {format_size(lock_owner.done_bytes)} of {format_size(lock_owner.bytes)}" if lock_owner.bytes else ""
    return f"pid {lock_owner.pid} of {lock_owner.user} on {lock_owner.host}{job}{progress}"


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may have no user names
        return str(os.getuid())


@contextmanager
def lock(
    path: Path, description: str, *, timeout_s: float = 0.0, is_own: bool = False, is_required: bool = False
) -> Iterator[None]:
    """Hold a lock file, waiting at most `timeout_s`. Raises TryLater if another process holds it, ClusterError.

    is_own: the file is this user's alone, in a folder in which others may create files; one of another user is refused.
    is_required: by `lock_bytes`, for processes of several nodes; a file system without locks is refused.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | _FLAGS, 0o600) if is_own else open_lock_file(path)
    except PermissionError as error:
        raise not_owner_error(path if is_own and path.exists() else path.parent, description) from error
    except OSError as error:
        raise from_os_error(error, path) from error
    try:
        if is_own and os.fstat(descriptor).st_uid != os.geteuid():
            raise not_owner_error(path, description)
        lock_file = _lock_or_refuse if is_required else lock_if_supported
        if not lock_file(descriptor, path, timeout_s=timeout_s):
            raise TryLater(f"{description} is locked by another process", where=str(path.parent))
        yield
    finally:
        os.close(descriptor)


def open_lock_file(path: Path, flags: int = 0) -> int:
    """Open a lock file, and create it if missing: writable by the group if its folder is. Raises OSError.

    Independent of the umask: otherwise the first user's lock file would exclude the others of a shared folder.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | _FLAGS | flags, 0o600)
    with contextlib.suppress(OSError):  # without permission it stays the user's own
        _share_with_group(descriptor, path.parent)
    return descriptor


def _share_with_group(descriptor: int, folder: Path) -> None:
    file_stat, folder_stat = os.fstat(descriptor), folder.stat()
    if (
        not folder_stat.st_mode & stat.S_IWGRP
        or file_stat.st_uid != os.geteuid()
        or not stat.S_ISREG(file_stat.st_mode)
    ):
        return
    if file_stat.st_gid != folder_stat.st_gid:
        os.fchown(descriptor, -1, folder_stat.st_gid)
    if file_stat.st_mode & 0o660 != 0o660:
        os.fchmod(descriptor, stat.S_IMODE(file_stat.st_mode) | 0o660)


def lock_if_supported(descriptor: int, path: Path, *, timeout_s: float = 0.0) -> bool:
    """Take an open file's lock within a time, and return whether it was taken; True on a file system without locks.

    Raises ClusterError.
    """
    try:
        return flock_within(descriptor, fcntl.LOCK_EX, timeout_s=timeout_s) is not False
    except OSError as error:
        raise from_os_error(error, path) from error


def _lock_or_refuse(descriptor: int, path: Path, *, timeout_s: float) -> bool:
    try:
        is_locked = flock_within(descriptor, fcntl.LOCK_EX, timeout_s=timeout_s, take=lock_bytes)
    except OSError as error:
        raise from_os_error(error, path) from error
    if is_locked is None:
        hint = "choose another file system, or mount this one with locks (Lustre: -o flock)"
        raise ClusterError("its file system has no locks (expected those of fcntl)", where=str(path), hint=hint)
    return is_locked


def is_owned_by_user(folder: Path) -> bool:
    """Return whether a folder belongs to this user: commands in its records run as this user. Raises OSError."""
    return folder.stat().st_uid == os.geteuid()


def not_owner_error(path: Path, description: str) -> ClusterError:
    """Return the error for a folder, or a lock file, of another user."""
    hint = "only that user can do this; with read permission use `pit launch show`, `why` or `logs`"
    if not path.is_dir():
        hint = "only that user or root can remove the file"
    return ClusterError(f"{description} is {owner_name(path)}'s", where=str(path), hint=hint)


def owner_name(path: Path) -> str:
    """Return the name of a path's user, or their uid."""
    try:
        return user_name(path.stat().st_uid)
    except OSError:
        return "another user"
