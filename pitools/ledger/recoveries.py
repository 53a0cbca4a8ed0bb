"""How long a run took to go on: from the end of an attempt that failed until the ranks of the next one begin."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pitools.core.timestamps import rfc3339_to_unix
from pitools.ledger.evidence import possible_times
from pitools.run import run_folder
from pitools.run.attempt_records import SUCCEEDED, Cause, Decision
from pitools.run.run_folder import AttemptExit, RankRecord


class Recovery(NamedTuple):
    """How a run went on after an attempt. kind: the cause's, "unknown" without one. began_s: when rank 0 of the next
    attempt began, Unix time. took_s: from the attempt's end until then; None if that is unknown."""

    attempt: str
    kind: str
    began_s: float
    took_s: float | None


def read_recoveries(run_dir: Path, attempts: Sequence[Path] | None = None) -> list[Recovery]:
    """Return the recoveries of a run, of an array's tasks each by itself; an attempt that succeeded needs none.

    Killed with its node an attempt has no exit.json: then it ended with the last step that was logged. Times before the
    run's submission, and after the present, are unknown. attempts: their folders, oldest first; all by default.
    """
    since, until = possible_times(run_dir, time.time())

    def known(moment: float | None) -> float | None:
        return moment if moment is not None and since <= moment <= until else None

    last: dict[str, Path] = {}
    recoveries = []
    for following in run_folder.attempt_dirs(run_dir) if attempts is None else attempts:
        task = following.name.rpartition(".")[0]
        attempt, last[task] = last.get(task), following
        rank = run_folder.read_or_none(following / "ranks" / "0.json", RankRecord)
        began_s = known(rfc3339_to_unix(rank.t) or newest_s(following / "ranks", "0.json")) if rank else None
        if attempt is None or began_s is None:
            continue
        record = run_folder.read_or_none(attempt / "decision.json", Decision)
        cause = record or run_folder.read_or_none(attempt / "cause.json", Cause)
        if cause and cause.kind == SUCCEEDED:
            continue
        ended = run_folder.read_or_none(attempt / "exit.json", AttemptExit)
        ended_s = known(rfc3339_to_unix(ended.ended) if ended else newest_s(attempt / "steps", "*.jsonl"))
        took_s = None if ended_s is None else max(0.0, began_s - ended_s)
        kind = cause.kind if cause else "unknown"
        recoveries.append(Recovery(attempt.name, kind, began_s, took_s))
    return recoveries


def newest_s(folder: Path, pattern: str) -> float:
    """Return when the newest of the files that are not empty was written, Unix time; 0 without one."""
    newest = 0.0
    for path in folder.glob(pattern):
        with contextlib.suppress(OSError):
            status = path.stat()
            newest = max(newest, status.st_mtime if status.st_size else 0.0)
    return newest
