"""Replace damaged sets from where they came from; those that cannot come back are put where nobody takes them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from msgspec import structs

from pitools.core.errors import DataError, PitError, UsageError
from pitools.core.record import Record
from pitools.stage.cache import records
from pitools.stage.cache.evict import quarantine_set
from pitools.stage.cache.layout import OBJECTS, set_path
from pitools.stage.resolve import UnmanagedStore, resolve_source
from pitools.stage.sources.base import Dataset
from pitools.stage.sources.open import load_dataset, source_of
from pitools.stage.stage import stage_version
from pitools.stage.verify import FileFinding


class RepairResult(Record, frozen=True, kw_only=True, tag="pit.stage-repair/1"):
    """What became of one damaged set. path: where it is now. reason: why it is not `repaired`, else ""."""

    dataset: str
    version: str
    path: str
    state: Literal["repaired", "quarantined", "failed"]
    source: str
    reason: str


def root_of(path: Path) -> Path:
    """Return the staging root that `path` is, or that holds the set at `path`. Raises UsageError when there is none."""
    if (path / OBJECTS).is_dir():
        return path
    if path.parent.name == OBJECTS:
        return path.parent.parent
    hint = "give a staging root, or ROOT/objects/VERSION; a source is ingested again"
    raise UsageError("only staged sets can be repaired", where=str(path), hint=hint)


def repair_set(root: Path, version: str, findings: Sequence[FileFinding], *, readers: int = 0) -> RepairResult:
    """Stage a set of which files are wrong again; one of unknown source goes to quarantine. Never raises PitError."""
    path, record = set_path(root, version), records.read_stage_record(root, version)
    source = record.source

    def say(state: Literal["repaired", "quarantined", "failed"], reason: str = "", to: Path = path) -> RepairResult:
        name = findings[0].dataset
        return RepairResult(dataset=name, version=version, path=str(to), state=state, source=source, reason=reason)

    if not os.path.lexists(path):
        return say("failed", "it is not there any more: it was evicted while it was read")
    if all(finding.problem == "extra" for finding in findings):
        return say("failed", "the set is whole, but holds files that its manifest does not name: remove them")
    try:
        if not source:
            return say(
                "quarantined", "it is not known where it came from: stage it again", quarantine_set(root, version)
            )
        if os.path.realpath(source) == os.path.realpath(path):
            return say("failed", "its source is the damaged set itself")
        if record.signature and _own_manifest(path, version) is None:
            from pitools.stage.unmanaged.stage_store import stage_store

            stage_store(_unchanged_store(source, record.signature, root), root, verify=True, readers=readers)
        else:
            stage_version(_original(path, version, source), root, verify=True, readers=readers)
    except PitError as error:
        return say("failed", f"{error}; {error.hint}" if error.hint else str(error))
    return say("repaired")


def _original(path: Path, version: str, source: str) -> Dataset:
    """The version, to be read from its source: by its own manifest where that is good, which a part of a version, or a
    store without one, has nowhere else. Raises DataError when the source holds another version by now.
    """
    own, original = _own_manifest(path, version), _loaded(source)
    expected = own.manifest.subset.parent if own and own.manifest.subset else version
    if original and original.version != expected:
        if own:
            raise DataError(f"its source holds version {original.version} now")
        message = (
            f"its own manifest is damaged, and its source holds version {original.version}, of which it may be a part"
        )
        raise DataError(message, hint="stage it again, with the --arrays, --steps or --episodes that were given")
    if own:
        return structs.replace(own, source=source_of(source))
    return original or load_dataset(source)


def _unchanged_store(source: str, signature: str, root: Path) -> UnmanagedStore:
    """Return the store without a manifest that a set was staged of, when it is as it was then.

    Without the set's own manifest nothing else says what its bytes were. Raises DataError when it was written again.
    """
    store = resolve_source(source)
    if isinstance(store, UnmanagedStore) and store.key == signature:
        return store
    hint = (
        f"stage it again, with the --arrays, --steps or --episodes that were given: pit-stage run {source} --to {root}"
    )
    raise DataError("its source was written again, or a part of it was staged", where=source, hint=hint)


def _own_manifest(path: Path, version: str) -> Dataset | None:
    """Return the set by its own manifest, None where that is damaged."""
    own = _loaded(path)
    return own if own and own.version == version else None


def _loaded(place: str | Path) -> Dataset | None:
    with contextlib.suppress(DataError):
        return load_dataset(place)
    return None
