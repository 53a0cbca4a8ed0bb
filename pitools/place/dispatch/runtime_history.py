"""Predict the run times of this queue's jobs from those that ended: most jobs use far less than their time limit.

The prediction is the used share of the time limit, for jobs of the same owner and name.
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

MIN_RUNS = 3  # no prediction from fewer ended jobs of the same kind
MAX_READ = 300  # jobs read in one tick, the latest submitted: 0.1 ms each
# The run time of a job that started and ended between two ticks is taken as its time since submission, if shorter.
_MAX_UNSEEN_RUN_S = 60.0

Speed = Callable[[str], float]


class RuntimeHistory:
    """Run times of the archived jobs of a queue. speed: pool → its speed, 1.0 if unknown."""

    def __init__(self, queue_dir: Path) -> None:
        self._queue_dir = queue_dir
        self._read: set[str] = set()
        self._kinds: Counter[str] = Counter()
        self._predictor: RuntimePredictor | None = None

    def update(self, speed: Speed) -> None:
        """Read the jobs that were archived since the last call."""
        new = [name for _, name in store.archived(self._queue_dir) if name not in self._read]
        self._read.update(new)
        for path in (self._queue_dir / "done" / name for name in new[-MAX_READ:]):
            try:
                request = run_folder.read_record(path / "job.json", QueuedRequest)
                pool_run = _pool_and_run_s(read_journal(path / "journal.jsonl"))
            except (PitError, OSError):
                continue  # an unreadable job is left out
            if request and pool_run and request.request.time:
                self._add(request, pool_run[1] * speed(pool_run[0]))

    def _add(self, request: QueuedRequest, run_s: float) -> None:
        from pitools.place.policy.runtime_predictor import RuntimePredictor

        self._predictor = self._predictor or RuntimePredictor()
        self._predictor.add_run(_features(request, units.parse_duration(request.request.time)), run_s)
        self._kinds[_request_kind(request)] += 1

    def with_predicted_run(self, request: QueuedRequest, option: PlacementOption, speed: Speed) -> PlacementOption:
        """Return the option with the predicted run time, if that is shorter than the option's own."""
        if self._predictor is None or self._kinds[_request_kind(request)] < MIN_RUNS:
            return option
        pool_speed = speed(option.pool)
        features = _features(request, option.limit_s * min(1.0, pool_speed))  # slow nodes get a longer limit
        run_s = self._predictor.mean_s(features) / pool_speed
        return replace(option, run_s=run_s) if run_s < option.run_s else option


def _request_kind(queued: QueuedRequest) -> str:
    return f"{queued.owner}/{queued.request.name}"


def _features(queued: QueuedRequest, limit_s: float) -> JobFeatures:
    from pitools.place.policy.runtime_predictor import JobFeatures

    request = queued.request
    return JobFeatures(
        limit_s=max(1.0, limit_s), units=request.nodes * max(1, request.gpus_per_node), kind=_request_kind(queued)
    )


def _pool_and_run_s(entries: list[JournalEntry]) -> tuple[str, float] | None:
    """Return the pool where a job ran and its run time, from its journal; None if unknown, or if it ran in parts."""
    pools: dict[int, str] = {}
    placed: dict[int, float] = {}
    started: dict[int, float] = {}
    for entry in entries:
        at_s = datetime.fromisoformat(entry.t).timestamp()
        if entry.kind is EntryKind.SUBMIT:
            pools[entry.ticket], placed[entry.ticket] = entry.pool, at_s
        elif entry.kind is EntryKind.VOID:  # it has not run
            pools.pop(entry.ticket, None)
        elif entry.kind is EntryKind.STOPPED:
            return None
        elif entry.kind is EntryKind.STARTED:
            started[entry.ticket] = at_s
        elif entry.kind is EntryKind.ENDED and entry.ticket in pools and entry.state != "CANCELLED":
            if entry.ticket in started:
                return pools[entry.ticket], max(1.0, at_s - started[entry.ticket])
            if at_s - placed[entry.ticket] < _MAX_UNSEEN_RUN_S:
                return pools[entry.ticket], max(1.0, at_s - placed[entry.ticket])
    return None
