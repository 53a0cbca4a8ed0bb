"""Files that are whole or absent: written beside their place, synced, renamed."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import shutil
import stat
from collections.abc import Collection, Iterator
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

from pitools.core.errors import ClusterError, NoSpace, PitError, UsageError

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+")

# Of <fcntl.h> and <linux/fs.h>.
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
# Characters of a path below a folder, hence at most half as many levels.
_FLATTEN_DEPTH = 400


def own(path: str, flags: int) -> int:
    """Open a file, as `opener` of `open`: one that is made now is its owner's alone to change, under any umask."""
    return os.open(path, flags, 0o644)


def write_atomic(path: Path, data: bytes | str, *, mode: int = 0o644, durable: bool = True) -> None:
    """Write a file so that a reader, at any moment, sees the old content or the new, never a part.

    Raises NoSpace or ClusterError when the folder cannot take it.
    """
    payload = data.encode() if isinstance(data, str) else data
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(payload)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, path)
        if durable:
            fsync_dir(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):  # read-only by now, it cannot be removed either
            temporary.unlink(missing_ok=True)
        raise from_os_error(error, path) from error


def make_parents(path: Path, mode: int) -> None:
    """Make the folders above a path that are missing, each of at most this mode. Raises OSError."""
    for above in reversed(path.parents):
        if not above.exists():
            above.mkdir(mode, exist_ok=True)


def require_local_path(path: Path | str, where: str) -> None:
    """Raises UsageError for a URL in place of a path of this machine. A Path keeps one slash of a URL's two."""
    if match := _URL.match(str(path)):
        hint = "name a folder; to and from a bucket: `pit-stage run URL --to ROOT`, `rclone copy ROOT URL`"
        raise UsageError(f"a path of this machine is wanted, not {match[1]}://", where=where, hint=hint)


def open_regular(path: Path) -> BinaryIO:
    """A regular file opened to be read; a link, or what would keep its reader waiting, raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def below(top: Path, *, passed: Collection[int] = ()) -> Iterator[os.DirEntry[str]]:
    """Yield all that is below a folder, however deep; links to folders are not entered.

    passed: errors (numbers of errno) for which a folder is passed over. Raises OSError for any other.
    """
    todo = [str(top)]
    while todo:
        try:
            with os.scandir(todo.pop()) as entries:
                found = list(entries)
        except OSError as error:
            if error.errno not in passed:
                raise
            continue
        todo += [entry.path for entry in found if entry.is_dir(follow_symlinks=False)]
        yield from found


def plain_files(top: Path) -> Iterator[str]:
    """Yield the paths below a folder, from there, of its files and of links to files.

    Raises OSError, also for what would keep its reader waiting.
    """
    for entry in below(top):
        if entry.is_file() or not os.path.exists(entry.path):  # noqa: PTH110 (a link that leads nowhere)
            yield os.path.relpath(entry.path, top)
        elif not entry.is_dir():
            raise OSError(errno.EINVAL, "not a regular file", entry.path)


def remove_tree(folder: Path) -> None:
    """Remove a folder with all that is in it, however deep it is; what cannot be removed stays.

    shutil.rmtree holds a descriptor, and up to Python 3.12 a call, for each level.
    """
    with contextlib.suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)
    if folder.is_dir() and not folder.is_symlink():
        with contextlib.suppress(OSError):
            _flatten(folder)
        shutil.rmtree(folder, ignore_errors=True)


def _flatten(top: Path) -> None:
    """Move folders that lie deep below `top` up into it. Raises OSError."""
    todo, longest = [str(top)], len(str(top)) + _FLATTEN_DEPTH
    while todo:
        with os.scandir(todo.pop()) as entries:
            folders = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
        for path in folders:
            if len(path) > longest:
                raised = f"{top}/{os.urandom(8).hex()}"
                os.rename(path, raised)
                todo.append(raised)
            else:
                todo.append(path)


def fsync_dir(folder: Path) -> None:
    """Make the names in a folder survive power loss."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_fs(path: Path) -> None:
    """Make all that was written to the file system of `path` survive power loss. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _libc().syncfs(descriptor):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(path))
    finally:
        os.close(descriptor)


def allocate(descriptor: int, offset: int, length: int) -> None:
    """Give a file its blocks, and its size, before it is written. Raises OSError when there is no room.

    fallocate(2) itself: where it is not supported nothing happens, while C's posix_fallocate would write zeros.
    """
    while length and _libc().fallocate(descriptor, 0, ctypes.c_int64(offset), ctypes.c_int64(length)):
        number = ctypes.get_errno()
        if number == errno.EOPNOTSUPP:
            return
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))


@lru_cache(maxsize=1)
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def exchange_names(first: Path, second: Path) -> bool:
    """Swap what two names on one file system stand for, in one step; False where that is not supported.

    Raises OSError.
    """
    call = getattr(_libc(), "renameat2", None)  # not in C libraries older than glibc 2.28
    if call is None:
        return False
    if not call(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE):
        return True
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):  # NFS, Lustre and old kernels
        return False
    raise OSError(number, os.strerror(number), str(first), None, str(second))


def fs_type(path: Path) -> str:
    """The type of the file system that `path` is on, such as `ext4` or `tmpfs`; "" where that is not to be known."""
    place, found, longest = f"{path.resolve()}/", "", 0
    for line in os.fsdecode(Path("/proc/self/mountinfo").read_bytes()).splitlines():
        mount, _, described = line.partition(" - ")
        # By place and not by device number: those of Btrfs are not the ones that stat(2) tells.
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), mount.split(" ")[4]).rstrip("/") + "/"
        if place.startswith(point) and len(point) >= longest:  # of two on one place the later hides the earlier
            found, longest = described.split(" ")[0], len(point)
    return found


def from_os_error(error: OSError, path: Path) -> PitError:
    """What a failed write means to the user: full → try later, refused → choose another place."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NoSpace(
            f"no space left: {reason}", where=str(path), hint="free space there, or choose another destination"
        )
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return ClusterError(f"cannot write: {reason}", where=str(path), hint="choose a destination you can write to")
    return ClusterError(reason, where=str(path))
