"""What worker threads share with the parent process: bytes moved, and whether to stop."""

from __future__ import annotations

import mmap
import time


class WorkerStopped(Exception):
    """Another worker failed, or the process was told to stop; this one gives up without a word."""


class SharedProgress:
    """Memory that the parent and all workers share: whether to stop, signs of life, when the work would have begun at
    the bandwidth that is allowed, on the monotonic clock in ns, and bytes moved by each."""

    def __init__(self, seats: int) -> None:
        self._counters = memoryview(mmap.mmap(-1, 8 * (seats + 3))).cast("Q")
        self._counters[2] = time.monotonic_ns()

    def stop(self) -> None:
        """Tell all workers to give up at their next block."""
        self._counters[0] = 1

    @property
    def total_bytes(self) -> int:
        """Bytes moved by all."""
        return sum(self._counters[3:])

    @property
    def heartbeats(self) -> int:
        """Changes while a worker is busy with something else than to move bytes."""
        return self._counters[1]

    def add_bytes(self, seat: int, count: int) -> None:
        """One worker moved so many bytes. Raises Stopped when all are to stop."""
        if self._counters[0]:
            raise WorkerStopped
        self._counters[seat + 3] += count

    def heartbeat(self) -> None:
        """One worker's sign of life. Two at once may count as one. Raises Stopped."""
        self.add_bytes(0, 0)
        self._counters[1] += 1

    def early_s(self, bytes_per_s: float) -> float:
        """How much earlier all have moved their bytes than they were due, s; at most a second late."""
        latest, taken = time.monotonic_ns() - 1_000_000_000, int(self.total_bytes / bytes_per_s * 1e9)
        if self._counters[2] + taken < latest:  # an idle second is not saved up for a burst; two at once set the same
            self._counters[2] = latest - taken
        return (self._counters[2] + taken - latest) / 1e9 - 1


class WorkerSlot:
    """One thread's place at the board."""

    def __init__(self, board: SharedProgress, number: int) -> None:
        self._board, self._number = board, number

    def add_bytes(self, count: int) -> None:
        """Count bytes; call it at every block. Raises Stopped."""
        self._board.add_bytes(self._number, count)

    def heartbeat(self) -> None:
        """Say that this thread is not stuck, though it moves nothing: it waits for its pace, say. Raises Stopped."""
        self._board.heartbeat()

    def wait(self, bytes_per_s: float) -> None:
        """Wait until what all threads have moved was due at this bandwidth, however many of them are at work. Raises
        Stopped."""
        while (left := self._board.early_s(bytes_per_s)) > 0:
            time.sleep(min(left, 0.2))
            self.heartbeat()
