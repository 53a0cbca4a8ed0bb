"""Stage a Zarr store without a manifest: make one while copying, and verify the copy by its own metadata and checksums.

The version is the digest of that manifest, so it is known only at the end. Until then the copy is named by a key over
source, listing and selection; a staged copy is found by the keys in its record.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from pitools.core.errors import DataError, PitError, UsageError
from pitools.core.fs import from_os_error
from pitools.core.locks import LockOwner
from pitools.core.progress import Advance
from pitools.stage.cache import records
from pitools.stage.cache.evict import Eviction
from pitools.stage.cache.inventory import matches_sizes
from pitools.stage.cache.layout import (
    OBJECTS,
    create_root,
    partial_path,
    require_safe,
    staged_path,
    version_lock,
)
from pitools.stage.cache.space import RootLimits
from pitools.stage.copy.copy import CopyOptions, readers_for, syncs_each_file
from pitools.stage.copy.resume import (
    CopyTotals,
    discard_empty_partial,
    discard_partial,
    fill_partial,
    write_manifest_last,
)
from pitools.stage.plain_store import structure
from pitools.stage.resolve import PlainStore, relist
from pitools.stage.sources import store_listing
from pitools.stage.sources.base import DatasetVersion
from pitools.stage.sources.find import load_version
from pitools.stage.sources.local import LocalSource
from pitools.stage.stage import StageResult, StageState, make_result, presence_check, publish_new, reporting_advance
from pitools.store import manifest as manifests


def stage_store(
    store: PlainStore,
    root: Path,
    *,
    verify: bool = False,
    known_damaged: tuple[int, int] | None = None,
    readers: int = 0,
    bytes_per_s: float = 0,
    timeout_s: float = 3600,
    limits: RootLimits | None = None,
    advance: Advance = lambda _: None,
    on_file: Callable[[int], None] = lambda _: None,
    on_wait: Callable[[LockOwner], None] = lambda _: None,
    on_evicted: Callable[[Eviction], None] = lambda _: None,
    warn: Callable[[str], None] = lambda _: None,
) -> StageResult:
    """Stage this store to `root`, as `stage_version` stages a dataset version. Safe to repeat and to run concurrently.

    A staged copy is current while no file of the store has changed, by name, size and time. warn: called with notes,
    such as the number of missing chunks.

    Raises DataError (damaged, or changed during the copy), NoSpace, ClusterError, TryLater.
    """
    started = time.monotonic()
    root = root.absolute()
    state: StageState = "present"
    totals = None
    undigested = DatasetVersion(source=store.source, manifest=store.manifest, data=b"", version=store.key)
    readers = readers or readers_for(undigested)
    is_complete = presence_check(known_damaged, verify=verify, readers=readers, advance=advance)

    def find_complete() -> DatasetVersion | None:
        staged = find_staged(store, root)
        return staged if staged and is_complete(staged_path(root, staged.version), staged) else None

    require_safe(root, reading=True)
    if not (dataset := find_complete()):
        create_root(root)
        with version_lock(root, store.key, timeout_s=timeout_s, on_wait=on_wait) as report_progress:
            if not (dataset := find_complete()):
                checker = _make_checker(store)
                options = CopyOptions(
                    readers=readers,
                    bytes_per_s=bytes_per_s,
                    on_file=on_file,
                    on_evicted=on_evicted,
                    inspect=checker,
                    on_inspected=checker.results.update if checker else lambda _: None,
                )
                report_advance = reporting_advance(report_progress, store.manifest.total_bytes, advance)
                try:
                    totals = fill_partial(undigested, root, options, limits or RootLimits(), advance=report_advance)
                    _verify_copy(store, partial_path(root, store.key), readers, warn, checker)
                    dataset = _with_digests(undigested, totals)
                    state = _publish(store, dataset, root, timeout_s, is_complete)
                except DataError:  # a store that is mended gets another key
                    discard_partial(root, store.key)
                    raise
                except PitError:
                    discard_empty_partial(root, store.key)
                    raise
                except OSError as error:
                    raise from_os_error(error, partial_path(root, store.key)) from error
    return make_result(dataset, staged_path(root, dataset.version), state, totals, started, verified=verify)


def find_staged(store: PlainStore, root: Path) -> DatasetVersion | None:
    """Return the version staged from this store, if complete by names and sizes."""
    if not (version := staged_version(store, root)):
        return None
    folder = staged_path(root, version)
    try:
        dataset = load_version(folder)
    except (DataError, UsageError):  # damaged, or evicted a moment ago
        return None
    return msgspec.structs.replace(dataset, source=store.source) if matches_sizes(folder, dataset) else None


def staged_version(store: PlainStore, root: Path) -> str:
    """Return the version staged from this store, complete or damaged; "" if there is none."""
    names = (folder.name for folder in (root / OBJECTS).glob("*"))
    return next((name for name in names if store.key in records.read_stage_record(root, name).store_keys), "")


def _make_checker(store: PlainStore) -> structure.StructureChecker | None:
    """Return the checker for files being copied; None for an object store, which must not be read before the fork."""
    local = isinstance(store.source, LocalSource)
    return structure.StructureChecker(store.source, store.manifest) if local else None


def _verify_copy(
    store: PlainStore,
    folder: Path,
    readers: int,
    warn: Callable[[str], None],
    checker: structure.StructureChecker | None,
) -> None:
    """Raise DataError if the copy is damaged or the store has changed meanwhile."""
    if relist(store).signature != store.listing.signature:
        raise store_listing.changed_error(store.source.label)
    report = structure.check_structure(LocalSource(folder=folder), store.manifest, readers=readers, inspected=checker)
    for text in structure.format_notes(report.notes):
        warn(text)
    if report.defects:
        path, defect = report.defects[0]
        more = f" (and {len(report.defects) - 1} more)" if len(report.defects) > 1 else ""
        message = f"{defect.kind} (expected {defect.expected}, got {defect.got}){more}"
        raise DataError(message, where=f"{store.source.label}/{path}", hint="the store is damaged: write it again")


def _with_digests(undigested: DatasetVersion, totals: CopyTotals) -> DatasetVersion:
    manifest = store_listing.with_digests(undigested.manifest, totals.digests)
    data = manifests.encode_manifest(manifest)
    return DatasetVersion(source=undigested.source, manifest=manifest, data=data, version=manifests.version_of(data))


def _publish(
    store: PlainStore,
    dataset: DatasetVersion,
    root: Path,
    timeout_s: float,
    is_complete: Callable[[Path, DatasetVersion], bool],
) -> StageState:
    """Publish the copy as its version, unless a complete set of another store with the same content is there."""
    final = staged_path(root, dataset.version)
    state: StageState = "staged"
    with version_lock(root, dataset.version, timeout_s=timeout_s):
        new = write_manifest_last(partial_path(root, store.key), dataset)
        records.write_stage_record(
            root,
            dataset.version,
            source=dataset.source.label,
            n_bytes=dataset.manifest.total_bytes,
            store_key=store.key,
        )
        if not os.path.lexists(final) or not is_complete(final, dataset):
            state = "repaired" if os.path.lexists(final) else "staged"
            synced = not syncs_each_file(dataset.manifest.files)
            publish_new(new, final, root, synced=synced, replace=state == "repaired")
    discard_partial(root, store.key)
    return state
