"""Work with an object store's library in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from pitools.core import forked_pool
from pitools.core.shared_progress import WorkerSlot

T = TypeVar("T")


def run_isolated(work: Callable[[WorkerSlot], T]) -> T:
    """Do this in a forked process and return its result: the library's threads must not be there when workers are
    forked from this one. Raises what `work` raises, and Unreachable when nothing moves for minutes.
    """
    found: list[T] = []
    forked_pool.run_tasks([None], lambda slot: _SingleTask(work, slot), found.append, readers=1, advance=lambda _: None)
    return found[0]


class _SingleTask(Generic[T]):
    """The one task of a process that was forked for it."""

    def __init__(self, work: Callable[[WorkerSlot], T], slot: WorkerSlot) -> None:
        self._work, self._slot = work, slot

    def __call__(self, task: None) -> T:
        return self._work(self._slot)

    def close(self) -> None:
        """Nothing stays open."""
