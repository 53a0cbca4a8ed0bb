"""A version on a file system that this machine mounts: its files, opened without following a link out of it."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from pitools.core.errors import ClusterError, DataError, PitError, Unreachable

# Of a staging root: the folder whose folders are whole sets, each named by its version.
OBJECTS = "objects"
# O_NONBLOCK: a FIFO put where a file should be would otherwise hold the open for ever.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_FOLDER = os.O_PATH | os.O_NOFOLLOW | os.O_DIRECTORY | os.O_CLOEXEC
# Levels of folders that are kept open: with 64 readers fewer descriptors than a process may have.
_MAX_OPEN_DIRS = 6
# A block is read, hashed and written before the next: small enough to stay in the core's own cache meanwhile.
READ_BYTES = 128 << 10


class LocalSource(msgspec.Struct, frozen=True, kw_only=True):
    """The files below a folder. read_once: they are read this one time, and leave the page cache to others."""

    folder: Path
    read_once: bool = False

    @property
    def label(self) -> str:
        """The folder."""
        return str(self.folder)

    @property
    def block(self) -> int:
        """Bytes to ask for in one read."""
        return READ_BYTES

    def connect(self) -> LocalReader:
        """Open a reader, for one thread. Raises as `read_error`."""
        return LocalReader(self.folder, read_once=self.read_once)


class DirDescriptors:
    """Descriptors of the folders beneath one, each opened without following a link. Those of the last path stay open,
    since the next file is often in the same folder or in its neighbour.
    """

    def __init__(self, top: Path, *, create: bool = False) -> None:
        """create: folders that are missing are made, of mode 0755 less the umask. Raises OSError."""
        self._make = create
        self._chain = [os.open(top, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)]
        self._parts: list[str] = []
        self._within = ""

    def open_dir(self, within: str) -> int:
        """The folder of this path beneath the top, "" for the top itself; good until the next call. Raises OSError."""
        if within == self._within:
            return self._chain[-1]
        parts, same = within.split("/") if within else [], 0
        while same < min(len(parts), len(self._parts)) and parts[same] == self._parts[same]:
            same += 1
        self._leave(same)
        for part in parts[same:]:
            if self._make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, 0o755, dir_fd=self._chain[-1])
            # O_NOFOLLOW speaks of the last part only, so each part is opened as a last part.
            below = os.open(part, _FOLDER, dir_fd=self._chain[-1])
            if len(self._parts) < _MAX_OPEN_DIRS:
                self._parts.append(part)
            else:  # deeper than this only the last one is kept, and it is nobody's neighbour
                os.close(self._chain.pop())
                self._parts[-1] = ""
            self._chain.append(below)
        self._within = within
        return self._chain[-1]

    def close(self) -> None:
        """Close them all."""
        self._leave(0)
        os.close(self._chain.pop())

    def _leave(self, depth: int) -> None:
        self._within = "\0"  # no path, until the next one is entered
        while len(self._parts) > depth:
            os.close(self._chain.pop())
            self._parts.pop()


class LocalReader:
    """Opens files beneath a folder."""

    def __init__(self, folder: Path, *, read_once: bool = False) -> None:
        self.folder, self._read_once = folder, read_once
        with translate_errors(folder):
            self._folders = DirDescriptors(folder)

    def open(self, path: str) -> LocalFile:
        """A regular file; no part of `path` may be a link. Raises DataError for what is none, else as `read_error`."""
        within, _, name = path.rpartition("/")
        where = f"{self.folder}/{path}"
        try:
            descriptor = os.open(name, _FILE, dir_fd=self._folders.open_dir(within))
        except OSError as error:
            raise read_error(error, Path(where)) from error
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            os.close(descriptor)
            raise DataError("not a regular file", where=where, hint="a dataset holds plain files only")
        return LocalFile(descriptor, status.st_size, where, read_once=self._read_once)

    def close(self) -> None:
        """Close the folders."""
        self._folders.close()


class LocalFile:
    """One open file. size: bytes, when it was opened."""

    def __init__(self, descriptor: int, size: int, where: str, *, read_once: bool) -> None:
        self.size, self._descriptor, self._where, self._once = size, descriptor, where, read_once

    def read_into(self, view: memoryview, offset: int) -> int:
        """Read at `offset` into `view`; the count, 0 at the end. Raises as `read_error`."""
        try:
            return os.preadv(self._descriptor, [view], offset)
        except OSError as error:
            raise read_error(error, Path(self._where)) from error

    def fileno(self) -> int:
        """Its descriptor, for system calls that read by themselves."""
        return self._descriptor

    def close(self) -> None:
        """Close it."""
        if self._once:
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(self._descriptor)


@contextmanager
def open_folder(folder: Path) -> Iterator[int]:
    """Yield a descriptor of a folder, to open files beneath. Raises as `read_error`."""
    with translate_errors(folder):
        descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def translate_errors(path: Path) -> Iterator[None]:
    """Turn OSErrors of reading `path` into DataError (gone, or a link), Unreachable (no answer) or ClusterError."""
    try:
        yield
    except OSError as error:
        raise read_error(error, path) from error


def read_error(error: OSError, path: Path) -> PitError:
    """Return the error of a failed open or read: DataError (gone, or a link), Unreachable (no answer), ClusterError."""
    if error.errno in (errno.ENOENT, errno.ENXIO):
        return DataError("missing", where=str(path), hint="the manifest names it: ingest or stage again")
    if error.errno in (errno.ELOOP, errno.ENOTDIR):
        message = "a symbolic link, or not a folder where one should be"
        return DataError(message, where=str(path), hint="a dataset holds plain files and folders only")
    reason = os.strerror(error.errno) if error.errno else str(error)
    if error.errno in (errno.ESTALE, errno.ETIMEDOUT):
        return Unreachable(f"cannot read: {reason}", where=str(path))
    return ClusterError(f"cannot read: {reason}", where=str(path))
