"""Work with an object store's library in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from pitools.core import forked_pool
from pitools.core.shared_progress import Seat

T = TypeVar("T")


def apart(work: Callable[[Seat], T]) -> T:
    """Do this in a forked process and return its result: the library's threads must not be there when workers are
    forked from this one. Raises what `work` raises, and Unreachable when nothing moves for minutes.
    """
    found: list[T] = []
    forked_pool.run([None], lambda seat: _Errand(work, seat), found.append, readers=1, advance=lambda _: None)
    return found[0]


class _Errand(Generic[T]):
    """The one task of a process that was forked for it."""

    def __init__(self, work: Callable[[Seat], T], seat: Seat) -> None:
        self._work, self._seat = work, seat

    def __call__(self, task: None) -> T:
        return self._work(self._seat)

    def close(self) -> None:
        """Nothing stays open."""
