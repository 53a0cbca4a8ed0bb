"""Run work with an object store's library in a child process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from pitools.core import forked_pool
from pitools.core.shared_progress import WorkerSlot

T = TypeVar("T")


def run_isolated(work: Callable[[WorkerSlot], T]) -> T:
    """Run `work` in a forked process and return its result: the library's threads must not exist in a process that
    forks workers. Raises as `work`, and Unreachable when nothing progresses for minutes.
    """
    results: list[T] = []
    forked_pool.run_tasks(
        [None], lambda slot: _SingleTask(work, slot), results.append, readers=1, advance=lambda _: None
    )
    return results[0]


class _SingleTask(Generic[T]):
    """The only task of a child process."""

    def __init__(self, work: Callable[[WorkerSlot], T], slot: WorkerSlot) -> None:
        self._work, self._slot = work, slot

    def __call__(self, task: None) -> T:
        return self._work(self._slot)

    def close(self) -> None:
        """Nothing to close."""
