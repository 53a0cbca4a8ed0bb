"""Detect stragglers: ranks that need more time for their own work than the others, step after step.

Ranks wait for each other in every step, so the wall time of all ranks is that of the slowest. A rank's own time is that
of its input and its computation. Each straggler is recorded once per attempt in `<run>/events.jsonl`; no rank is ended.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

from pitools.run import run_folder
from pitools.run.steps import Step, read_steps_after

WINDOW_STEPS = 30
FACTOR = 1.3
_MIN_SHARE = 0.9  # share of the steps that must be over the limit: single short steps do not clear a straggler
_MIN_EXCESS_S = 0.005  # a smaller difference is noise
_TAIL_BYTES = 12 << 10  # more than WINDOW_STEPS lines
_EVERY_S, _EVERY_RANK_S = 15.0, 0.1  # the interval grows with the ranks: 1,000 ranks are read every 100 s


class StragglerDetector:
    """Read the ends of all step logs of one attempt periodically, and record new stragglers."""

    def __init__(self, run_dir: Path, attempt: Path) -> None:
        self._run_dir, self._attempt = run_dir, attempt
        self._reported: set[int] = set()
        self._due = time.monotonic() + _EVERY_S

    def poll(self) -> None:
        """Record ranks that have become slow, if the interval has passed."""
        if time.monotonic() < self._due:
            return
        logs = list((self._attempt / "steps").glob("*.jsonl"))
        self._due = time.monotonic() + max(_EVERY_S, len(logs) * _EVERY_RANK_S)
        self.record_events({int(path.stem): _read_last_steps(path) for path in logs if path.stem.isdecimal()})

    def record_events(self, steps: dict[int, list[Step]]) -> None:
        """Append an event for each slow rank that has none yet."""
        for rank, times in slow_ranks(steps).items():
            if rank not in self._reported:
                self._reported.add(rank)
                run_folder.append_event(
                    self._run_dir,
                    "straggler",
                    attempt=self._attempt.name,
                    rank=rank,
                    node=self._node(rank),
                    step=steps[rank][-1].step,
                    own_s=round(times[0], 4),
                    others_s=round(times[1], 4),
                )

    def _node(self, rank: int) -> str:
        try:
            return (self._attempt / "hostfile").read_text().split()[rank]
        except (OSError, IndexError):
            return ""


def slow_ranks(steps: dict[int, list[Step]]) -> dict[int, tuple[float, float]]:
    """Return the slow ranks: rank → (median of its own times, median of the other ranks' medians), in seconds."""
    own_times = {rank: [step.input_s + step.compute_s for step in log[-WINDOW_STEPS:]] for rank, log in steps.items()}
    own_times = {rank: times for rank, times in own_times.items() if len(times) == WINDOW_STEPS}
    medians = {rank: statistics.median(times) for rank, times in own_times.items()}
    if len(own_times) < 2:
        return {}
    slow = {}
    overall_median_s = statistics.median(medians.values())
    for rank, times in own_times.items():
        if medians[rank] <= overall_median_s:
            continue
        others_s = statistics.median(value for peer, value in medians.items() if peer != rank)
        limit_s = max(FACTOR * others_s, others_s + _MIN_EXCESS_S)
        if sum(time_s > limit_s for time_s in times) >= _MIN_SHARE * WINDOW_STEPS:
            slow[rank] = (medians[rank], others_s)
    return slow


def _read_last_steps(path: Path) -> list[Step]:
    try:
        return read_steps_after(path, max(0, path.stat().st_size - _TAIL_BYTES), at_line_start=False)[0]
    except OSError:
        return []
