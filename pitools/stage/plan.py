"""Plan what `run` would copy and evict, and whether it all fits."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from pitools.core.errors import PitError, UsageError
from pitools.core.record import Record, decode_json
from pitools.stage.cache.inventory import matches_sizes
from pitools.stage.cache.layout import OBJECTS, free_bytes, free_inodes, require_safe, staged_path
from pitools.stage.cache.space import RootLimits, make_room, shortfall_within
from pitools.stage.copy.resume import MissingFiles, find_missing
from pitools.stage.request import StageRequest
from pitools.stage.resolve import PlainStore, Selection
from pitools.stage.sources.base import DatasetVersion

_PIPE = "set -o pipefail; pit-stage plan --format jsonl … | pit-stage run -"


class StagePlan(Record, frozen=True, kw_only=True, tag="pit.stage-plan/1"):
    """What `run` would do for one version; `run -` accepts it.

    state: of the version at the root now, by names and sizes. copy_bytes: without the files that other versions or an
    interrupted copy have there. free_bytes: at the root, after the plans before this one. fits: whether there is room
    within the limits quota_bytes and min_free_bytes, or will be after eviction of evict_bytes. version: "" of a plain
    store, whose version is known only after staging. arrays, steps, episodes: the selected part.
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
    quota_bytes: int | None = None
    min_free_bytes: int = 0

    @property
    def selection(self) -> Selection:
        """Return the selected part of the source."""
        return Selection(self.arrays, self.steps, self.episodes)

    @property
    def limits(self) -> RootLimits:
        """Return the limits of the root that the plan kept to."""
        return RootLimits(quota_bytes=self.quota_bytes, min_free_bytes=self.min_free_bytes)


def plan_requests(requests: Iterable[StageRequest]) -> Iterator[StagePlan]:
    """Yield the plan of each request, in order. Changes nothing. Raises ClusterError when a root is refused."""
    planned_bytes: dict[Path, int] = {}
    evicted_bytes: dict[Path, int] = {}
    kept: dict[Path, set[str]] = {}  # versions of earlier requests, which `run` leases
    for source, request_root, selection, limits in requests:
        root = request_root.absolute()
        require_safe(root)
        version, dataset = _find_staged(source, root) if isinstance(source, PlainStore) else (source.version, source)
        final = staged_path(root, version) if version else root
        present = dataset is not None and matches_sizes(final, dataset)
        missing = MissingFiles([], 0) if present else find_missing(_as_version(source), root)
        needed = 0 if present else missing.needed_bytes
        planned_before, evicted_before = planned_bytes.get(root, 0), evicted_bytes.get(root, 0)
        free = max(0, free_bytes(root) - planned_before)
        fits, evict_bytes = True, evicted_before
        if needed:
            key = _as_version(source).version
            fits, evict_bytes = _fits_limits(root, key, planned_before + needed, limits, kept.get(root, set()))
        yield StagePlan(
            dataset=source.manifest.name,
            version=version,
            source=source.source.label,
            root=str(root),
            path=str(final) if version else "",
            state="present" if present else "damaged" if version and os.path.lexists(final) else "absent",
            files=len(source.manifest.files),
            bytes=source.manifest.total_bytes,
            copy_bytes=missing.copy_bytes,
            free_bytes=free,
            fits=fits and len(missing.files) <= free_inodes(root),
            evict_bytes=max(0, evict_bytes - evicted_before),
            quota_bytes=limits.quota_bytes,
            min_free_bytes=limits.min_free_bytes,
            **selection._asdict(),
        )
        kept.setdefault(root, set()).add(version)
        planned_bytes[root], evicted_bytes[root] = planned_before + needed, max(evict_bytes, evicted_before)


def _as_version(source: DatasetVersion | PlainStore) -> DatasetVersion:
    if isinstance(source, DatasetVersion):
        return source
    return DatasetVersion(source=source.source, manifest=source.manifest, data=b"", version=source.key)


def _fits_limits(root: Path, version: str, needed: int, limits: RootLimits, kept: set[str]) -> tuple[bool, int]:
    """Return whether `needed` bytes fit within a root's limits, and how many bytes would be evicted for them, none of
    the versions `kept`.
    """
    shortfall = shortfall_within(root, version, needed, limits)
    if limits.quota_bytes is None and not shortfall({}).bytes:
        return True, 0  # without measuring the root
    if not (root / OBJECTS).is_dir():
        return shortfall({}).bytes <= 0, 0
    try:
        evictable = frozenset(path.name for path in (root / OBJECTS).iterdir()) - kept
        result = make_room(root, shortfall, except_version=version, evictable=evictable, dry_run=True)
    except PitError:  # a root of another user: only its owner may evict
        return False, 0
    return not result.missing_bytes, sum(size for _, size in result.evicted)


def _find_staged(store: PlainStore, root: Path) -> tuple[str, DatasetVersion | None]:
    from pitools.stage.plain_store import stage_store

    return stage_store.staged_version(store, root), stage_store.find_staged(store, root)


def read_plans(lines: Iterable[str]) -> list[StagePlan]:
    """Read plans from JSON Lines. Raises UsageError naming the bad line, or when there is no line."""
    plans = []
    for number, line in enumerate(lines, start=1):
        try:
            plans.append(decode_json(line, StagePlan))
        except (msgspec.DecodeError, UnicodeError) as error:
            raise UsageError(f"not a plan: {error}", where=f"stdin, line {number}", hint=_PIPE) from error
    if not plans:
        # A failed `plan` prints nothing, and the pipe's exit code is that of its last command.
        raise UsageError("no plan (expected JSON Lines of `pit-stage plan`)", where="stdin", hint=_PIPE)
    return plans
