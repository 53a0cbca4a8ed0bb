"""How long jobs of this queue are expected to run, learnt from those that ended: people ask for far more than they use.

Jobs of one owner and name are of one kind, and what is learnt is how much of the time that was asked for they use.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from pitools.core import units
from pitools.core.errors import PitError
from pitools.place.dispatch import store
from pitools.place.dispatch.journal import Entry, Queued, What, read_journal
from pitools.place.types import Option
from pitools.run import run_folder

if TYPE_CHECKING:
    from pitools.place.policy.runtime_predictor import Known, Predictor

FEW = 3  # of fewer of its kind nothing is said
MOST = 300  # jobs that are read in one tick, those submitted last: 0.1 ms each
_TICK_S = 60.0  # what was not seen to start between two ticks ran no longer than it was there, if that was short

Speed = Callable[[str], float]


class Expectations:
    """What the queue at `place` has taught. speed: of a pool, 1.0 where that is not known."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._read: set[str] = set()
        self._kinds: Counter[str] = Counter()
        self._predictor: Predictor | None = None

    def learn(self, speed: Speed) -> None:
        """Read what ended since the last time."""
        new = [name for _, name in store.over(self._place) if name not in self._read]
        self._read.update(new)
        for path in (self._place / "done" / name for name in new[-MOST:]):
            try:
                asked = run_folder.read(path / "job.json", Queued)
                ran = _ran(read_journal(path / "journal.jsonl"))
            except (PitError, OSError):
                continue  # what cannot be read teaches nothing
            if asked and ran and asked.request.time:
                self._ended(asked, ran[1] * speed(ran[0]))

    def _ended(self, asked: Queued, run_s: float) -> None:
        from pitools.place.policy.runtime_predictor import Predictor

        self._predictor = self._predictor or Predictor()
        self._predictor.ended(_known(asked, units.seconds(asked.request.time)), run_s)
        self._kinds[_kind(asked)] += 1

    def of(self, asked: Queued, option: Option, speed: Speed) -> Option:
        """The option with what the job is expected to take there, where that is less than was thought."""
        if self._predictor is None or self._kinds[_kind(asked)] < FEW:
            return option
        fast = speed(option.pool)
        known = _known(asked, option.limit_s * min(1.0, fast))  # slow nodes were given a longer limit
        run_s = self._predictor.mean_s(known) / fast
        return replace(option, run_s=run_s) if run_s < option.run_s else option


def _kind(asked: Queued) -> str:
    return f"{asked.owner}/{asked.request.name}"


def _known(asked: Queued, limit_s: float) -> Known:
    from pitools.place.policy.runtime_predictor import Known

    request = asked.request
    return Known(limit_s=max(1.0, limit_s), units=request.nodes * max(1, request.gpus_per_node), kind=_kind(asked))


def _ran(entries: list[Entry]) -> tuple[str, float] | None:
    """The pool where a job ran and for how many seconds, as its journal tells; None where that is not known."""
    pools: dict[int, str] = {}
    placed: dict[int, float] = {}
    started: dict[int, float] = {}
    for entry in entries:
        at_s = datetime.fromisoformat(entry.t).timestamp()
        if entry.what is What.SUBMIT:
            pools[entry.n], placed[entry.n] = entry.pool, at_s
        elif entry.what is What.STARTED:
            started[entry.n] = at_s
        elif entry.what is What.ENDED and entry.n in pools and entry.state != "CANCELLED":
            if entry.n in started:
                return pools[entry.n], max(1.0, at_s - started[entry.n])
            if at_s - placed[entry.n] < _TICK_S:
                return pools[entry.n], max(1.0, at_s - placed[entry.n])
    return None
