"""Room held on a disk by an unnamed file with blocks of its own, which the kernel frees however its holder ends."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from pitools.core.fs import allocate, from_os_error, fs_type
from pitools.stage.cache.layout import LOCKS

_ALLOCATE_BYTES = 16 << 20


class DiskReservation:
    """Blocks of an unnamed file, freed as the set's own files take theirs. is_backed: whether the disk has them."""

    def __init__(self, root: Path, needed: int, in_flight: int) -> None:
        """Allocate the file. needed, in_flight: bytes. Raises NoSpace, ClusterError."""
        self._left, self._in_flight = needed, in_flight
        self._size = max(0, needed - in_flight)
        self._file = -1
        # On a tmpfs allocating is writing: it takes the memory, and the time.
        self.is_backed = fs_type(root) != "tmpfs"
        if self._size and self.is_backed:
            self.is_backed = self._allocate(root)

    def _allocate(self, root: Path) -> bool:
        try:
            self._file = os.open(root / LOCKS, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
            allocate(self._file, 0, self._size)
            return os.fstat(self._file).st_blocks * 512 >= self._size
        except OSError as error:
            self.release()
            if error.errno in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.EFBIG):
                return False  # not on this file system, or too large for one file
            raise from_os_error(error, root) from error

    def shrink(self, count: int) -> None:
        """Release the room of `count` bytes that have been written."""
        self._left -= count
        size = max(0, self._left - self._in_flight)
        if self._file >= 0 and (self._size - size >= _ALLOCATE_BYTES or (size == 0 and self._size)):
            os.ftruncate(self._file, size)
            self._size = size

    def release(self) -> None:
        """Release all of it."""
        if self._file >= 0:
            # Not by closing alone: workers that were forked meanwhile have the descriptor too.
            os.ftruncate(self._file, 0)
            os.close(self._file)
            self._file = -1
