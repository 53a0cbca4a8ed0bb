"""Atomic files, walks of folders, and calls of the file system that Python lacks."""

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

from pitools.core.errors import ClusterError, NoSpace, PitError, Unreachable, UsageError

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+")

# Of a network file system.
TRANSIENT_ERRNOS = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EREMOTEIO}
# Of <fcntl.h> and <linux/fs.h>.
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
# Characters of a path below a folder, hence at most half as many levels.
_FLATTEN_DEPTH = 400


def open_0644(path: str, flags: int) -> int:
    """Open a file, as `opener` of `open`; a new file is writable by its owner only, under any umask."""
    return os.open(path, flags, 0o644)


def write_atomic(path: Path, data: bytes | str, *, mode: int = 0o644, durable: bool = True) -> None:
    """Write a file atomically: a reader gets the old content or the new, never a part.

    durable: sync the file and its folder. Raises NoSpace, or ClusterError if the folder is not writable.
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
        with contextlib.suppress(OSError):  # cannot be removed on a file system that became read-only
            temporary.unlink(missing_ok=True)
        raise from_os_error(error, path) from error


def make_parents(path: Path, mode: int) -> None:
    """Create the missing parents of a path, each with this mode less the umask. Raises OSError."""
    for above in reversed(path.parents):
        if not above.exists():
            above.mkdir(mode, exist_ok=True)


def require_local_path(path: Path | str, where: str) -> None:
    """Refuse a URL where a local path is needed. Raises UsageError. A Path keeps one slash of a URL's two."""
    if match := _URL.match(str(path)):
        hint = "name a folder; to and from a bucket: `pit-stage run URL --to ROOT`, `rclone copy ROOT URL`"
        raise UsageError(f"a {match[1]}:// URL (expected a path of this machine)", where=where, hint=hint)


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading. Raises OSError for a link, a FIFO or a device too."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def iter_tree(top: Path, *, ignored_errnos: Collection[int] = ()) -> Iterator[os.DirEntry[str]]:
    """Yield all entries below a folder, of any depth, without following links.

    ignored_errnos: errors for which a folder is skipped. Raises OSError for any other.
    """
    todo = [str(top)]
    while todo:
        try:
            with os.scandir(todo.pop()) as entries:
                children = list(entries)
        except OSError as error:
            if error.errno not in ignored_errnos:
                raise
            continue
        todo += [entry.path for entry in children if entry.is_dir(follow_symlinks=False)]
        yield from children


def iter_files(top: Path) -> Iterator[str]:
    """Yield the relative paths of files, and of links to files, below a folder.

    Raises OSError, also for a FIFO, socket or device.
    """
    for entry in iter_tree(top):
        if entry.is_file() or not os.path.exists(entry.path):  # noqa: PTH110 (a link that leads nowhere)
            yield os.path.relpath(entry.path, top)
        elif not entry.is_dir():
            raise OSError(errno.EINVAL, "not a regular file", entry.path)


def remove_tree(folder: Path) -> None:
    """Remove a folder and its content, of any depth; entries that cannot be removed stay.

    shutil.rmtree holds a descriptor, and up to Python 3.12 a call, for each level.
    """
    with contextlib.suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)
    if folder.is_dir() and not folder.is_symlink():
        with contextlib.suppress(OSError):
            _flatten(folder)
        shutil.rmtree(folder, ignore_errors=True)


def _flatten(top: Path) -> None:
    """Move the folders whose path is long up to `top`. Raises OSError."""
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
    """Sync a folder, so that its entries survive power loss. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_fs(path: Path, descriptor: int | None = None) -> None:
    """Sync the file system of a path (syncfs(2)). Raises OSError.

    descriptor: of the path, opened before the writes. A newer one is not told of an error that another process was.
    """
    opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC) if descriptor is None else descriptor
    try:
        if _libc().syncfs(opened):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(path))
    finally:
        if descriptor is None:
            os.close(opened)


def allocate(descriptor: int, offset: int, length: int) -> None:
    """Allocate a file's blocks, and set its size, before it is written. Raises OSError if there is no room.

    Calls fallocate(2): where it is not supported it does nothing, while posix_fallocate(3) would write zeros.
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
    """Exchange two paths of one file system atomically; return False where that is not supported.

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
    """Return the type of a path's file system, such as `ext4` or `tmpfs`; "" if unknown."""
    place, kind, longest = f"{path.resolve()}/", "", 0
    for line in os.fsdecode(Path("/proc/self/mountinfo").read_bytes()).splitlines():
        mount, _, description = line.partition(" - ")
        # By mount point, not by device number: for Btrfs stat(2) returns another number.
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), mount.split(" ")[4]).rstrip("/") + "/"
        if place.startswith(point) and len(point) >= longest:  # a later mount hides an earlier one at the same place
            kind, longest = description.split(" ")[0], len(point)
    return kind


def access_error(error: OSError, path: Path) -> PitError | None:
    """Return the error of a failed read that tells nothing of the data: this user may not read them, or their file
    system fails. None for another failure, such as a missing file."""
    if error.errno in (errno.EACCES, errno.EPERM):
        problem, hint = f"cannot be read: {os.strerror(error.errno)}", "ask its owner for permission: chmod a+r"
        return ClusterError(problem, where=str(path), hint=hint)
    if error.errno in TRANSIENT_ERRNOS:
        return Unreachable(f"cannot be read: {os.strerror(error.errno)}", where=str(path))
    return None


def from_os_error(error: OSError, path: Path) -> PitError:
    """Translate a failed write: a full disk to NoSpace, any other failure to ClusterError."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NoSpace(
            f"no space left: {reason}", where=str(path), hint="free space there, or choose another destination"
        )
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return ClusterError(f"cannot write: {reason}", where=str(path), hint="choose a destination you can write to")
    return ClusterError(reason, where=str(path))
