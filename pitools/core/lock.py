"""A lock file: flock(2) that the kernel frees on any death, and one line in it that says who has it and how far.

Lock files are never deleted: deleting one while another process waits on it would let two hold "the" lock.
"""

from __future__ import annotations

import contextlib
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
from pitools.core.errors import ClusterError
from pitools.core.fs import os_error
from pitools.core.record import Record, decode_json
from pitools.core.units import size_text

# Others hold a lock for so long when they only look whether it is held; that is not worth a word.
GLANCE_S = 0.02
_TOLD_EVERY_S = 1.0
_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

Tell = Callable[[int, int], None]


class Holder(Record, frozen=True, kw_only=True, tag="pit.stage-lock/1"):
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


def open_kept(path: Path) -> int:
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


def flock(descriptor: int, how: int, *, timeout_s: float, meanwhile: Callable[[], None] = lambda: None) -> bool:
    """Take a lock within a time, calling `meanwhile` at most once a second; whether it was had. Raises ClusterError.

    Polls: a blocking flock(2) can only be ended by a signal, and a library may not claim one.
    """
    started, told, pause = time.monotonic(), -_TOLD_EVERY_S, 0.001
    while True:
        try:
            fcntl.flock(descriptor, how | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            pass
        except OSError as error:
            what = f"this file system has no locks: {error.strerror}"
            raise ClusterError(what, hint="stage to a node's own disk") from error
        now = time.monotonic()
        if now - started >= timeout_s:
            return False
        if now - started > GLANCE_S and now - told >= _TOLD_EVERY_S:
            meanwhile()
            told = now
        time.sleep(pause)
        pause = min(0.05, 2 * pause)


@contextmanager
def taken(path: Path, timeout_s: float) -> Iterator[bool]:
    """Hold a lock file's lock, the file made where it is missing; yields whether it was had in time.

    Where the file system has no locks it counts as had: for what two may do at once without harm. Raises ClusterError.
    """
    try:
        descriptor = open_kept(path)
    except OSError as error:
        raise os_error(error, path) from error
    try:
        had = True
        with contextlib.suppress(ClusterError):
            had = flock(descriptor, fcntl.LOCK_EX, timeout_s=timeout_s)
        yield had
    finally:
        os.close(descriptor)


@contextmanager
def announced(descriptor: int) -> Iterator[Tell]:
    """Say in a lock file that this process holds it, and free the lock at the end; yields `tell(done, total)` bytes."""
    job = os.environ.get("SLURM_JOB_ID", "")
    me = Holder(pid=os.getpid(), host=os.uname().nodename, job=job, user=_user(), started=timestamps.now())
    told = -_TOLD_EVERY_S

    def write(data: bytes) -> None:
        with contextlib.suppress(OSError):  # a full disk: the lock is held all the same, only nobody learns by whom
            os.pwrite(descriptor, data, 0)
            os.ftruncate(descriptor, len(data))

    def tell(done_bytes: int, total: int) -> None:
        nonlocal told
        if time.monotonic() - told >= _TOLD_EVERY_S:
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


def read_holder(descriptor: int) -> Holder:
    """Who a lock file says has it; true only while the lock is held."""
    try:
        return decode_json(os.pread(descriptor, 4096, 0).partition(b"\n")[0], Holder)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return Holder()  # it has only just begun, or has just ended


def who(holder: Holder) -> str:
    """A holder as text: `pid 71 of ada on n01, job 4711, 1.2 GiB of 10.0 GiB`."""
    if not holder.pid:
        return "not known who"
    job = f", job {holder.job}" if holder.job else ""
    far = f", {size_text(holder.done_bytes)} of {size_text(holder.bytes)}" if holder.bytes else ""
    return f"pid {holder.pid} of {holder.user} on {holder.host}{job}{far}"


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may know no names
        return str(os.getuid())
