"""What each thread reads from files: how many bytes so far, and what it is reading now.

A loader takes the difference over a piece of work for the step log, and where nothing comes back it can say from where.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class ReadStats:
    """Of one thread. bytes: read from files, or over a network, so far. at, number: what says where, of a number."""

    __slots__ = ("bytes", "number", "path")

    def __init__(self) -> None:
        self.bytes = self.number = 0
        self.path: Callable[[int], str] | None = None

    @property
    def where(self) -> str:
        """What the thread read last, perhaps still reads; "" for nothing yet."""
        path = self.path  # its own thread may let go of it meanwhile
        return path(self.number) if path else ""


class _ThreadLocal(threading.local):
    def __init__(self) -> None:
        self.tally = ReadStats()


_THREAD = _ThreadLocal()


def thread_stats() -> ReadStats:
    """The tally of this thread; other threads may look at it."""
    return _THREAD.tally
