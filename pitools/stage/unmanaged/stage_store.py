"""Stage a Zarr store that has no manifest: one is made on the way, and the copy is judged by what it says of itself.

The version is the digest of that manifest, so it is known only at the end. Until then the copy goes by a key of its
source and choice, and a copy that stands is found by what the store looked like when it was staged.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from pitools.core.errors import DataError, NoSpace, PitError, UsageError
from pitools.core.fs import os_error
from pitools.core.lock import Holder
from pitools.core.progress import Advance
from pitools.stage.cache import records
from pitools.stage.cache.disk_quota import Limits
from pitools.stage.cache.inventory import looks_whole
from pitools.stage.cache.layout import OBJECTS, locked, object_path, partial_path, prepare, require_safe, touch_lease
from pitools.stage.copy.copy import Orders, is_durable, readers_for
from pitools.stage.copy.resume import Moved, discard, fill, seal
from pitools.stage.resolve import Store, survey_again
from pitools.stage.sources import store_listing
from pitools.stage.sources.base import Dataset
from pitools.stage.sources.local import LocalSource
from pitools.stage.sources.open import load
from pitools.stage.stage import Stage, State, publish_new, record_of, telling
from pitools.stage.unmanaged import structure
from pitools.stage.verify import is_whole
from pitools.store import manifest as manifests


def stage_store(
    store: Store,
    root: Path,
    *,
    verify: bool = False,
    readers: int = 0,
    bytes_per_s: float = 0,
    timeout_s: float = 3600,
    limits: Limits | None = None,
    advance: Advance = lambda _: None,
    finished: Callable[[int], None] = lambda _: None,
    waiting: Callable[[Holder], None] = lambda _: None,
    note: Callable[[str], None] = lambda _: None,
) -> Stage:
    """Make a version of this store stand at `root`, as `run.stage` does of a dataset; safe to repeat and to race.

    A copy is taken for the store's as long as no file of the store was written, by names, sizes and times. note: is
    called with what cannot be decided, such as chunks that are not there.

    Raises DataError (it is damaged, or it changed while it was read), NoSpace, ClusterError, TryLater.
    """
    started = time.monotonic()
    root = root.absolute()
    state: State = "present"
    moved = None
    unnamed = Dataset(source=store.source, manifest=store.manifest, data=b"", version=store.key)
    readers = readers or readers_for(unnamed)

    def whole(final: Path, dataset: Dataset) -> bool:
        if verify:
            return is_whole(final, dataset, readers=readers, advance=advance)
        return looks_whole(final, dataset)

    def stands() -> Dataset | None:
        found = standing(store, root)
        if not found or not whole(object_path(root, found.version), found):
            return None
        with contextlib.suppress(OSError, PitError):  # who may only read the root cannot say that it is used
            touch_lease(root, found.version)
        return found

    require_safe(root, reading=True)
    if not (dataset := stands()):
        prepare(root)
        with locked(root, store.key, timeout_s=timeout_s, waiting=waiting) as tell:
            if not (dataset := stands()):
                inspector = _inspector(store)
                orders = Orders(
                    readers=readers,
                    bytes_per_s=bytes_per_s,
                    finished=finished,
                    inspect=inspector,
                    inspected=inspector.judged.update if inspector else lambda _: None,
                )
                moved_by = telling(tell, store.manifest.total_bytes, advance)
                try:
                    moved = fill(unnamed, root, orders, limits or Limits(), advance=moved_by)
                    _judge(store, partial_path(root, store.key), readers, note, inspector)
                    dataset = _named(unnamed, moved)
                    state = _publish(store, dataset, root, timeout_s, whole)
                except (DataError, NoSpace):
                    discard(root, store.key)
                    raise
                except OSError as error:
                    raise os_error(error, partial_path(root, store.key)) from error
    return record_of(dataset, object_path(root, dataset.version), state, moved, started, verified=verify)


def standing(store: Store, root: Path) -> Dataset | None:
    """The version that was staged of this very store, if it stands, by names and sizes."""
    if not (version := version_of(store, root)):
        return None
    folder = object_path(root, version)
    try:
        dataset = load(folder)
    except (DataError, UsageError):  # damaged, or evicted a moment ago
        return None
    return msgspec.structs.replace(dataset, source=store.source) if looks_whole(folder, dataset) else None


def version_of(store: Store, root: Path) -> str:
    """The version that was staged of this very store, whole or damaged; "" where there is none."""
    names = (folder.name for folder in (root / OBJECTS).glob("*"))
    return next((name for name in names if records.read(root, name).signature == store.key), "")


def _inspector(store: Store) -> structure.Inspector | None:
    """What judges files as they are copied; an object store's metadata cannot be read before the copy's fork."""
    local = isinstance(store.source, LocalSource)
    return structure.Inspector(store.source, store.manifest) if local else None


def _judge(
    store: Store, folder: Path, readers: int, note: Callable[[str], None], inspector: structure.Inspector | None
) -> None:
    """Refuse a copy that is damaged, or that was made while somebody wrote. Raises DataError."""
    if survey_again(store).signature != store.survey.signature:
        raise store_listing.changed(store.source.label)
    report = structure.findings(LocalSource(folder=folder), store.manifest, readers=readers, before=inspector)
    for text in structure.told(report.notes):
        note(text)
    if report.flawed:
        path, flaw = report.flawed[0]
        more = f" (and {len(report.flawed) - 1} more)" if len(report.flawed) > 1 else ""
        what = f"{flaw.problem}: {flaw.expected} expected, {flaw.got} found{more}"
        raise DataError(what, where=f"{store.source.label}/{path}", hint="the store is damaged: write it again")


def _named(unnamed: Dataset, moved: Moved) -> Dataset:
    manifest = store_listing.complete(unnamed.manifest, moved.digests)
    data = manifests.encode(manifest)
    return Dataset(source=unnamed.source, manifest=manifest, data=data, version=manifests.version(data))


def _publish(
    store: Store, dataset: Dataset, root: Path, timeout_s: float, whole: Callable[[Path, Dataset], bool]
) -> State:
    """Give the copy its version, unless another store of the same content has been staged under it and is whole."""
    final = object_path(root, dataset.version)
    state: State = "staged"
    with locked(root, dataset.version, timeout_s=timeout_s):
        new = seal(partial_path(root, store.key), dataset)
        records.write(
            root,
            dataset.version,
            source=dataset.source.label,
            n_bytes=dataset.manifest.total_bytes,
            signature=store.key,
        )
        if not os.path.lexists(final) or not whole(final, dataset):
            state = "repaired" if os.path.lexists(final) else "staged"
            publish_new(new, final, root, synced=not is_durable(dataset.manifest.files))
    discard(root, store.key)
    return state
