"""Lock files: flock(2), which the kernel frees on any death; a line in some names the holder and its progress.

`lock_within` refuses a file system without locks: staging is for a node's own disk. `lock` and `try_lock` go on without
one: what they guard is safe without it, for only one process can make a given file, and a submission has a unique name.
Lock files are never deleted: deleting one while another process waits on it would let two hold "the" lock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import getpass
import os
import stat
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

# Others hold a lock for so long when they only look whether it is held; that is not worth a word.
PROBE_S = 0.02
_REPORT_EVERY_S = 1.0
_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
# A file system without locks: verdicts are safe without one, for only one can make the file; so are submissions, for
# two of one number have one name, and of such jobs one has leave to run.
UNSUPPORTED_ERRNOS = {errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK}

ReportProgress = Callable[[int, int], None]


class LockOwner(Record, frozen=True, kw_only=True, tag="pit.stage-lock/1"):
    """Who holds a version's lock, and how far it is. job: Slurm's number, or "". All empty where it is not known."""

    pid: int = 0
    host: str = ""
    job: str = ""
    user: str = ""
    started: str = ""
    done_bytes: int = 0
    bytes: int = 0


def is_shared(folder: Path) -> bool:
    """Whether all users may read a folder, and hence the small files that are kept in it."""
    try:
        return bool(folder.stat().st_mode & stat.S_IROTH)
    except FileNotFoundError:
        return False


def open_readable_lock_file(path: Path) -> int:
    """A descriptor of a lock or lease file, made where it is missing; all may read it where all may read its folder.

    Raises OSError.
    """
    try:
        return os.open(path, os.O_RDWR | _FLAGS)
    except FileNotFoundError:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | _FLAGS, 0o600)
        if is_shared(path.parent):
            os.fchmod(descriptor, 0o644)
        return descriptor


def lock_within(descriptor: int, mode: int, *, timeout_s: float, on_wait: Callable[[], None] = lambda: None) -> bool:
    """Take a lock within a time, calling `on_wait` at most once a second; whether it was had. Raises ClusterError.

    Polls: a blocking flock(2) can only be ended by a signal, and a library may not claim one.
    """
    started, told, pause = time.monotonic(), -_REPORT_EVERY_S, 0.001
    while True:
        try:
            fcntl.flock(descriptor, mode | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            pass
        except OSError as error:
            what = f"this file system has no locks: {error.strerror}"
            raise ClusterError(what, hint="stage to a node's own disk") from error
        now = time.monotonic()
        if now - started >= timeout_s:
            return False
        if now - started > PROBE_S and now - told >= _REPORT_EVERY_S:
            on_wait()
            told = now
        time.sleep(pause)
        pause = min(0.05, 2 * pause)


@contextmanager
def taken(path: Path, timeout_s: float) -> Iterator[bool]:
    """Hold a lock file's lock, the file made where it is missing; yields whether it was had in time.

    Where the file system has no locks it counts as had: for what two may do at once without harm. Raises ClusterError.
    """
    try:
        descriptor = open_readable_lock_file(path)
    except OSError as error:
        raise from_os_error(error, path) from error
    try:
        had = True
        with contextlib.suppress(ClusterError):
            had = lock_within(descriptor, fcntl.LOCK_EX, timeout_s=timeout_s)
        yield had
    finally:
        os.close(descriptor)


@contextmanager
def publish_owner(descriptor: int) -> Iterator[ReportProgress]:
    """Say in a lock file that this process holds it, and free the lock at the end; yields `tell(done, total)` bytes."""
    job = os.environ.get("SLURM_JOB_ID", "")
    me = LockOwner(pid=os.getpid(), host=os.uname().nodename, job=job, user=_user(), started=timestamps.now_rfc3339())
    told = -_REPORT_EVERY_S

    def write(data: bytes) -> None:
        with contextlib.suppress(OSError):  # a full disk: the lock is held all the same, only nobody learns by whom
            os.pwrite(descriptor, data, 0)
            os.ftruncate(descriptor, len(data))

    def tell(done_bytes: int, total: int) -> None:
        nonlocal told
        if time.monotonic() - told >= _REPORT_EVERY_S:
            told = time.monotonic()
            write(msgspec.json.encode(msgspec.structs.replace(me, done_bytes=done_bytes, bytes=total)) + b"\n")

    write(msgspec.json.encode(me) + b"\n")
    try:
        yield tell
    finally:
        if os.getpid() == me.pid:
            write(b"")
            # Not by closing alone: a process that was forked meanwhile has this descriptor too.
            fcntl.flock(descriptor, fcntl.LOCK_UN)


def read_lock_owner(descriptor: int) -> LockOwner:
    """Who a lock file says has it; true only while the lock is held."""
    try:
        return decode_json(os.pread(descriptor, 4096, 0).partition(b"\n")[0], LockOwner)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return LockOwner()  # it has only just begun, or has just ended


def describe_owner(holder: LockOwner) -> str:
    """A holder as text: `pid 71 of ada on n01, job 4711, 1.2 GiB of 10.0 GiB`."""
    if not holder.pid:
        return "not known who"
    job = f", job {holder.job}" if holder.job else ""
    far = f", {format_size(holder.done_bytes)} of {format_size(holder.bytes)}" if holder.bytes else ""
    return f"pid {holder.pid} of {holder.user} on {holder.host}{job}{far}"


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may know no names
        return str(os.getuid())


@contextmanager
def lock(path: Path, description: str, *, wait_s: float = 0.0) -> Iterator[None]:
    """Hold a lock file, waiting for it so long at most. Raises TryLater where another process has it, ClusterError."""
    try:
        descriptor = open_lock_file(path)
    except PermissionError as error:
        raise not_owner_error(path.parent, description) from error
    except OSError as error:
        raise from_os_error(error, path) from error
    try:
        if not try_lock(descriptor, path, wait_s=wait_s):
            raise TryLater(f"{description} is being looked after by another process", where=str(path.parent))
        yield
    finally:
        os.close(descriptor)


def open_lock_file(path: Path, flags: int = 0) -> int:
    """A descriptor of a file that all who may write in its folder write to, made where it is missing. Raises OSError.

    Whatever the umask of whoever comes first: else nobody of a group's shared folder could take their locks after them.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | _FLAGS | flags, 0o600)
    with contextlib.suppress(OSError):  # who may not give it away has it for themselves
        _share_with_group(descriptor, path.parent)
    return descriptor


