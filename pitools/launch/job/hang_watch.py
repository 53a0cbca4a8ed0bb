"""Detect a hang: no rank has written a step for many times the median step time.

Reads the step logs only: their sizes and times, and the ends of some. Ranks without a log are not watched; a rank that
works on something else calls `StepLog.heartbeat`.
"""

from __future__ import annotations

import os
import time
from collections import deque
from pathlib import Path
from typing import NamedTuple

import msgspec

from pitools.core import timestamps, units
from pitools.core.errors import PitError
from pitools.run import attempt_records as records
from pitools.run.steps import read_steps

_POLL_S = 5.0  # how often, at most
_TAIL_BYTES = 1 << 14  # bytes: some sixty steps
_WINDOW_STEPS = 100  # steps whose median is the usual one
_JITTER_S = 5.0  # clocks of nodes differ: a time in the future by less is no allowance


class HangLimits(NamedTuple):
    """When a standstill is one. factor: of the usual step; min_s: at least; start_s: for the first two steps."""

    factor: float = 10.0
    min_s: float = 120.0
    start_s: float = 1800.0


def load_limits(plan: Path) -> HangLimits | None:
    """What a plan's request says of the watch; the defaults without a plan; None where it is turned off."""
    try:
        watch = msgspec.json.decode(plan.read_bytes())["request"].get("watch", {})
        limits = HangLimits(
            float(watch.get("hang_factor", 10.0)),
            units.parse_duration(str(watch.get("min_stall", "2m"))),
            units.parse_duration(str(watch.get("start", "30m"))),
        )
    except (OSError, ValueError, KeyError, AttributeError, PitError):  # a script without a run, say
        return HangLimits()
    return limits if limits.min_s > 0 else None


class HangDetector:
    """Watch the step logs of one attempt."""

    def __init__(self, folder: Path, limits: HangLimits) -> None:
        self._folder, self._limits = folder, limits
        self._log_stats: dict[str, tuple[int, float]] = {}  # name → size and time
        self._last_change = time.monotonic()  # when anybody's log last changed
        self._allowed_until = 0.0  # wall clock: no word is expected before
        self._read, self._due = 0, 0.0
        self._step_times_s: deque[float] = deque(maxlen=_WINDOW_STEPS)
        self._followed_log = ""

    def poll_if_due(self) -> records.HangReport | None:
        """Call `poll` if its interval has passed; return its report."""
        if time.monotonic() < self._due:
            return None
        self._due = time.monotonic() + min(_POLL_S, self._limits.min_s / 10)
        return self.poll()

    def poll(self) -> records.HangReport | None:
        """Return a report if the ranks hang now."""
        self._scan()
        if not self._log_stats:
            return None  # nothing keeps a log, or not yet
        stalled_s = time.monotonic() - self._last_change
        median_s = self.median_step_s()
        if stalled_s < self._limit_s(median_s) or time.time() < self._allowed_until:
            return None
        self._refresh_by_opening()  # over NFS a file's time is only certain once it was opened
        stalled_s = time.monotonic() - self._last_change
        if stalled_s < self._limit_s(median_s) or time.time() < self._allowed_until:
            return None
        last_steps = {int(name.partition(".")[0]): _last_step(self._folder / name) for name in self._log_stats}
        newest_step = max(last_steps.values(), default=-1)
        slow_ranks = tuple(sorted(rank for rank, step in last_steps.items() if step < newest_step))
        return records.HangReport(
            t=timestamps.now_rfc3339(),
            step=newest_step,
            stalled_s=stalled_s,
            median_step_s=median_s or 0.0,
            slow_ranks=slow_ranks,
        )

    def median_step_s(self) -> float | None:
        """The median of the latest steps; None before the second."""
        return sorted(self._step_times_s)[len(self._step_times_s) // 2] if self._step_times_s else None

    def _limit_s(self, median_s: float | None) -> float:
        if median_s is None:
            return self._limits.start_s
        return max(self._limits.min_s, self._limits.factor * median_s)

    def _scan(self) -> None:
        try:
            with os.scandir(self._folder) as entries:
                found = {entry.name: entry.stat() for entry in entries if _is_log(entry.name)}
        except OSError:  # not there yet, or storage that is away: what cannot be seen is not judged
            self._last_change = time.monotonic()
            return
        self._record_progress(found)

    def _refresh_by_opening(self) -> None:
        found = {}
        for name in self._log_stats:
            try:
                with (self._folder / name).open("rb") as file:
                    found[name] = os.fstat(file.fileno())
            except OSError:
                self._last_change = time.monotonic()
        self._record_progress(found)

    def _record_progress(self, stats: dict[str, os.stat_result]) -> None:
        now = {name: (stat.st_size, stat.st_mtime) for name, stat in stats.items()}
        if any(self._log_stats.get(name) != one for name, one in now.items()):
            self._log_stats |= now
            self._last_change = time.monotonic()
            ahead = max(time_ for _, time_ in self._log_stats.values())
            self._allowed_until = ahead if ahead > time.time() + _JITTER_S else 0.0
        self._read_followed_rank()

    def _read_followed_rank(self) -> None:
        """Read what one rank, the first that was there, has written since."""
        self._followed_log = self._followed_log or min(
            self._log_stats, default="", key=lambda name: int(name.partition(".")[0])
        )
        size = self._log_stats.get(self._followed_log, (0, 0.0))[0]
        if size <= self._read:
            return
        offset = max(self._read, size - _TAIL_BYTES)
        steps, read = read_steps(self._folder / self._followed_log, offset, at_line_start=offset == self._read)
        self._step_times_s.extend(step.wall_s for step in (steps if offset else steps[1:]))  # the first one compiles
        self._read = read


def _is_log(name: str) -> bool:
    stem, _, suffix = name.partition(".")
    return suffix == "jsonl" and stem.isdecimal()


def _last_step(path: Path) -> int:
    """The last step in a log; -1 for none."""
    try:
        steps, _ = read_steps(path, max(0, path.stat().st_size - _TAIL_BYTES), at_line_start=False)
    except OSError:
        return -1
    return steps[-1].step if steps else -1
