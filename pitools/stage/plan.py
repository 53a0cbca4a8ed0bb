"""What `run` would do, and whether there is room for all of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from pitools.core.errors import PitError, UsageError
from pitools.core.record import Record, decode_json
from pitools.stage.cache.inventory import looks_whole
from pitools.stage.cache.layout import OBJECTS, free_bytes, needed_bytes, object_path, require_safe
from pitools.stage.resolve import EVERYTHING, Choice, Store, resolve
from pitools.stage.sources.base import Dataset
from pitools.stage.sources.local import LocalSource

if TYPE_CHECKING:
    from pitools.stage.cache.disk_quota import Lack, Limits, Usages

_PIPE = "set -o pipefail; pit-stage plan --format jsonl … | pit-stage run -"


class Work(NamedTuple):
    """A version or store, the root to stage it to, and the part of the source that it is."""

    what: Dataset | Store
    root: Path
    choice: Choice = EVERYTHING


def work(
    place: str | Path, root: Path, choice: Choice = EVERYTHING, note: Callable[[str], None] = lambda _: None
) -> Work:
    """What a user means, and where to. Raises as `resolve`, and UsageError for a root inside what is to be staged."""
    what = resolve(place, choice, note)
    if isinstance(what.source, LocalSource):
        source = os.path.realpath(what.source.folder)
        if os.path.commonpath([source, os.path.realpath(root)]) == source:
            hint = "name a folder of the node's own disk, such as /nvme/{user}/pit"
            raise UsageError(f"{root} is inside what is to be staged, {source}", where="--to", hint=hint)
    return Work(what, root, choice)


class Plan(Record, frozen=True, kw_only=True, tag="pit.stage-plan/1"):
    """What `run` would do for one version; `run -` accepts it.

    state: of the version at the root now, by names and sizes. copy_bytes: 0 when it is present. free_bytes: at the
    root, what the plans before this one take already taken off. fits: whether there is room, or will be when
    evict_bytes of other sets have gone. version: "" of a store without a manifest, which has none before it is staged.
    arrays, steps, episodes: the part of the source.
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
    evict_bytes: int = 0

    @property
    def choice(self) -> Choice:
        """The part of the source that is meant."""
        return Choice(self.arrays, self.steps, self.episodes)


def plan(work: Iterable[Work], limits: Limits | None = None) -> Iterator[Plan]:
    """One plan for each piece of work, in order. Changes nothing. Raises ClusterError when a root is refused."""
    taken: dict[Path, int] = {}
    evicted: dict[Path, int] = {}
    for what, to, choice in work:
        root = to.absolute()
        require_safe(root)
        version, found = _standing(what, root) if isinstance(what, Store) else (what.version, what)
        final = object_path(root, version) if version else root
        present = found is not None and looks_whole(final, found)
        needed = 0 if present else needed_bytes(what.manifest.files)
        before, gone = taken.get(root, 0), evicted.get(root, 0)
        free = max(0, free_bytes(root) - before)
        fits, evict = _fits(root, before + needed, limits, what) if needed else (True, gone)
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
            fits=fits,
            evict_bytes=max(0, evict - gone),
            **choice._asdict(),
        )
        taken[root], evicted[root] = before + needed, max(evict, gone)


def _fits(root: Path, needed: int, limits: Limits | None, what: Dataset | Store) -> tuple[bool, int]:
    """Whether so many bytes go to a root within its limits, and how many of other sets would be evicted for them."""
    from pitools.stage.cache import disk_quota, inventory

    limits = limits or disk_quota.Limits()
    disk = needed + limits.min_free_bytes - free_bytes(root)

    def lack(usages: Usages) -> Lack:
        quota = limits.quota_bytes
        return disk_quota.Lack(0 if quota is None else inventory.total(usages.values()) + needed - quota, disk)

    if limits.quota_bytes is None and disk <= 0:
        return True, 0  # without a look at every file of the root
    if not (root / OBJECTS).is_dir():
        return lack({}).bytes <= 0, 0
    try:
        sparing = what.key if isinstance(what, Store) else what.version
        done = disk_quota.make_room(root, lack, sparing=sparing, dry_run=True)
    except PitError:  # a root of another user, who alone may evict there
        return False, 0
    return not done.missing, sum(size for _, size in done.gone)


def _standing(store: Store, root: Path) -> tuple[str, Dataset | None]:
    from pitools.stage.unmanaged import stage_store

    return stage_store.version_of(store, root), stage_store.standing(store, root)


def read(lines: Iterable[str]) -> list[Plan]:
    """Plans from JSON Lines, one at least. Raises UsageError naming the line that is none."""
    plans = []
    for number, line in enumerate(lines, start=1):
        try:
            plans.append(decode_json(line, Plan))
        except (msgspec.DecodeError, UnicodeError) as error:
            raise UsageError(f"not a plan: {error}", where=f"stdin, line {number}", hint=_PIPE) from error
    if not plans:
        # A `plan` that failed says nothing, and the shell takes the last command's exit code for the pipe's.
        raise UsageError("no plan: `plan` failed, or was not asked", where="stdin", hint=_PIPE)
    return plans
