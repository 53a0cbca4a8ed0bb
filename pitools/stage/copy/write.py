"""How bytes reach a new file: through the page cache, past it, as a clone."""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

from pitools.core.fs import from_os_error, sync_fs
from pitools.stage.sources.base import SourceFile
from pitools.stage.sources.local import LocalFile

# What O_DIRECT wants: addresses, offsets and lengths in multiples of the disk's block.
_DIRECT_ALIGNMENT = 4096
_FICLONE = 0x40049409
_FLUSH_EVERY_BYTES = 128 << 20


class EarlyFlusher:
    """Has a file system write from early on what is given to it, so that little is left to wait for at the end.

    The kernel begins by itself only when a tenth of the memory waits to be written. Leaving the block syncs what is
    left; raises NoSpace or ClusterError. To be used by a process that does not fork meanwhile but for `pool.run`'s
    workers, which come before the first byte.
    """

    def __init__(self, to: Path) -> None:
        self._to, self._waiting = to, 0
        self._thread: threading.Thread | None = None
        self._error: OSError | None = None

    def add_bytes(self, count: int) -> None:
        """Count bytes; begin to sync when they are many."""
        self._waiting += count
        if self._waiting >= _FLUSH_EVERY_BYTES and not (self._thread and self._thread.is_alive()):
            self._waiting = 0
            self._thread = threading.Thread(target=self._sync, daemon=True)
            self._thread.start()

    def __enter__(self) -> EarlyFlusher:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind:
            return  # it is not waited for where the copy has failed, perhaps because the disk hangs
        if self._thread:
            self._thread.join()
        self._sync()
        if self._error:
            raise from_os_error(self._error, self._to) from self._error

    def _sync(self) -> None:
        try:
            sync_fs(self._to)
        except OSError as error:  # told to whoever syncs first, and to nobody again
            self._error = error


def clone_file(descriptor: int, file: SourceFile) -> bool:
    """Whether a new file now shares the blocks of a source file, as XFS and Btrfs can."""
    if not isinstance(file, LocalFile):
        return False
    try:
        fcntl.ioctl(descriptor, _FICLONE, file.fileno())
    except OSError:
        return False
    return True


def write_all(descriptor: int, view: memoryview, offset: int) -> None:
    """Write all of it, through the page cache. Raises OSError."""
    while view:
        count = os.pwrite(descriptor, view, offset)
        view = view[count:]
        offset += count


def write_direct(descriptor: int, view: memoryview, offset: int) -> None:
    """Write with O_DIRECT, but for the end of a file that is not of the disk's block size."""
    aligned = len(view) - len(view) % _DIRECT_ALIGNMENT
    done = 0
    while done < aligned and not done % _DIRECT_ALIGNMENT:
        done += os.pwrite(descriptor, view[done:aligned], offset + done)
    if done < len(view):
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~os.O_DIRECT)
        write_all(descriptor, view[done:], offset + done)
