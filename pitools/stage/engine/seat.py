"""What worker threads share with the parent process: bytes moved, and whether to stop."""

from __future__ import annotations

import mmap


class Stopped(Exception):
    """Another worker failed, or the process was told to stop; this one gives up without a word."""


class Board:
    """Memory that the parent and all workers share: whether to stop, signs of life, and bytes moved by each."""

    def __init__(self, seats: int) -> None:
        self._words = memoryview(mmap.mmap(-1, 8 * (seats + 2))).cast("Q")

    def stop(self) -> None:
        """Tell all workers to give up at their next block."""
        self._words[0] = 1

    @property
    def total(self) -> int:
        """Bytes moved by all."""
        return sum(self._words[2:])

    @property
    def signs(self) -> int:
        """Changes while a worker is busy with something else than to move bytes."""
        return self._words[1]

    def moved(self, seat: int, count: int) -> None:
        """One worker moved so many bytes. Raises Stopped when all are to stop."""
        if self._words[0]:
            raise Stopped
        self._words[seat + 2] += count

    def alive(self) -> None:
        """One worker's sign of life. Two at once may count as one. Raises Stopped."""
        self.moved(0, 0)
        self._words[1] += 1


class Seat:
    """One thread's place at the board. share: this thread's part of what all may do, such as of a bandwidth."""

    def __init__(self, board: Board, number: int, seats: int) -> None:
        self.share = 1 / seats
        self._board, self._number = board, number

    def moved(self, count: int) -> None:
        """Count bytes; call it at every block. Raises Stopped."""
        self._board.moved(self._number, count)

    def alive(self) -> None:
        """Say that this thread is not stuck, though it moves nothing: it waits for its pace, say. Raises Stopped."""
        self._board.alive()
