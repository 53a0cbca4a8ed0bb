"""Count the bytes that each thread reads from files, and keep the path of its current read.

A loader uses the count's difference over a batch for its statistics, and the path in the error for a stalled read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class ReadStats:
    """Statistics of one thread. bytes: read so far from files. path, number: `path(number)` is the file being read."""

    __slots__ = ("bytes", "number", "path")

    def __init__(self) -> None:
        self.bytes = self.number = 0
        self.path: Callable[[int], str] | None = None

    @property
    def where(self) -> str:
        """Return the file that the thread reads, "" if none."""
        path = self.path  # a copy: its thread may set it to None in between
        return path(self.number) if path else ""


class _ThreadLocal(threading.local):
    def __init__(self) -> None:
        self.tally = ReadStats()


_THREAD = _ThreadLocal()


def thread_stats() -> ReadStats:
    """Return the statistics of this thread; other threads may read them."""
    return _THREAD.tally
