"""One pass over the files of a version: read, hash, write. Only verified files are kept.

Large files are written past the page cache (O_DIRECT) into allocated blocks: that is as fast as the disk, and leaves
the node's memory to its jobs. Small ones are written through it, and synced together at the end.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import structs

from pitools.core import forked_pool
from pitools.core.fs import from_os_error, fs_type
from pitools.core.progress import Advance
from pitools.stage.cache.evict import Eviction
from pitools.stage.cache.layout import LOCAL_FILE_SYSTEMS
from pitools.stage.copy.journal import CopyJournal, FinishedFiles, WrittenFiles, journal_line
from pitools.stage.copy.tasks import SMALL_FILE_BYTES, range_count, split_tasks
from pitools.stage.copy.worker import CREATE_FLAGS, FILE_MODE, CopyJob, CopyWorker, RangeDigest, digest_error
from pitools.stage.copy.write import BackgroundSync
from pitools.stage.sources.base import DatasetVersion, Source
from pitools.stage.sources.local import DirDescriptors, LocalSource
from pitools.store import digest as digests
from pitools.store.manifest import FileEntry


class CopyOptions(NamedTuple):
    """How to copy. readers: threads, over all cores. bytes_per_s: of all readers together, 0 for no limit.

    order: groups of manifest indexes in the order to copy, with no batch of small files across two groups; None for the
    default order. on_file: called with each file's index once it is written and verified. on_evicted: called with each
    set or partial copy that was evicted for room. inspect: called in a worker with the index and the content of each
    small file; on_inspected: called here with the results by index.
    """

    readers: int
    bytes_per_s: float = 0
    order: Sequence[Sequence[int]] | None = None
    on_file: Callable[[int], None] = lambda _: None
    on_evicted: Callable[[Eviction], None] = lambda _: None
    inspect: Callable[[int, memoryview], Any] | None = None
    on_inspected: Callable[[dict[int, Any]], None] = lambda _: None


def readers_for(dataset: DatasetVersion) -> int:
    """Return the number of reading threads that keeps the cores busy while some wait for I/O."""
    cores = len(os.sched_getaffinity(0))
    if not isinstance(dataset.source, LocalSource):
        return max(8, min(16, 4 * cores))  # network latency
    files = dataset.manifest.files
    small = sum(entry.bytes for entry in files) < len(files) * SMALL_FILE_BYTES
    if small and fs_type(dataset.source.folder) in LOCAL_FILE_SYSTEMS:
        return min(16, cores)  # reads never block, so threads would only compete for the GIL
    return forked_pool.default_readers()


def syncs_each_file(files: Sequence[FileEntry]) -> bool:
    """Whether each file is synced as it is written, not all of them at the end.

    fsync of a shard overlaps with the next one's read. For thousands of small files each fsync is a journal commit, and
    one syncfs, though it also waits for other writers' data, is far cheaper.
    """
    return len(files) <= 256 or sum(entry.bytes for entry in files) >= len(files) << 20


def copies_by_ranges(source: Source, target: Path, options: CopyOptions) -> bool:
    """Whether large files are copied range by range.

    Peers may send wrong bytes, so that whole files have to be read again; and a clone is of a whole file.
    """
    return options.order is None and not _may_clone(source, target)


def copy_files(
    dataset: DatasetVersion,
    target: Path,
    finished: FinishedFiles,
    journal: CopyJournal,
    options: CopyOptions,
    *,
    linked: set[int],
    advance: Advance,
) -> dict[int, str]:
    """Copy every file that is neither `finished` nor `linked` from the dataset's source into the folder `target`.

    Durable on return, except for names; where files are not synced one by one (`syncs_each_file`), names too. Returns
    the digest of each file for which the manifest has none. advance: called with the bytes written, also with 0 as
    time passes.

    Raises DataError when a source file is missing, a link, or differs in size or digest; NoSpace or ClusterError when
    `target` cannot be written; Unreachable when the source does not answer.
    """
    files, source = dataset.manifest.files, dataset.source
    if isinstance(source, LocalSource):
        # Dropping a tmpfs file from the page cache frees nothing.
        source = structs.replace(source, drop_cache=fs_type(source.folder) != "tmpfs")
    each_file = syncs_each_file(files)
    digest_by_file = {index: text for index, text in finished.files.items() if text}
    range_digests = {index: dict[int, bytes]() for index in finished.ranges}
    clone, ranged = _may_clone(dataset.source, target), copies_by_ranges(dataset.source, target, options)
    tasks = [
        task
        for group in options.order or [range(len(files))]
        for task in split_tasks(
            files,
            [index for index in group if index not in finished.files and index not in linked],
            finished.ranges,
            ranged=ranged,
            in_order=options.order is not None,
            readers=options.readers,
        )
    ]
    allocate = fs_type(target) != "tmpfs"  # tmpfs is the page cache, and allocating writes there
    direct = (
        allocate and any(files[task.files[0]].bytes >= SMALL_FILE_BYTES for task in tasks) and _supports_direct(target)
    )
    job = CopyJob(source, files, str(target), allocate, clone, direct, each_file, options.bytes_per_s, options.inspect)

    def handle_result(result: WrittenFiles | RangeDigest) -> None:
        if isinstance(result, RangeDigest):
            journal.add_range(*result)
            file_digests = range_digests.setdefault(result.file, {})
            file_digests[result.number] = result.digest
            if len(file_digests) < range_count(files[result.file]):
                return journal.flush()
            result = _finish_ranges(job, result.file, range_digests.pop(result.file))
        journal.add_files(result)
        digest_by_file.update(result.digests)
        options.on_inspected(result.inspected)
        for index in result.files:
            options.on_file(index)
        return journal.flush()

    if each_file:
        forked_pool.run_tasks(tasks, partial(CopyWorker, job), handle_result, readers=options.readers, advance=advance)
        return digest_by_file
    with BackgroundSync(target) as flusher:

        def count_bytes(count: int) -> None:
            flusher.add_bytes(count)
            advance(count)

        forked_pool.run_tasks(
            tasks, partial(CopyWorker, job), handle_result, readers=options.readers, advance=count_bytes
        )
    return digest_by_file


def _finish_ranges(job: CopyJob, index: int, range_digests: dict[int, bytes]) -> WrittenFiles:
    """Verify the digest of a file whose ranges are all written, and make the file read-only."""
    entry = job.files[index]
    where = Path(job.target) / entry.path
    digest = digests.digest_ranges(range_digests[number] for number in range(len(range_digests)))
    if entry.digest and digest != entry.digest:
        # The journal lists the ranges by their own digests: without the file they are not resumed from.
        where.unlink(missing_ok=True)
        raise digest_error(entry, digest, f"{job.source.label}/{entry.path}")
    try:
        descriptor = os.open(where, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.fchmod(descriptor, FILE_MODE)
            status = os.fstat(descriptor)
            if status.st_size != entry.bytes:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        finally:
            os.close(descriptor)
    except OSError as error:
        raise from_os_error(error, where) from error
    new = "" if entry.digest else digest
    return WrittenFiles((index,), journal_line(index, status, new).encode(), {index: new} if new else {}, {})


def write_file(folder: Path, path: str, data: bytes) -> None:
    """Write a file whose bytes are in the manifest, not in a source. Raises NoSpace or ClusterError."""
    parent_path, _, name = path.rpartition("/")
    try:
        with contextlib.closing(DirDescriptors(folder, create=True)) as folders:
            parent = folders.open_dir(parent_path)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=parent)
            descriptor = os.open(name, CREATE_FLAGS, FILE_MODE, dir_fd=parent)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(descriptor, FILE_MODE)
            os.fsync(descriptor)
    except OSError as error:
        raise from_os_error(error, folder / path) from error


def _may_clone(source: Source, target: Path) -> bool:
    """Whether files in `target` can share blocks with the source's."""
    if not isinstance(source, LocalSource) or fs_type(target) not in ("xfs", "btrfs"):
        return False
    return source.folder.stat().st_dev == target.stat().st_dev


def _supports_direct(folder: Path) -> bool:
    """Whether files in `folder` can be written past the page cache."""
    try:
        os.close(os.open(folder, os.O_TMPFILE | os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC, 0o600))
    except OSError:
        return False
    return True
