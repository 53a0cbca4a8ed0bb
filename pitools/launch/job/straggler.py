"""The straggler watch: a rank whose own work takes longer than the others', step after step.

Ranks wait for each other in every step, so that the wall time of all is the slowest one's; what is a rank's own is the
time for its input and its computation. Said once for each rank and attempt, in `<run>/events.jsonl`; nothing is ended.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

from pitools.run import run_folder
from pitools.run.steps import Step, read_steps

WINDOW_STEPS = 30
FACTOR = 1.3
_MIN_SHARE = 0.9  # of these steps that have to be so long: one that is short once is no less slow
_MIN_EXCESS_S = 0.005  # below this it is noise
_TAIL_BYTES = 12 << 10  # bytes: more than STEPS lines
_EVERY_S, _EVERY_RANK_S = 15.0, 0.1  # a thousand ranks are looked at every two minutes


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
    """Rank → (median of its own time, median of the others') in seconds, of ranks slow over their last steps."""
    own_times = {rank: [one.input_s + one.compute_s for one in log[-WINDOW_STEPS:]] for rank, log in steps.items()}
    own_times = {rank: times for rank, times in own_times.items() if len(times) == WINDOW_STEPS}
    medians = {rank: statistics.median(times) for rank, times in own_times.items()}
    if len(own_times) < 2:
        return {}
    slow = {}
    middle = statistics.median(medians.values())
    for rank, times in own_times.items():
        if medians[rank] <= middle:
            continue
        others = statistics.median(value for other, value in medians.items() if other != rank)
        limit = max(FACTOR * others, others + _MIN_EXCESS_S)
        if sum(one > limit for one in times) >= _MIN_SHARE * WINDOW_STEPS:
            slow[rank] = (medians[rank], others)
    return slow


def _read_last_steps(path: Path) -> list[Step]:
    try:
        return read_steps(path, max(0, path.stat().st_size - _TAIL_BYTES), at_line_start=False)[0]
    except OSError:
        return []
