"""What a run's folder says of its attempts: when, where, why they ended, what they staged."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from pitools.core.html_page import table
from pitools.core.timestamps import rfc3339_to_unix
from pitools.core.units import format_duration, format_size
from pitools.ledger.evidence import possible_times
from pitools.ledger.recoveries import Recovery, read_recoveries
from pitools.monitor.report.svg import Part
from pitools.run import run_folder
from pitools.run.attempt_records import SUCCEEDED, AttemptStart, Cause, Decision
from pitools.stage.stage import StageResult

COLOURS = {
    "goes on": "#56B4E9",
    SUCCEEDED: "#009E73",
    "stopped by Slurm or a person": "#E69F00",
    "failed": "#D55E00",
}
_STOPPED = ("preempted", "time-limit", "cancelled")


class Staged(NamedTuple):
    """The staging of a dataset on a node. at: when it ended, Unix time."""

    at: float
    result: StageResult


class Attempt(NamedTuple):
    """An attempt. Times: RFC 3339. started, ended: "" if unknown. over: by when it had ended; "" if it goes on."""

    name: str
    started: str
    ended: str
    over: str
    job_id: str
    node_list: str
    saved_steps: int
    cause: Cause | None
    decision: Decision | None
    staged: tuple[Staged, ...]
    recovery: Recovery | None

    @property
    def outcome(self) -> str:
        """A key of COLOURS."""
        if not self.over and not self.cause:
            return "goes on"
        kind = self.cause.kind if self.cause else "unknown"
        return kind if kind == SUCCEEDED else "stopped by Slurm or a person" if kind in _STOPPED else "failed"


def read_attempts(run_dir: Path) -> list[Attempt]:
    """Return the attempts of a run, oldest first, of an array by task; of records that are damaged, nothing.

    Killed with its node, it has no end: it was over at its time limit, or when the next began. Times before the run's
    submission, and after the present, are unknown. Raises OSError.
    """
    attempts, (since, until) = [], possible_times(run_dir, time.time())

    def known(moment: str) -> str:
        return moment if since <= (rfc3339_to_unix(moment) or math.inf) <= until else ""

    recoveries = {recovery.attempt: recovery for recovery in read_recoveries(run_dir)}
    for path in run_folder.attempt_dirs(run_dir):
        start = run_folder.read_or_none(path / "start.json", AttemptStart)
        ended = run_folder.read_or_none(path / "exit.json", run_folder.AttemptExit)
        attempts.append(
            Attempt(
                name=path.name,
                started=known(start.started) if start else "",
                ended=known(ended.ended) if ended else "",
                over=known(ended.ended if ended else start.time_limit_at if start else ""),
                job_id=start.job_id if start else "",
                node_list=start.node_list if start else "",
                saved_steps=start.saved_steps if start else 0,
                cause=run_folder.read_or_none(path / "cause.json", Cause),
                decision=run_folder.read_or_none(path / "decision.json", Decision),
                staged=tuple(_read_staged(path)),
                recovery=recoveries.get(path.name),
            )
        )
    return [
        one._replace(over=min(one.over or following.started, following.started))
        if following and following.started and not one.ended
        else one
        for one, following in with_following(attempts)
    ]


def with_following(attempts: Sequence[Attempt]) -> Iterator[tuple[Attempt, Attempt | None]]:
    """Yield each attempt with the one that followed it; of an array, in the same task."""
    for one, following in zip(attempts, [*attempts, None][1:], strict=True):
        is_same_task = following and following.name.rpartition(".")[0] == one.name.rpartition(".")[0]
        yield one, following if is_same_task else None


def _read_staged(attempt: Path) -> Iterator[Staged]:
    for path in sorted((attempt / "nodes").glob("*/*.json")):
        with contextlib.suppress(OSError):
            if result := run_folder.read_or_none(path, StageResult):
                yield Staged(path.stat().st_mtime, result)


def attempt_parts(attempts: Sequence[Attempt], now_s: float) -> dict[str, Part]:
    """Return the attempts by name, as parts of a line of time; each lasts until it was over."""
    parts = {}
    for attempt in attempts:
        if not attempt.started:
            continue
        begin, end = (rfc3339_to_unix(t) or now_s for t in (attempt.started, attempt.over))
        why = f": {attempt.cause.kind}: {attempt.cause.reason}" if attempt.cause else ""
        tip = f"attempt {attempt.name}, job {attempt.job_id}, {attempt.node_list}, {format_duration(end - begin)}{why}"
        parts[attempt.name] = Part(begin, max(begin, end), COLOURS[attempt.outcome], tip)
    return parts


def staging_table(staged: Sequence[Staged]) -> str:
    """Return a line a dataset: how often it was there, and what was read, and how long the slowest node took."""
    by_dataset: dict[str, list[StageResult]] = {}
    for each in staged:
        by_dataset.setdefault(f"{each.result.dataset} {each.result.version}", []).append(each.result)
    heads = ("dataset", "nodes", "present", "staged", "repaired", "from the source", "from other nodes", "slowest")
    states = ("present", "staged", "repaired")
    return table(heads, [
        (
            name, len(results), *(sum(one.state == state for one in results) for state in states),
            format_size(sum(one.copied_bytes for one in results)), format_size(sum(one.peer_bytes for one in results)),
            format_duration(max(one.wall_s for one in results)),
        )
        for name, results in sorted(by_dataset.items())
    ])  # fmt: skip
