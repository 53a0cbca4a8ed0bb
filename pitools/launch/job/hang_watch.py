"""Detect a hang: no rank has written a step for many times the median step time. Reports the first loss of NaN, too.

The detector reads only the step logs: their sizes, modification times, and the tails of some. Ranks without a log are
not watched. A rank that works on something other than a step calls `StepLog.heartbeat`.
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
from pitools.launch import hooks
from pitools.run import attempt_records as records
from pitools.run.steps import read_steps_after

_POLL_S = 5.0  # the longest interval between two polls
_TAIL_BYTES = 1 << 14  # about 60 steps
_WINDOW_STEPS = 100  # the median step time is that of the latest so many steps
_CLOCK_SKEW_S = 5.0  # node clocks differ: a modification time less far in the future is not a heartbeat
_STOPPED_S = 10.0  # this process polls every 0.5 s: after a longer pause it was stopped, and the ranks with it


class HangLimits(NamedTuple):
    """When a stall is a hang: after factor times the median step time, min_s at least.

    first_step_s: until the second step is logged.
    """

    factor: float = 10.0
    min_s: float = 120.0
    first_step_s: float = 1800.0


def load_limits(plan: Path) -> HangLimits | None:
    """Return the limits of a plan's request, the defaults without a plan, or None if the watch is off."""
    try:
        watch = msgspec.json.decode(plan.read_bytes())["request"].get("watch", {})
        limits = HangLimits(
            float(watch.get("hang_factor", 10.0)),
            units.parse_duration(str(watch.get("min_stall", "2m"))),
            units.parse_duration(str(watch.get("first_step", "30m"))),
        )
    except (OSError, ValueError, KeyError, AttributeError, PitError):  # e.g. a script without a run
        return HangLimits()
    return limits if limits.min_s > 0 else None


class HangDetector:
    """Watch the step logs of one attempt."""

    def __init__(self, folder: Path, limits: HangLimits) -> None:
        self._folder, self._limits = folder, limits
        self._log_stats: dict[str, tuple[int, float]] = {}  # file name → size and modification time
        self._last_change = time.monotonic()  # when any rank's log last changed
        self._heartbeat_until = 0.0  # wall clock: a heartbeat announced no step before then
        self._followed_bytes, self._due = 0, 0.0
        self._called_at = self._last_change
        self._step_times_s: deque[float] = deque(maxlen=_WINDOW_STEPS)
        self._followed_log = ""
        self._has_nan = False

    def poll_if_due(self) -> records.HangReport | None:
        """Call `poll` if its interval has passed; return its report.

        The time of a suspended job does not count: Slurm stops this process and the ranks, and resumes them together.
        """
        now = time.monotonic()
        if (paused_s := now - self._called_at) > _STOPPED_S:
            self._last_change += paused_s
            self._heartbeat_until += paused_s
        self._called_at = now
        if now < self._due:
            return None
        self._due = now + min(_POLL_S, self._limits.min_s / 10)
        return self.poll()

    def poll(self) -> records.HangReport | None:
        """Return a report if the ranks hang now."""
        self._scan()
        if not self._log_stats:
            return None  # no rank has a log, or not yet
        stalled_s = time.monotonic() - self._last_change
        median_s = self.median_step_s()
        if stalled_s < self._limit_s(median_s) or time.time() < self._heartbeat_until:
            return None
        self._refresh_by_opening()  # NFS revalidates a file's attributes only when it is opened
        stalled_s = time.monotonic() - self._last_change
        if stalled_s < self._limit_s(median_s) or time.time() < self._heartbeat_until:
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
        """Return the median time of the latest steps, in seconds; None before the second step."""
        return sorted(self._step_times_s)[len(self._step_times_s) // 2] if self._step_times_s else None

    def _limit_s(self, median_s: float | None) -> float:
        if median_s is None:
            return self._limits.first_step_s
        return max(self._limits.min_s, self._limits.factor * median_s)

    def _scan(self) -> None:
        try:
            with os.scandir(self._folder) as entries:
                stats = {entry.name: entry.stat() for entry in entries if _is_log(entry.name)}
        except OSError:  # the folder does not exist yet, or storage is unavailable: no evidence of a hang
            self._last_change = time.monotonic()
            return
        self._record_progress(stats)

    def _refresh_by_opening(self) -> None:
        stats = {}
        for name in self._log_stats:
            try:
                with (self._folder / name).open("rb") as file:
                    stats[name] = os.fstat(file.fileno())
            except OSError:
                self._last_change = time.monotonic()
        self._record_progress(stats)

    def _record_progress(self, stats: dict[str, os.stat_result]) -> None:
        log_stats = {name: (stat.st_size, stat.st_mtime) for name, stat in stats.items()}
        if any(self._log_stats.get(name) != log_stat for name, log_stat in log_stats.items()):
            self._log_stats |= log_stats
            self._last_change = time.monotonic()
            # StepLog.heartbeat sets the modification time to the end of its allowance.
            newest = max(modified for _, modified in self._log_stats.values())
            self._heartbeat_until = newest if newest > time.time() + _CLOCK_SKEW_S else 0.0
        self._read_followed_rank()

    def _read_followed_rank(self) -> None:
        """Read the new steps of one rank, the lowest of the ranks that had a log first."""
        self._followed_log = self._followed_log or min(
            self._log_stats, default="", key=lambda name: int(name.partition(".")[0])
        )
        size = self._log_stats.get(self._followed_log, (0, 0.0))[0]
        if size <= self._followed_bytes:
            return
        offset = max(self._followed_bytes, size - _TAIL_BYTES)
        path, at_line_start = self._folder / self._followed_log, offset == self._followed_bytes
        steps, self._followed_bytes = read_steps_after(path, offset, at_line_start=at_line_start)
        self._step_times_s.extend(step.wall_s for step in (steps if offset else steps[1:]))  # the first step compiles
        nan_step = next((step.step for step in steps if step.loss is None), None)
        if nan_step is not None and not self._has_nan:
            self._has_nan = True
            hooks.report_nan(self._folder.parent, nan_step)


def _is_log(name: str) -> bool:
    stem, _, suffix = name.partition(".")
    return suffix == "jsonl" and stem.isdecimal()


def _last_step(path: Path) -> int:
    """Return the number of the last step in a log; -1 without one."""
    try:
        steps, _ = read_steps_after(path, max(0, path.stat().st_size - _TAIL_BYTES), at_line_start=False)
    except OSError:
        return -1
    return steps[-1].step if steps else -1
