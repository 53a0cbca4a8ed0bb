"""Write bytes to a new file: through the page cache, past it, or as a clone."""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

from pitools.core.fs import from_os_error, sync_fs
from pitools.stage.sources.base import SourceFile
from pitools.stage.sources.local import LocalFile

# O_DIRECT needs addresses, offsets and lengths in multiples of the disk's block size.
_DIRECT_ALIGNMENT = 4096
_FICLONE = 0x40049409
_FLUSH_EVERY_BYTES = 128 << 20


class BackgroundSync:
    """Start to sync a file system early, so that little is left at the end.

    The kernel starts only when a tenth of the memory is dirty. Leaving the block syncs the rest; raises NoSpace or
    ClusterError. Only for a process that forks no more, except the workers of `forked_pool.run_tasks`, which are forked
    before the first byte.
    """

    def __init__(self, target: Path) -> None:
        self._target, self._unsynced_bytes = target, 0
        try:
            self._descriptor = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise from_os_error(error, target) from error
        self._thread: threading.Thread | None = None
        self._error: OSError | None = None

    def add_bytes(self, count: int) -> None:
        """Count bytes; start a sync when there are many."""
        self._unsynced_bytes += count
        if self._unsynced_bytes >= _FLUSH_EVERY_BYTES and not (self._thread and self._thread.is_alive()):
            self._unsynced_bytes = 0
            self._thread = threading.Thread(target=self._sync, daemon=True)
            self._thread.start()

    def __enter__(self) -> BackgroundSync:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind:  # do not wait after a failed copy: the disk may hang
            if not (self._thread and self._thread.is_alive()):
                os.close(self._descriptor)
            return
        if self._thread:
            self._thread.join()
        self._sync()
        os.close(self._descriptor)
        if self._error:
            raise from_os_error(self._error, self._target) from self._error

    def _sync(self) -> None:
        try:
            sync_fs(self._target, self._descriptor)
        except OSError as error:  # the kernel reports a write error only once
            self._error = error


def clone_file(descriptor: int, file: SourceFile) -> bool:
    """Clone a source file's blocks (reflink), as XFS and Btrfs can; return whether it succeeded."""
    if not isinstance(file, LocalFile):
        return False
    try:
        fcntl.ioctl(descriptor, _FICLONE, file.fileno())
    except OSError:
        return False
    return True


def write_all(descriptor: int, view: memoryview, offset: int) -> None:
    """Write all of `view` through the page cache. Raises OSError."""
    while view:
        count = os.pwrite(descriptor, view, offset)
        view = view[count:]
        offset += count


def write_direct(descriptor: int, view: memoryview, offset: int) -> None:
    """Write with O_DIRECT, except the end of a file that is not a multiple of the block size."""
    aligned = len(view) - len(view) % _DIRECT_ALIGNMENT
    written = 0
    while written < aligned and not written % _DIRECT_ALIGNMENT:
        written += os.pwrite(descriptor, view[written:aligned], offset + written)
    if written < len(view):
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~os.O_DIRECT)
        write_all(descriptor, view[written:], offset + written)
