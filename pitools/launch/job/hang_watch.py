"""The hang watch: ranks that make no step for many times the usual one stand still.

It only looks at the step logs: their sizes and times, and the ends of those that it reads. Ranks that write none are
not judged; a rank that is at work on something else says so by `StepLog.beat`.
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

_LOOK_S = 5.0  # how often, at most
_TAIL = 1 << 14  # bytes: some sixty steps
_USUAL = 100  # steps whose median is the usual one
_JITTER_S = 5.0  # clocks of nodes differ: a time in the future by less is no allowance


class Limits(NamedTuple):
    """When a standstill is one. factor: of the usual step; least_s: at least; start_s: for the first two steps."""

    factor: float = 10.0
    least_s: float = 120.0
    start_s: float = 1800.0


def limits(plan: Path) -> Limits | None:
    """What a plan's request says of the watch; the defaults without a plan; None where it is turned off."""
    try:
        said = msgspec.json.decode(plan.read_bytes())["request"].get("watch", {})
        made = Limits(
            float(said.get("hang_factor", 10.0)),
            units.seconds(str(said.get("hang_min", "2m"))),
            units.seconds(str(said.get("start", "30m"))),
        )
    except (OSError, ValueError, KeyError, AttributeError, PitError):  # a script without a run, say
        return Limits()
    return made if made.least_s > 0 else None


class Watch:
    """Looks at the step logs of one attempt, when told to."""

    def __init__(self, folder: Path, limits: Limits) -> None:
        self._folder, self._limits = folder, limits
        self._seen: dict[str, tuple[int, float]] = {}  # name → size and time
        self._word = time.monotonic()  # when anybody's log last changed
        self._allowed = 0.0  # wall clock: no word is expected before
        self._read, self._due = 0, 0.0
        self._walls: deque[float] = deque(maxlen=_USUAL)
        self._lead = ""

    def due(self) -> records.Hang | None:
        """The same as `look`, where it is time to look again."""
        if time.monotonic() < self._due:
            return None
        self._due = time.monotonic() + min(_LOOK_S, self._limits.least_s / 10)
        return self.look()

    def look(self) -> records.Hang | None:
        """A standstill, if there is one now."""
        self._scan()
        if not self._seen:
            return None  # nothing keeps a log, or not yet
        silent_s = time.monotonic() - self._word
        usual_s = self.usual_s()
        if silent_s < self._limit_s(usual_s) or time.time() < self._allowed:
            return None
        self._word_of_all()  # over NFS a file's time is only certain once it was opened
        silent_s = time.monotonic() - self._word
        if silent_s < self._limit_s(usual_s) or time.time() < self._allowed:
            return None
        reached = {int(name.partition(".")[0]): _last(self._folder / name) for name in self._seen}
        most = max(reached.values(), default=-1)
        behind = tuple(sorted(rank for rank, step in reached.items() if step < most))
        return records.Hang(t=timestamps.now(), step=most, silent_s=silent_s, usual_s=usual_s or 0.0, behind=behind)

    def usual_s(self) -> float | None:
        """The median of the latest steps; None before the second."""
        return sorted(self._walls)[len(self._walls) // 2] if self._walls else None

    def _limit_s(self, usual_s: float | None) -> float:
        if usual_s is None:
            return self._limits.start_s
        return max(self._limits.least_s, self._limits.factor * usual_s)

    def _scan(self) -> None:
        try:
            with os.scandir(self._folder) as entries:
                found = {entry.name: entry.stat() for entry in entries if _is_log(entry.name)}
        except OSError:  # not there yet, or storage that is away: what cannot be seen is not judged
            self._word = time.monotonic()
            return
        self._note(found)

    def _word_of_all(self) -> None:
        found = {}
        for name in self._seen:
            try:
                with (self._folder / name).open("rb") as file:
                    found[name] = os.fstat(file.fileno())
            except OSError:
                self._word = time.monotonic()
        self._note(found)

    def _note(self, found: dict[str, os.stat_result]) -> None:
        now = {name: (stat.st_size, stat.st_mtime) for name, stat in found.items()}
        if any(self._seen.get(name) != one for name, one in now.items()):
            self._seen |= now
            self._word = time.monotonic()
            ahead = max(time_ for _, time_ in self._seen.values())
            self._allowed = ahead if ahead > time.time() + _JITTER_S else 0.0
        self._follow()

    def _follow(self) -> None:
        """Read what one rank, the first that was there, has written since."""
        self._lead = self._lead or min(self._seen, default="", key=lambda name: int(name.partition(".")[0]))
        size = self._seen.get(self._lead, (0, 0.0))[0]
        if size <= self._read:
            return
        begin = max(self._read, size - _TAIL)
        steps, read = read_steps(self._folder / self._lead, begin, whole=begin == self._read)
        self._walls.extend(step.wall_s for step in (steps if begin else steps[1:]))  # the first one compiles
        self._read = read


def _is_log(name: str) -> bool:
    stem, _, suffix = name.partition(".")
    return suffix == "jsonl" and stem.isdecimal()


def _last(path: Path) -> int:
    """The last step in a log; -1 for none."""
    try:
        steps, _ = read_steps(path, max(0, path.stat().st_size - _TAIL), whole=False)
    except OSError:
        return -1
    return steps[-1].step if steps else -1