def _share_with_group(descriptor: int, folder: Path) -> None:
    own, above = os.fstat(descriptor), folder.stat()
    if not above.st_mode & stat.S_IWGRP or own.st_uid != os.geteuid() or not stat.S_ISREG(own.st_mode):
        return
    if own.st_gid != above.st_gid:
        os.fchown(descriptor, -1, above.st_gid)
    if own.st_mode & 0o660 != 0o660:
        os.fchmod(descriptor, stat.S_IMODE(own.st_mode) | 0o660)


def try_lock(descriptor: int, path: Path, *, wait_s: float = 0.0) -> bool:
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
            if error.errno in UNSUPPORTED_ERRNOS:
                return True
            raise from_os_error(error, path) from error


def is_owned_by_user(folder: Path) -> bool:
    """Whether a folder is this user's: what it says to start would be started as this user. Raises OSError."""
    return folder.stat().st_uid == os.geteuid()


def not_owner_error(folder: Path, description: str) -> ClusterError:
    """The error that something is another user's."""
    hint = "only they can do this; anybody who may read it can use `pit launch show`, `why` and `logs`"
    return ClusterError(f"{description} is {owner(folder)}'s", where=str(folder), hint=hint)


def owner(path: Path) -> str:
    """The name of a folder's user, or their number."""
    try:
        return user_name(path.stat().st_uid)
    except OSError:
        return "somebody else"
