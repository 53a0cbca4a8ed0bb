"""Reserve disk space by an unnamed file with allocated blocks, which the kernel frees when the process ends."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from pitools.core.fs import allocate, from_os_error, fs_type
from pitools.stage.cache.layout import LOCKS

_ALLOCATE_BYTES = 16 << 20


class DiskReservation:
    """Allocated blocks of an unnamed file, freed as the set's files are written. is_backed: whether the disk allocates
    them.
    """

    def __init__(self, root: Path, needed: int, in_flight: int) -> None:
        """Allocate the file. needed, in_flight: bytes. Raises NoSpace, ClusterError."""
        self._remaining, self._in_flight = needed, in_flight
        self._size = max(0, needed - in_flight)
        self._descriptor = -1
        # On tmpfs allocation writes: it takes memory and time.
        self.is_backed = fs_type(root) != "tmpfs"
        if self._size and self.is_backed:
            self.is_backed = self._allocate(root)

    def _allocate(self, root: Path) -> bool:
        try:
            self._descriptor = os.open(root / LOCKS, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
            allocate(self._descriptor, 0, self._size)
            return os.fstat(self._descriptor).st_blocks * 512 >= self._size
        except OSError as error:
            self.release()
            if error.errno in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.EFBIG):
                return False  # not supported by this file system, or too large for one file
            raise from_os_error(error, root) from error

    def shrink(self, count: int) -> None:
        """Free the space of `count` bytes that have been written."""
        self._remaining -= count
        size = max(0, self._remaining - self._in_flight)
        if self._descriptor >= 0 and (self._size - size >= _ALLOCATE_BYTES or (size == 0 and self._size)):
            os.ftruncate(self._descriptor, size)
            self._size = size

    def release(self) -> None:
        """Free all of the space."""
        if self._descriptor >= 0:
            # Closing alone would not free it: forked workers have the descriptor too.
            os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = -1
