"""Fill a version's partial folder: keep an interrupted call's files, link those of other versions, copy the rest."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Mapping, Sequence, Set
from pathlib import Path
from typing import NamedTuple

from pitools.core.errors import NoSpace
from pitools.core.fs import remove_tree
from pitools.core.progress import Advance
from pitools.stage.cache.layout import free_inodes, journal_path, needed_bytes, partial_path
from pitools.stage.cache.space import RootLimits, reserve
from pitools.stage.copy import journal as journals
from pitools.stage.copy.copy import CopyOptions, copies_by_ranges, copy_files, syncs_each_file, write_file
from pitools.stage.copy.hardlink import find_shared, link_shared
from pitools.stage.copy.journal import CopyJournal, FinishedFiles
from pitools.stage.copy.worker import digest_error
from pitools.stage.sources.base import DatasetVersion
from pitools.store.digest import RANGE_BYTES, digest_bytes
from pitools.store.manifest import MANIFEST_FILE, FileEntry

# The workers' counters are read with a delay.
_LATE_WRITE_BYTES = 256 << 20


class CopyTotals(NamedTuple):
    """Bytes of a new version by origin, and digests of files for which the manifest had none."""

    copied_bytes: int
    linked_bytes: int
    resumed_bytes: int
    digests: dict[int, str]


class MissingFiles(NamedTuple):
    """The files of a version still to be copied. range_bytes: of these, written by an interrupted copy."""

    files: list[FileEntry]
    range_bytes: int

    @property
    def copy_bytes(self) -> int:
        """Return the bytes to copy."""
        return sum(entry.bytes for entry in self.files) - self.range_bytes

    @property
    def needed_bytes(self) -> int:
        """Return the bytes to be written to the disk."""
        return needed_bytes(self.files) - self.range_bytes


def find_missing(dataset: DatasetVersion, root: Path) -> MissingFiles:
    """Return what `fill_partial` would copy. Changes nothing."""
    files, version = dataset.manifest.files, dataset.version
    folder = partial_path(root, version)
    finished = journals.read_journal(journal_path(root, version), folder, version, files)
    if finished.ranges and not copies_by_ranges(dataset.source, folder, CopyOptions(readers=1)):
        finished.ranges.clear()
    for index in [index for index in finished.ranges if not os.path.lexists(f"{folder}/{files[index].path}")]:
        del finished.ranges[index]
    present = finished.files.keys() | find_shared(dataset, root, set(finished.files)).keys()
    for index in present & finished.ranges.keys():
        del finished.ranges[index]
    missing = [entry for index, entry in enumerate(files) if index not in present]
    return MissingFiles(missing, written_range_bytes(files, finished.ranges))


def fill_partial(
    dataset: DatasetVersion,
    root: Path,
    options: CopyOptions,
    limits: RootLimits,
    *,
    advance: Advance,
    link: bool = True,
) -> CopyTotals:
    """Fill the partial folder of this version with its files, verified and synced. Call with its lock held.

    link: hard-link files of other versions; else all is read, as needed to replace damaged sets. Raises as
    `copy_files`, and NoSpace or TryLater when there is no room. Finished files are kept, to be resumed.
    """
    files, version = dataset.manifest.files, dataset.version
    folder, path = partial_path(root, version), journal_path(root, version)
    folder.mkdir(mode=0o700, exist_ok=True)  # `objects` then decides on access
    finished = journals.read_journal(path, folder, version, files)
    is_new, listed = not finished.files and not finished.ranges, set(finished.ranges)
    if is_new:  # files without a journal are not verified
        remove_tree(folder)
        folder.mkdir(mode=0o700)
    if not copies_by_ranges(dataset.source, folder, options):
        finished.ranges.clear()
    linked = link_shared(dataset, root, folder, set(finished.files)) if link else set()
    if not is_new:
        remove_stale(folder, files, finished, linked)
    for index in (*finished.files, *linked):
        options.on_file(index)
    missing = MissingFiles(
        [entry for index, entry in enumerate(files) if index not in finished.files and index not in linked],
        written_range_bytes(files, finished.ranges),
    )
    require_inodes(root, len(missing.files))
    linked_bytes = sum(files[index].bytes for index in linked)
    resumed_bytes = sum(files[index].bytes for index in finished.files)
    in_flight = _LATE_WRITE_BYTES + options.readers * _largest_buffered(missing.files)
    with reserve(
        root, version, missing.needed_bytes, limits, in_flight=in_flight, on_evicted=options.on_evicted
    ) as used:

        def count_bytes(count: int) -> None:
            used(count)
            advance(count)

        advance(linked_bytes + resumed_bytes + missing.range_bytes)
        inline_files = _write_inline_files(dataset, folder, skip=finished.files.keys() | linked)
        count_bytes(sum(files[index].bytes for index in inline_files))
        for index in inline_files:
            options.on_file(index)
        journal = CopyJournal(
            path, version, durable=syncs_each_file(files), append=bool(finished.files or finished.ranges)
        )
        try:
            for index in listed - finished.ranges.keys():
                journal.drop_ranges(index)
            journal.flush()
            digests = copy_files(
                dataset, folder, finished, journal, options, linked=linked | inline_files, advance=count_bytes
            )
        finally:
            journal.close()
    return CopyTotals(missing.copy_bytes, linked_bytes, resumed_bytes + missing.range_bytes, digests)


def require_inodes(root: Path, n_files: int) -> None:
    """Refuse more files than this user may create. Raises NoSpace."""
    if n_files > (inodes := free_inodes(root)):
        message = f"{n_files} files to be written, more than the {inodes} free inodes"
        raise NoSpace(message, where=str(root), hint=f"evict sets of many files: pit-stage list {root}")


def written_range_bytes(files: Sequence[FileEntry], finished_ranges: Mapping[int, Collection[int]]) -> int:
    """Sum the bytes of ranges already written, by file and number."""
    return sum(
        min(RANGE_BYTES, files[index].bytes - number * RANGE_BYTES)
        for index, numbers in finished_ranges.items()
        for number in numbers
    )


def _write_inline_files(dataset: DatasetVersion, folder: Path, *, skip: Set[int]) -> set[int]:
    """Write the files whose content is in the manifest; return their indexes. Raises DataError, NoSpace."""
    contents = dataset.manifest.subset.inline_files if dataset.manifest.subset else {}
    written = set()
    for index, entry in enumerate(dataset.manifest.files if contents else ()):
        if index in skip or (data := contents.get(entry.path)) is None:
            continue
        if len(data) != entry.bytes or digest_bytes(data) != entry.digest:
            raise digest_error(entry, digest_bytes(data), f"{MANIFEST_FILE}: {entry.path}")
        write_file(folder, entry.path, data)
        written.add(index)
    return written


def remove_stale(folder: Path, files: Sequence[FileEntry], finished: FinishedFiles, linked: set[int]) -> None:
    """Remove unfinished files of an earlier call; make those to be resumed writable, and drop the ranges of others."""
    for index, entry in enumerate(files):
        if index in finished.files:
            continue
        if index in linked:
            finished.ranges.pop(index, None)
            continue
        path = f"{folder}/{entry.path}"
        try:
            status = os.stat(path, follow_symlinks=False)  # noqa: PTH116 - a hundred thousand of them
        except OSError:
            finished.ranges.pop(index, None)
            continue
        # A file with several links belongs to another version too, and must not be written.
        if index in finished.ranges and stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
            os.chmod(path, 0o600)  # noqa: PTH101
        else:
            finished.ranges.pop(index, None)
            os.unlink(path)  # noqa: PTH108


def write_manifest_last(folder: Path, dataset: DatasetVersion) -> Path:
    """Write the manifest, a version's last file, into its partial folder, which may then be published."""
    write_file(folder, MANIFEST_FILE, dataset.data)
    folder.chmod(0o755)
    return folder


def discard_empty_partial(root: Path, version: str) -> None:
    """Remove a partial copy that holds no finished file, else keep it to be resumed."""
    try:
        has_finished = journal_path(root, version).read_bytes().count(b"\n") > 1
    except OSError:
        has_finished = False
    if not has_finished:
        discard_partial(root, version)


def discard_partial(root: Path, version: str) -> None:
    """Remove a partial copy, the journal first: it must never list missing files."""
    journal_path(root, version).unlink(missing_ok=True)
    remove_tree(partial_path(root, version))


def _largest_buffered(files: Sequence[FileEntry]) -> int:
    """Return the most bytes a worker allocates to one file before they are written."""
    return max((min(entry.bytes, RANGE_BYTES) for entry in files), default=0)
