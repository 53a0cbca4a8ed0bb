"""A version on a mounted file system: its files, opened without following links out of the folder."""

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

# The folder of a staging root that holds complete sets, each named by its version.
OBJECTS = "objects"
# O_NONBLOCK: otherwise opening a FIFO in place of a file would block for ever.
_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_FOLDER_FLAGS = os.O_PATH | os.O_NOFOLLOW | os.O_DIRECTORY | os.O_CLOEXEC
# Levels of folders kept open: with 64 readers still within a process's limit of descriptors.
_MAX_OPEN_DIRS = 6
# A block is read, hashed and written before the next, and small enough for the core's cache.
READ_BYTES = 128 << 10


class LocalSource(msgspec.Struct, frozen=True, kw_only=True):
    """The files below a folder. drop_cache: drop them from the page cache after reading."""

    folder: Path
    drop_cache: bool = False

    @property
    def label(self) -> str:
        """Return the folder."""
        return str(self.folder)

    @property
    def block(self) -> int:
        """Return the bytes of one read."""
        return READ_BYTES

    def connect(self) -> LocalReader:
        """Open a reader, for one thread. Raises as `read_error`."""
        return LocalReader(self.folder, drop_cache=self.drop_cache)


class DirDescriptors:
    """Descriptors of the folders below one, each opened without following a link. Those of the last path stay open, as
    the next file is often in the same or a neighbouring folder.
    """

    def __init__(self, top: Path, *, create: bool = False) -> None:
        """Open the top folder. create: create missing folders, of mode 0755. Raises OSError."""
        self._create = create
        self._descriptors = [os.open(top, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)]
        self._parts: list[str] = []
        self._current_path = ""

    def open_dir(self, path: str) -> int:
        """Return the descriptor of a folder below the top, "" for the top; valid until the next call. Raises
        OSError.
        """
        if path == self._current_path:
            return self._descriptors[-1]
        parts, n_common = path.split("/") if path else [], 0
        while n_common < min(len(parts), len(self._parts)) and parts[n_common] == self._parts[n_common]:
            n_common += 1
        self._close_below(n_common)
        for part in parts[n_common:]:
            if self._create:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, 0o755, dir_fd=self._descriptors[-1])
                    os.chmod(part, 0o755, dir_fd=self._descriptors[-1])  # noqa: S103 - under any umask
            # O_NOFOLLOW applies to the last component only, so each component is opened separately.
            descriptor = os.open(part, _FOLDER_FLAGS, dir_fd=self._descriptors[-1])
            if len(self._parts) < _MAX_OPEN_DIRS:
                self._parts.append(part)
            else:  # of deeper folders only the last stays open, and is not reused
                os.close(self._descriptors.pop())
                self._parts[-1] = ""
            self._descriptors.append(descriptor)
        self._current_path = path
        return self._descriptors[-1]

    def close(self) -> None:
        """Close all descriptors."""
        self._close_below(0)
        os.close(self._descriptors.pop())

    def _close_below(self, depth: int) -> None:
        self._current_path = "\0"  # no valid path
        while len(self._parts) > depth:
            os.close(self._descriptors.pop())
            self._parts.pop()


class LocalReader:
    """Opens files below a folder."""

    def __init__(self, folder: Path, *, drop_cache: bool = False) -> None:
        self.folder, self._drop_cache = folder, drop_cache
        with translate_errors(folder):
            self._dir_descriptors = DirDescriptors(folder)

    def open(self, path: str) -> LocalFile:
        """Open a regular file; no component of `path` may be a link. Raises DataError for any other file, else as
        `read_error`.
        """
        parent_path, _, name = path.rpartition("/")
        where = f"{self.folder}/{path}"
        try:
            descriptor = os.open(name, _FILE_FLAGS, dir_fd=self._dir_descriptors.open_dir(parent_path))
        except OSError as error:
            raise read_error(error, Path(where)) from error
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            os.close(descriptor)
            raise DataError("not a regular file", where=where, hint="a dataset holds plain files only")
        return LocalFile(descriptor, status.st_size, where, drop_cache=self._drop_cache)

    def close(self) -> None:
        """Close the folders."""
        self._dir_descriptors.close()


class LocalFile:
    """One open file. size: bytes when it was opened."""

    def __init__(self, descriptor: int, size: int, where: str, *, drop_cache: bool) -> None:
        self.size, self._descriptor, self._where, self._drop_cache = size, descriptor, where, drop_cache
        self._start, self._end = size, 0  # of the bytes read

    def read_into(self, view: memoryview, offset: int) -> int:
        """Read at `offset` into `view`; return the count, 0 at the end. Raises as `read_error`."""
        try:
            count = os.preadv(self._descriptor, [view], offset)
        except OSError as error:
            raise read_error(error, Path(self._where)) from error
        self._start, self._end = min(self._start, offset), max(self._end, offset + count)
        return count

    def fileno(self) -> int:
        """Return the descriptor, for system calls."""
        return self._descriptor

    def close(self) -> None:
        """Close the file."""
        if self._drop_cache and self._end > self._start:
            # No more than was read here: another worker may be reading ahead in the next range.
            os.posix_fadvise(self._descriptor, self._start, self._end - self._start, os.POSIX_FADV_DONTNEED)
        os.close(self._descriptor)


@contextmanager
def open_folder(folder: Path) -> Iterator[int]:
    """Yield a descriptor of a folder, to open files below it. Raises as `read_error`."""
    with translate_errors(folder):
        descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def translate_errors(path: Path) -> Iterator[None]:
    """Translate OSErrors of reading `path`, as `read_error` does."""
    try:
        yield
    except OSError as error:
        raise read_error(error, path) from error


def read_error(error: OSError, path: Path) -> PitError:
    """Return the error of a failed open or read: DataError (missing, or a link), Unreachable (no answer),
    ClusterError.
    """
    if error.errno in (errno.ENOENT, errno.ENXIO):
        return DataError("missing", where=str(path), hint="the manifest lists it: ingest or stage again")
    if error.errno in (errno.ELOOP, errno.ENOTDIR):
        message = "a symbolic link, or a file in place of a folder"
        return DataError(message, where=str(path), hint="a dataset holds plain files and folders only")
    reason = os.strerror(error.errno) if error.errno else str(error)
    if error.errno in (errno.ESTALE, errno.ETIMEDOUT):
        return Unreachable(f"cannot read: {reason}", where=str(path))
    return ClusterError(f"cannot read: {reason}", where=str(path))
