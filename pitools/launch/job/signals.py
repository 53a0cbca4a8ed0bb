"""Record the signals that a job, or a local run, receives during an attempt."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from pitools.core import timestamps
from pitools.core.fs import open_0644
from pitools.launch.job.job_context import seconds_to_time_limit
from pitools.run import attempt_records as records
from pitools.run import run_folder

RECORDED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_ONCE_S = 2.0  # Slurm may signal this process and the script, which forwards the signal: record it once


class SignalRecorder:
    """Record each signal and call `callback` with its number, until `close`. Main thread only."""

    def __init__(self, attempt: Path, callback: Callable[[int], None]) -> None:
        self._attempt, self._callback = attempt, callback
        self._start = run_folder.read_record(attempt / "start.json", records.AttemptStart)
        self._last_at: dict[int, float] = {}
        self._previous_handlers = {number: signal.signal(number, self._on_signal) for number in RECORDED_SIGNALS}

    def close(self) -> None:
        """Restore the previous signal handlers."""
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: object) -> None:
        last = self._last_at.get(number, float("-inf"))
        self._last_at[number] = time.monotonic()
        if self._last_at[number] - last > _ONCE_S:
            append_signal(self._attempt, number, seconds_to_time_limit(self._start))
            self._callback(number)


def append_signal(attempt: Path, number: int, seconds_left: float | None) -> None:
    """Append a signal to the attempt's `signals.jsonl`. seconds_left: until the job's time limit, None without one."""
    record = records.SignalRecord(
        t=timestamps.now_rfc3339(), signal=signal.Signals(number).name, seconds_to_limit=seconds_left
    )
    try:
        with open(attempt / "signals.jsonl", "ab", buffering=0, opener=open_0644) as file:
            file.write(msgspec.json.encode(record) + b"\n")
    except OSError:  # a full disk must not prevent the response to the signal
        return
