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
from pitools.place.dispatch.journal import EntryKind, JournalEntry, QueuedRequest, read_journal
from pitools.place.types import PlacementOption
from pitools.run import run_folder

if TYPE_CHECKING:
    from pitools.place.policy.runtime_predictor import JobFeatures, RuntimePredictor

MIN_RUNS = 3  # of fewer of its kind nothing is said
MAX_READ = 300  # jobs that are read in one tick, those submitted last: 0.1 ms each
_READ_BUDGET_S = 60.0  # what was not seen to start between two ticks ran no longer than it was there, if that was short

Speed = Callable[[str], float]


class RuntimeHistory:
    """What the queue at `queue_dir` has taught. speed: of a pool, 1.0 where that is not known."""

    def __init__(self, queue_dir: Path) -> None:
        self._queue_dir = queue_dir
        self._read: set[str] = set()
        self._kinds: Counter[str] = Counter()
        self._predictor: RuntimePredictor | None = None

    def update(self, speed: Speed) -> None:
        """Read what ended since the last time."""
        new = [name for _, name in store.archived(self._queue_dir) if name not in self._read]
        self._read.update(new)
        for path in (self._queue_dir / "done" / name for name in new[-MAX_READ:]):
            try:
                asked = run_folder.read_record(path / "job.json", QueuedRequest)
                ran = _pool_and_run_s(read_journal(path / "journal.jsonl"))
            except (PitError, OSError):
                continue  # what cannot be read teaches nothing
            if asked and ran and asked.request.time:
                self._add(asked, ran[1] * speed(ran[0]))

    def _add(self, request: QueuedRequest, run_s: float) -> None:
        from pitools.place.policy.runtime_predictor import RuntimePredictor

        self._predictor = self._predictor or RuntimePredictor()
        self._predictor.add_run(_known(request, units.parse_duration(request.request.time)), run_s)
        self._kinds[_request_kind(request)] += 1

    def expected(self, request: QueuedRequest, option: PlacementOption, speed: Speed) -> PlacementOption:
        """The option with what the job is expected to take there, where that is less than was thought."""
        if self._predictor is None or self._kinds[_request_kind(request)] < MIN_RUNS:
            return option
        fast = speed(option.pool)
        known = _known(request, option.limit_s * min(1.0, fast))  # slow nodes were given a longer limit
        run_s = self._predictor.mean_s(known) / fast
        return replace(option, run_s=run_s) if run_s < option.run_s else option


def _request_kind(asked: QueuedRequest) -> str:
    return f"{asked.owner}/{asked.request.name}"


def _known(asked: QueuedRequest, limit_s: float) -> JobFeatures:
    from pitools.place.policy.runtime_predictor import JobFeatures

    request = asked.request
    return JobFeatures(
        limit_s=max(1.0, limit_s), units=request.nodes * max(1, request.gpus_per_node), kind=_request_kind(asked)
    )


def _pool_and_run_s(entries: list[JournalEntry]) -> tuple[str, float] | None:
    """The pool where a job ran and for how many seconds, as its journal tells; None where that is not known."""
    pools: dict[int, str] = {}
    placed: dict[int, float] = {}
    started: dict[int, float] = {}
    for entry in entries:
        at_s = datetime.fromisoformat(entry.t).timestamp()
        if entry.kind is EntryKind.SUBMIT:
            pools[entry.ticket], placed[entry.ticket] = entry.pool, at_s
        elif entry.kind is EntryKind.STARTED:
            started[entry.ticket] = at_s
        elif entry.kind is EntryKind.ENDED and entry.ticket in pools and entry.state != "CANCELLED":
            if entry.ticket in started:
                return pools[entry.ticket], max(1.0, at_s - started[entry.ticket])
            if at_s - placed[entry.ticket] < _READ_BUDGET_S:
                return pools[entry.ticket], max(1.0, at_s - placed[entry.ticket])
    return None
