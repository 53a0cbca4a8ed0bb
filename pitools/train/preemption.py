"""Stopping between two steps: a signal at any one rank, and all ranks stop after the same step."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any

# Slurm sends SIGTERM at preemption and at the time limit; a job requests SIGUSR2 with `--signal` (NCCL uses SIGUSR1).
SIGNALS = (signal.SIGTERM, signal.SIGUSR2)


class StopSignal:
    """Record SIGTERM and SIGUSR2. Use in the main thread, as a context manager.

    The handler only records: if one rank saved at once, the others would block in a collective.
    """

    def __init__(self) -> None:
        self.received = 0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        self._previous = {number: signal.signal(number, self._record) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def votes(self) -> list[float]:
        """Return one number per signal, 1 if this rank has received it: to be summed over ranks with the gradients."""
        return [float(self.received == number) for number in SIGNALS]

    def _record(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number


def combine_votes(votes: Sequence[float]) -> int:
    """Return the signal to stop for, from the votes summed over ranks, the same at every rank; 0 to continue."""
    return next((int(number) for number, count in zip(SIGNALS, votes, strict=True) if count > 0), 0)
