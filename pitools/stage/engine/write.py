"""How bytes reach a new file: through the page cache, past it, as a clone, at a pace."""

from __future__ import annotations

import fcntl
import os
import time

from pitools.stage.engine.seat import Seat
from pitools.stage.local import LocalFile
from pitools.stage.source import SourceFile

# What O_DIRECT wants: addresses, offsets and lengths in multiples of the disk's block.
_ALIGNED = 4096
_FICLONE = 0x40049409


class Pace:
    """Waits so that a thread moves no more than its share of a bandwidth, over any few seconds."""

    def __init__(self, bytes_per_s: float) -> None:
        self._rate, self._due = bytes_per_s, time.monotonic()

    def wait(self, count: int, seat: Seat) -> None:
        """Account for `count` bytes, and wait until they were due. Raises Stopped."""
        if not self._rate:
            return
        # An idle second is not saved up for a burst.
        self._due = max(self._due, time.monotonic() - 1) + count / self._rate
        while (left := self._due - time.monotonic()) > 0:
            time.sleep(min(left, 0.2))
            seat.waited()


def clone(descriptor: int, file: SourceFile) -> bool:
    """Whether a new file now shares the blocks of a source file, as XFS and Btrfs can."""
    if not isinstance(file, LocalFile):
        return False
    try:
        fcntl.ioctl(descriptor, _FICLONE, file.fileno())
    except OSError:
        return False
    return True


def write(descriptor: int, view: memoryview, offset: int) -> None:
    """Write all of it, through the page cache. Raises OSError."""
    while view:
        count = os.pwrite(descriptor, view, offset)
        view = view[count:]
        offset += count


def write_direct(descriptor: int, view: memoryview, offset: int) -> None:
    """Write with O_DIRECT, but for the end of a file that is not of the disk's block size."""
    aligned = len(view) - len(view) % _ALIGNED
    done = 0
    while done < aligned and not done % _ALIGNED:
        done += os.pwrite(descriptor, view[done:aligned], offset + done)
    if done < len(view):
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~os.O_DIRECT)
        write(descriptor, view[done:], offset + done)
