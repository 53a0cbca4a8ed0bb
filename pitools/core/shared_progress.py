"""Memory that workers share with their parent process: bytes moved, and a flag to stop."""

from __future__ import annotations

import mmap
import time


class WorkerStopped(Exception):
    """The workers are to stop: another worker failed, or the process received a signal. Not reported as an error."""


class SharedProgress:
    """Counters shared by the parent and all workers: a flag to stop, heartbeats, the virtual start of the work at the
    bandwidth limit (monotonic clock, ns), and the bytes moved by each worker."""

    def __init__(self, slots: int) -> None:
        self._counters = memoryview(mmap.mmap(-1, 8 * (slots + 3))).cast("Q")
        self._counters[2] = time.monotonic_ns()

    def stop(self) -> None:
        """Stop all workers at their next block."""
        self._counters[0] = 1

    @property
    def total_bytes(self) -> int:
        """Return the bytes moved by all workers."""
        return sum(self._counters[3:])

    @property
    def heartbeats(self) -> int:
        """Return a count that increases while workers are busy without moving bytes."""
        return self._counters[1]

    def add_bytes(self, slot: int, count: int) -> None:
        """Count bytes of a worker. Raises WorkerStopped when the workers are to stop."""
        if self._counters[0]:
            raise WorkerStopped
        self._counters[slot + 3] += count

    def heartbeat(self) -> None:
        """Count a heartbeat; two at the same moment may count once. Raises WorkerStopped."""
        self.add_bytes(0, 0)
        self._counters[1] += 1

    def lead_s(self, bytes_per_s: float) -> float:
        """Return the lead of all workers over a bandwidth limit, in seconds; at least -1."""
        latest, due_ns = time.monotonic_ns() - 1_000_000_000, int(self.total_bytes / bytes_per_s * 1e9)
        if self._counters[2] + due_ns < latest:  # an idle time is not saved for a burst; workers set the same value
            self._counters[2] = latest - due_ns
        return (self._counters[2] + due_ns - latest) / 1e9 - 1


class WorkerSlot:
    """One thread's counter in the shared memory."""

    def __init__(self, board: SharedProgress, number: int) -> None:
        self._board, self._number = board, number

    def add_bytes(self, count: int) -> None:
        """Count bytes; to be called for every block. Raises WorkerStopped."""
        self._board.add_bytes(self._number, count)

    def heartbeat(self) -> None:
        """Count a heartbeat of a thread that is busy without moving bytes. Raises WorkerStopped."""
        self._board.heartbeat()

    def wait_for_bandwidth(self, bytes_per_s: float) -> None:
        """Wait until all threads together are within a bandwidth limit. Raises WorkerStopped."""
        while (lead_s := self._board.lead_s(bytes_per_s)) > 0:
            time.sleep(min(lead_s, 0.2))
            self.heartbeat()
