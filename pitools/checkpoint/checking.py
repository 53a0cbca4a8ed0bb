"""A whole folder of checkpoints judged, for people."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from pitools.checkpoint import find, layout, quarantine
from pitools.checkpoint.manifest import load
from pitools.checkpoint.problem import Problem
from pitools.checkpoint.verify import check as check_one
from pitools.core.errors import DataError
from pitools.core.progress import bar
from pitools.core.record import Record

# About a second's reading.
_WORTH_A_BAR = 1 << 30


class Check(Record, frozen=True, kw_only=True, tag="pit.checkpoint-check/1"):
    """What a check went through. bytes: as the manifests name them. good: the newest without findings, None for none.

    quarantined: how many were moved aside.
    """

    path: str
    checkpoints: int
    bytes: int
    findings: int
    quarantined: int
    good: int | None
    wall_s: float


def check(folder: Path, steps: Sequence[int], *, threads: int = 0, aside: bool = False) -> Iterator[Problem | Check]:
    """The findings of each checkpoint, newest first (a bar for each large one, on a terminal), then one Check.

    aside: move those with findings to the quarantine. Raises NoSpace, ClusterError.
    """
    started, n_bytes, findings, moved = time.monotonic(), 0, 0, 0
    good: int | None = None
    for step in sorted(steps, reverse=True):
        path = layout.step_path(folder, step)
        size = _bytes(path)
        with bar(path.name, size, quiet=size < _WORTH_A_BAR) as advance:
            problems = check_one(path, threads=threads, advance=advance)
        yield from problems
        n_bytes, findings = n_bytes + size, findings + len(problems)
        if not problems and good is None:
            good = step
        if problems and aside:
            moved += quarantine.put(path, problems) is not None
    yield Check(
        path=str(folder.absolute()), checkpoints=len(steps), bytes=n_bytes, findings=findings, quarantined=moved,
        good=good, wall_s=round(time.monotonic() - started, 3),
    )  # fmt: skip


def newest_good(folder: Path) -> int | None:
    """Steps of the newest checkpoint whose every byte is as it was saved; None for none. Raises ClusterError."""
    for step in find.whole(folder):
        path = layout.step_path(folder, step)
        size = _bytes(path)
        with bar(path.name, size, quiet=size < _WORTH_A_BAR) as advance:
            if not check_one(path, advance=advance):
                return step
    return None


def _bytes(step_dir: Path) -> int:
    try:
        return load(step_dir).total_bytes
    except DataError:
        return 0
