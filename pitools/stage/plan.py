"""What `run` would do, and whether there is room for all of it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from pitools.core.errors import UsageError
from pitools.core.record import Record
from pitools.stage.root import free_bytes, needed_bytes, object_path, require_safe
from pitools.stage.source import Dataset
from pitools.stage.verify import looks_whole


class Plan(Record, frozen=True, kw_only=True, tag="pit.stage-plan/1"):
    """What `run` would do for one version; `run -` accepts it.

    state: of the version at the root now, by names and sizes. copy_bytes: 0 when it is present. free_bytes: at the
    root, what the plans before this one take already taken off. fits: whether there is room.
    """

    dataset: str
    version: str
    source: str
    root: str
    path: str
    state: Literal["absent", "present", "damaged"]
    files: int
    bytes: int
    copy_bytes: int
    free_bytes: int
    fits: bool


def plan(datasets: Iterable[Dataset], root: Path) -> Iterator[Plan]:
    """One plan a version, in order. Changes nothing. Raises ClusterError when the root is refused."""
    root = root.absolute()
    require_safe(root)
    free = free_bytes(root)
    for dataset in datasets:
        final = object_path(root, dataset.version)
        present = looks_whole(final, dataset)
        needed = 0 if present else needed_bytes(dataset.manifest.files)
        total = dataset.manifest.total_bytes
        yield Plan(
            dataset=dataset.manifest.name,
            version=dataset.version,
            source=str(dataset.folder),
            root=str(root),
            path=str(final),
            state="present" if present else "damaged" if os.path.lexists(final) else "absent",
            files=len(dataset.manifest.files),
            bytes=total,
            copy_bytes=0 if present else total,
            free_bytes=free,
            fits=needed <= free,
        )
        free = max(0, free - needed)


def read(lines: Iterable[str]) -> list[Plan]:
    """Plans from JSON Lines. Raises UsageError naming the line that is none."""
    plans = []
    for number, line in enumerate(lines, start=1):
        try:
            plans.append(msgspec.json.decode(line, type=Plan))
        except msgspec.DecodeError as error:
            raise UsageError(
                f"not a plan: {error}", where=f"stdin, line {number}", hint="pit-stage plan … | pit-stage run -"
            ) from error
    return plans
