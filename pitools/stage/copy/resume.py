"""Bring a version into its unfinished folder: what an interrupted call left, what other versions share, the rest."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence, Set
from pathlib import Path
from typing import NamedTuple

from pitools.core.fs import remove_tree
from pitools.core.progress import Advance
from pitools.stage.cache.disk_quota import QuotaLimits, reserve
from pitools.stage.cache.layout import journal_path, needed_bytes, partial_path
from pitools.stage.copy import journal as journals
from pitools.stage.copy.copy import CopyOptions, copies_by_ranges, copy_files, is_durable, write_file
from pitools.stage.copy.hardlink import link_shared
from pitools.stage.copy.journal import CopyJournal, FinishedFiles
from pitools.stage.copy.worker import digest_error
from pitools.stage.sources.base import Dataset
from pitools.store.digest import RANGE_BYTES, digest_bytes
from pitools.store.manifest import FILE_NAME, FileEntry

# What the engine counts is a moment old.
_LATE_WRITE_BYTES = 256 << 20


class CopyTotals(NamedTuple):
    """Bytes of a new version by where they came from, and digests found for files of which none was known."""

    copied_bytes: int
    linked_bytes: int
    resumed_bytes: int
    digests: dict[int, str]


def fill_partial(
    dataset: Dataset, root: Path, options: CopyOptions, limits: QuotaLimits, *, advance: Advance, link: bool = True
) -> CopyTotals:
    """Make the unfinished folder of this version hold its files, verified and synced. Call with its lock held.

    link: take files that other versions share as they are; else all is read, as it must be to replace what is damaged.
    Raises as `copy_files`, and NoSpace or TryLater when there is no room. What is done by then stays, to be resumed.
    """
    files, version = dataset.manifest.files, dataset.version
    folder, path = partial_path(root, version), journal_path(root, version)
    folder.mkdir(mode=0o700, exist_ok=True)  # until it stands in `objects`, whose mode says who may read
    done = journals.read_journal(path, folder, version, files)
    fresh = not done.files and not done.ranges
    if fresh:  # what is there is not known to be good
        remove_tree(folder)
        folder.mkdir(mode=0o700)
    if not copies_by_ranges(dataset.source, folder, options):
        done.ranges.clear()
    linked = link_shared(dataset, root, folder, set(done.files)) if link else set()
    if not fresh:
        _remove_stale(folder, files, done, linked)
    for index in (*done.files, *linked):
        options.on_file(index)
    missing = [entry for index, entry in enumerate(files) if index not in done.files and index not in linked]
    shared = sum(files[index].bytes for index in linked)
    known_bytes = _known_range_bytes(files, done)
    resumed = sum(files[index].bytes for index in done.files)
    in_flight = _LATE_WRITE_BYTES + options.readers * _largest_buffered(missing)
    with reserve(root, version, needed_bytes(missing) - known_bytes, limits, in_flight=in_flight) as used:

        def count_bytes(count: int) -> None:
            used(count)
            advance(count)

        advance(shared + resumed + known_bytes)
        own = _write_own(dataset, folder, skip=done.files.keys() | linked)
        count_bytes(sum(files[index].bytes for index in own))
        for index in own:
            options.on_file(index)
        journal = CopyJournal(path, version, durable=is_durable(files), append=bool(done.files or done.ranges))
        try:
            digests = copy_files(dataset, folder, done, journal, options, linked=linked | own, advance=count_bytes)
        finally:
            journal.close()
    return CopyTotals(sum(entry.bytes for entry in missing) - known_bytes, shared, resumed + known_bytes, digests)


def _known_range_bytes(files: Sequence[FileEntry], done: FinishedFiles) -> int:
    """Sum the bytes of known ranges."""
    return sum(
        min(RANGE_BYTES, files[index].bytes - number * RANGE_BYTES)
        for index, ranges in done.ranges.items()
        for number in ranges
    )


def _write_own(dataset: Dataset, folder: Path, *, skip: Set[int]) -> set[int]:
    """Write the files of a part whose content is in its manifest; their places there. Raises DataError, NoSpace."""
    own = dataset.manifest.subset.own_files if dataset.manifest.subset else {}
    written = set()
    for index, entry in enumerate(dataset.manifest.files if own else ()):
        if index in skip or (data := own.get(entry.path)) is None:
            continue
        if len(data) != entry.bytes or digest_bytes(data) != entry.digest:
            raise digest_error(entry, digest_bytes(data), f"{FILE_NAME}: {entry.path}")
        write_file(folder, entry.path, data)
        written.add(index)
    return written


def _remove_stale(folder: Path, files: Sequence[FileEntry], done: FinishedFiles, linked: set[int]) -> None:
    """Take away what an earlier call began and nobody can go on with; open to writing what is gone on with."""
    for index, entry in enumerate(files):
        if index in done.files:
            continue
        if index in linked:
            done.ranges.pop(index, None)
            continue
        path = f"{folder}/{entry.path}"
        try:
            status = os.stat(path, follow_symlinks=False)  # noqa: PTH116 - a hundred thousand of them
        except OSError:
            done.ranges.pop(index, None)
            continue
        # A file with another name is another version's too, which is never written to.
        if index in done.ranges and stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
            os.chmod(path, 0o600)  # noqa: PTH101
        else:
            done.ranges.pop(index, None)
            os.unlink(path)  # noqa: PTH108


def write_manifest_last(folder: Path, dataset: Dataset) -> Path:
    """Write the manifest, the last file of a version, into its unfinished folder, which may then be published."""
    write_file(folder, FILE_NAME, dataset.data)
    folder.chmod(0o755)
    return folder


def discard_partial(root: Path, version: str) -> None:
    """Remove an unfinished copy, the journal first: what it says must never be more than what is there."""
    journal_path(root, version).unlink(missing_ok=True)
    remove_tree(partial_path(root, version))


def _largest_buffered(files: Sequence[FileEntry]) -> int:
    """Return the most bytes a worker allocates to one file before they are written."""
    return max((min(entry.bytes, RANGE_BYTES) for entry in files), default=0)
