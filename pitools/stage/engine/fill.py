"""Bring a version into its unfinished folder: what an interrupted call left, what other versions share, the rest."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pitools.core.progress import Advance
from pitools.stage.cache.root import journal_path, needed_bytes, partial_path
from pitools.stage.cache.space import Limits, reserved
from pitools.stage.engine import journal as journals
from pitools.stage.engine.copy import Orders, copy, is_durable, write_manifest
from pitools.stage.engine.journal import Journal
from pitools.stage.engine.link import link_shared
from pitools.stage.source import Dataset
from pitools.store.digest import RANGE
from pitools.store.manifest import FileEntry

# What the engine counts is a moment old.
_LATE_BYTES = 256 << 20


class Moved(NamedTuple):
    """Bytes of a new version by where they came from, and digests found for files of which none was known."""

    copied: int
    linked: int
    resumed: int
    digests: dict[int, str]


def fill(dataset: Dataset, root: Path, orders: Orders, limits: Limits, *, advance: Advance) -> Moved:
    """Make the unfinished folder of this version hold its files, verified and synced. Call with its lock held.

    Raises as `copy`, and NoSpace or TryLater when there is no room. What is done by then stays, to be gone on with.
    """
    files, version = dataset.manifest.files, dataset.version
    folder, path = partial_path(root, version), journal_path(root, version)
    folder.mkdir(mode=0o700, exist_ok=True)  # until it stands in `objects`, whose mode says who may read
    done = journals.read(path, folder, version, files)
    if not done.files and not done.ranges:  # what is there is not known to be good
        shutil.rmtree(folder)
        folder.mkdir(mode=0o700)
    linked = link_shared(dataset, root, folder, set(done.files))
    for index in (*done.files, *linked):
        orders.finished(index)
    left = [entry for index, entry in enumerate(files) if index not in done.files and index not in linked]
    shared = sum(files[index].bytes for index in linked)
    resumed = sum(files[index].bytes for index in done.files)
    in_flight = _LATE_BYTES + orders.readers * _largest(left)
    with reserved(root, version, needed_bytes(left), limits, in_flight=in_flight) as used:

        def moved(count: int) -> None:
            used(count)
            advance(count)

        advance(shared + resumed)
        journal = Journal(path, version, durable=is_durable(files), keep=bool(done.files or done.ranges))
        try:
            digests = copy(dataset, folder, done, journal, orders, linked=linked, advance=moved)
        finally:
            journal.close()
    return Moved(sum(entry.bytes for entry in left), shared, resumed, digests)


def seal(folder: Path, dataset: Dataset) -> Path:
    """Write the manifest, the last file of a version, into its unfinished folder, which may then be published."""
    write_manifest(folder, dataset.data)
    folder.chmod(0o755)
    return folder


def discard(root: Path, version: str) -> None:
    """Remove an unfinished copy, the journal first: what it says must never be more than what is there."""
    journal_path(root, version).unlink(missing_ok=True)
    shutil.rmtree(partial_path(root, version), ignore_errors=True)


def _largest(files: Sequence[FileEntry]) -> int:
    """The most bytes that a worker gives to one file before it has written them."""
    return max((min(entry.bytes, RANGE) for entry in files), default=0)
