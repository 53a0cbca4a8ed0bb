"""A version on a file system that this machine mounts: its files, opened without following a link out of it."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from pitools.core.errors import ClusterError, DataError, PitError, Unreachable

# O_NONBLOCK: a FIFO put where a file should be would otherwise hold the open for ever.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_FOLDER = os.O_PATH | os.O_NOFOLLOW | os.O_DIRECTORY | os.O_CLOEXEC
# A block is read, hashed and written before the next: small enough to stay in the core's own cache meanwhile.
BLOCK = 128 << 10


class LocalSource(msgspec.Struct, frozen=True, kw_only=True):
    """The files below a folder. once: they are read this one time, and leave the page cache to others."""

    folder: Path
    once: bool = False

    @property
    def label(self) -> str:
        """The folder."""
        return str(self.folder)

    @property
    def block(self) -> int:
        """Bytes to ask for in one read."""
        return BLOCK

    def connect(self) -> LocalReader:
        """A reader, for one thread. Raises as `reading`."""
        return LocalReader(self.folder, once=self.once)


class LocalReader:
    """Opens files beneath a folder; keeps the folder of the last one open, since the next is often its neighbour."""

    def __init__(self, folder: Path, *, once: bool = False) -> None:
        self.folder, self._once = folder, once
        with reading(folder):
            self._root = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._at, self._within = self._root, ""

    def open(self, path: str) -> LocalFile:
        """A regular file; no part of `path` may be a link. Raises DataError for what is none, else as `reading`."""
        within, _, name = path.rpartition("/")
        where = f"{self.folder}/{path}"
        try:
            if within != self._within:
                self._enter(within)
            descriptor = os.open(name, _FILE, dir_fd=self._at)
        except OSError as error:
            raise read_error(error, Path(where)) from error
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            os.close(descriptor)
            raise DataError("not a regular file", where=where, hint="a dataset holds plain files only")
        return LocalFile(descriptor, found.st_size, where, once=self._once)

    def close(self) -> None:
        """Close the folders."""
        self._leave()
        os.close(self._root)

    def _enter(self, within: str) -> None:
        self._leave()
        at = self._root
        for part in within.split("/") if within else ():
            try:
                # O_NOFOLLOW speaks of the last part only, so each part is opened as a last part.
                below = os.open(part, _FOLDER, dir_fd=at)
            finally:
                if at != self._root:
                    os.close(at)
            at = below
        self._at, self._within = at, within

    def _leave(self) -> None:
        if self._at != self._root:
            os.close(self._at)
        self._at, self._within = self._root, ""


class LocalFile:
    """One open file. size: bytes, when it was opened."""

    def __init__(self, descriptor: int, size: int, where: str, *, once: bool) -> None:
        self.size, self._descriptor, self._where, self._once = size, descriptor, where, once

    def read_into(self, view: memoryview, offset: int) -> int:
        """Read at `offset` into `view`; the count, 0 at the end. Raises as `reading`."""
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
def opened(folder: Path) -> Iterator[int]:
    """A descriptor of a folder, to open files beneath. Raises as `reading`."""
    with reading(folder):
        descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """OSErrors of reading `path` become DataError (gone, or a link), Unreachable (no answer) or ClusterError."""
    try:
        yield
    except OSError as error:
        raise read_error(error, path) from error


def read_error(error: OSError, path: Path) -> PitError:
    """What a failed open or read means: gone or a link → data is wrong, no answer → later, else refused."""
    if error.errno in (errno.ENOENT, errno.ENXIO):
        return DataError("missing", where=str(path), hint="the manifest names it: ingest or stage again")
    if error.errno in (errno.ELOOP, errno.ENOTDIR):
        what = "a symbolic link, or not a folder where one should be"
        return DataError(what, where=str(path), hint="a dataset holds plain files and folders only")
    reason = os.strerror(error.errno) if error.errno else str(error)
    if error.errno in (errno.ESTALE, errno.ETIMEDOUT):
        return Unreachable(f"cannot read: {reason}", where=str(path))
    return ClusterError(f"cannot read: {reason}", where=str(path))
