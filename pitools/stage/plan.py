"""What `run` would do, and whether there is room for all of it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from pitools.core.errors import UsageError
from pitools.core.record import Record
from pitools.stage.cache.root import free_bytes, needed_bytes, object_path, require_safe
from pitools.stage.choose import Choice, Store
from pitools.stage.source import Dataset
from pitools.stage.verify import looks_whole


class Work(NamedTuple):
    """A version or store, the root to stage it to, and the part of the source that it is."""

    what: Dataset | Store
    root: Path
    choice: Choice = Choice()


class Plan(Record, frozen=True, kw_only=True, tag="pit.stage-plan/1"):
    """What `run` would do for one version; `run -` accepts it.

    state: of the version at the root now, by names and sizes. copy_bytes: 0 when it is present. free_bytes: at the
    root, what the plans before this one take already taken off. fits: whether there is room. version: "" of a store
    without a manifest, which has none before it is staged. arrays, steps, episodes: the part of the source.
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
    arrays: tuple[str, ...] = ()
    steps: str = ""
    episodes: str = ""

    @property
    def choice(self) -> Choice:
        """The part of the source that is meant."""
        return Choice(self.arrays, self.steps, self.episodes)


def plan(work: Iterable[Work]) -> Iterator[Plan]:
    """One plan for each piece of work, in order. Changes nothing. Raises ClusterError when a root is refused."""
    taken: dict[Path, int] = {}
    for what, to, choice in work:
        root = to.absolute()
        require_safe(root)
        found = _standing(what, root) if isinstance(what, Store) else what
        version = found.version if found else ""
        final = object_path(root, version) if version else root
        present = found is not None and looks_whole(final, found)
        needed = 0 if present else needed_bytes(what.manifest.files)
        free = max(0, free_bytes(root) - taken.get(root, 0))
        total = what.manifest.total_bytes
        yield Plan(
            dataset=what.manifest.name,
            version=version,
            source=what.source.label,
            root=str(root),
            path=str(final) if version else "",
            state="present" if present else "damaged" if version and os.path.lexists(final) else "absent",
            files=len(what.manifest.files),
            bytes=total,
            copy_bytes=0 if present else total,
            free_bytes=free,
            fits=needed <= free,
            **choice._asdict(),
        )
        taken[root] = taken.get(root, 0) + needed


def _standing(store: Store, root: Path) -> Dataset | None:
    from pitools.stage.plain.run import standing

    return standing(store, root)


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
