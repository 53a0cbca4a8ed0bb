"""Replace damaged sets from their source; quarantine those of unknown source."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from msgspec import structs

from pitools.core.errors import DataError, PitError, UsageError
from pitools.core.record import Record
from pitools.stage.cache import records
from pitools.stage.cache.evict import Eviction, quarantine_set
from pitools.stage.cache.layout import OBJECTS, staged_path
from pitools.stage.cache.space import RootLimits
from pitools.stage.resolve import PlainStore, resolve_source
from pitools.stage.sources.base import DatasetVersion
from pitools.stage.sources.find import load_version, source_of
from pitools.stage.stage import stage_version
from pitools.stage.verify import FileFinding


class RepairResult(Record, frozen=True, kw_only=True, tag="pit.stage-repair/1"):
    """The result of repairing one set. path: where it is now. reason: why it is not `repaired`, else ""."""

    dataset: str
    version: str
    path: str
    state: Literal["repaired", "quarantined", "failed"]
    source: str
    reason: str


def root_of(path: Path) -> Path:
    """Return the staging root that `path` is, or that holds the set at `path`. Raises UsageError for any other path."""
    if (path / OBJECTS).is_dir():
        return path
    if path.parent.name == OBJECTS:
        return path.parent.parent
    hint = "give a staging root, or ROOT/objects/VERSION; a source is ingested again"
    raise UsageError("only staged sets can be repaired", where=str(path), hint=hint)


def repair_set(
    root: Path,
    version: str,
    findings: Sequence[FileFinding],
    *,
    identity: tuple[int, int] | None = None,
    readers: int = 0,
    limits: RootLimits | None = None,
    on_evicted: Callable[[Eviction], None] = lambda _: None,
) -> RepairResult:
    """Stage a damaged set again; quarantine one of unknown source. Never raises PitError.

    identity: of the set when the findings were made. on_evicted: called with each eviction for room.
    """
    path, record = staged_path(root, version), records.read_stage_record(root, version)
    source = record.source

    def make_result(
        state: Literal["repaired", "quarantined", "failed"], reason: str = "", to: Path = path
    ) -> RepairResult:
        name = findings[0].dataset
        return RepairResult(dataset=name, version=version, path=str(to), state=state, source=source, reason=reason)

    options: Any = {
        "verify": True,
        "known_damaged": identity,
        "readers": readers,
        "limits": limits,
        "on_evicted": on_evicted,
    }
    if not os.path.lexists(path):
        return make_result("failed", "evicted during the check")
    if all(finding.problem == "extra" for finding in findings):
        return make_result("failed", "complete, but holds files that its manifest does not list: remove them")
    try:
        if not source:
            return make_result("quarantined", "unknown source: stage it again", quarantine_set(root, version))
        if os.path.realpath(source) == os.path.realpath(path):
            return make_result("failed", "its recorded source is the damaged set itself")
        if record.store_keys and _own_version(path, version) is None:
            from pitools.stage.plain_store.stage_store import stage_store

            stage_store(_unchanged_store(source, record.store_keys, root), root, **options)
        else:
            stage_version(_source_version(path, version, source), root, **options)
    except PitError as error:
        return make_result("failed", f"{error}; {error.hint}" if error.hint else str(error))
    return make_result("repaired")


def _source_version(path: Path, version: str, source: str) -> DatasetVersion:
    """Return the version to read from its source, by its own manifest where that is intact: only there is the manifest
    of a part of a version, or of a plain store. Raises DataError when the source now holds another version.
    """
    own_dataset, source_dataset = _own_version(path, version), _load_or_none(source)
    expected = own_dataset.manifest.subset.whole if own_dataset and own_dataset.manifest.subset else version
    if source_dataset and source_dataset.version != expected:
        if own_dataset:
            raise DataError(f"the source now holds version {source_dataset.version}")
        message = f"its manifest is damaged, and its source holds version {source_dataset.version}: it may be a part"
        raise DataError(message, hint="stage it again, with the --arrays, --steps or --episodes that were given")
    if own_dataset:
        return structs.replace(own_dataset, source=source_of(source))
    return source_dataset or load_version(source)


def _unchanged_store(source: str, store_keys: Sequence[str], root: Path) -> PlainStore:
    """Return the plain store that a set was staged from, if it is unchanged.

    Without the set's own manifest nothing else tells its content. Raises DataError when the store was rewritten.
    """
    store = resolve_source(source)
    if isinstance(store, PlainStore) and store.key in store_keys:
        return store
    hint = (
        f"stage it again, with the --arrays, --steps or --episodes that were given: pit-stage run {source} --to {root}"
    )
    raise DataError("the source was rewritten, or the set is a part of it", where=source, hint=hint)


def _own_version(path: Path, version: str) -> DatasetVersion | None:
    """Return the set by its own manifest; None when that is damaged."""
    dataset = _load_or_none(path)
    return dataset if dataset and dataset.version == version else None


def _load_or_none(location: str | Path) -> DatasetVersion | None:
    with contextlib.suppress(DataError):
        return load_version(location)
    return None
