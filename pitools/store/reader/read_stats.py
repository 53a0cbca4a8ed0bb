"""What each thread reads from files: how many bytes so far, and what it is reading now.

A loader takes the difference over a piece of work for the step log, and where nothing comes back it can say from where.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class Tally:
    """Of one thread. bytes: read from files, or over a network, so far. at, number: what says where, of a number."""

    __slots__ = ("at", "bytes", "number")

    def __init__(self) -> None:
        self.bytes = self.number = 0
        self.at: Callable[[int], str] | None = None

    @property
    def where(self) -> str:
        """What the thread read last, perhaps still reads; "" for nothing yet."""
        at = self.at  # its own thread may let go of it meanwhile
        return at(self.number) if at else ""


class _Mine(threading.local):
    def __init__(self) -> None:
        self.tally = Tally()


_MINE = _Mine()


def mine() -> Tally:
    """The tally of this thread; other threads may look at it."""
    return _MINE.tally
