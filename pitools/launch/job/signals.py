"""What a job, or a local run, was sent while an attempt ran: heard, and written down at once."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from pitools.core import timestamps
from pitools.core.fs import own
from pitools.launch.job.job_context import left_s
from pitools.run import attempt_records as records
from pitools.run import run_folder

HEARD = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_ONCE_S = 2.0  # Slurm may signal the script, which tells us, and us as well


class Ears:
    """Hears signals from its making to `close`, and calls `then` with each; main thread only."""

    def __init__(self, attempt: Path, then: Callable[[int], None]) -> None:
        self._attempt, self._then = attempt, then
        self._start = run_folder.read(attempt / "start.json", records.Start)
        self._at: dict[int, float] = {}
        self._before = {number: signal.signal(number, self._hear) for number in HEARD}

    def close(self) -> None:
        """Hear nothing more."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _hear(self, number: int, _frame: object) -> None:
        last = self._at.get(number, float("-inf"))
        self._at[number] = time.monotonic()
        if self._at[number] - last > _ONCE_S:
            note(self._attempt, number, left_s(self._start))
            self._then(number)


def note(attempt: Path, number: int, left: float | None) -> None:
    """Append a signal to the attempt's `signals.jsonl`."""
    said = records.Signal(t=timestamps.now(), signal=signal.Signals(number).name, left_s=left)
    try:
        with open(attempt / "signals.jsonl", "ab", buffering=0, opener=own) as file:
            file.write(msgspec.json.encode(said) + b"\n")
    except OSError:  # a full disk must not stop what the signal asks for
        return
