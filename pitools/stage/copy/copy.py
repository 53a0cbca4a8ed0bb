"""One pass over the files of a version: read, hash, write. What is written was verified, or nothing is kept.

Large files are written past the page cache (O_DIRECT) into blocks given to them beforehand: that is as fast as the
disk, and takes no memory from the jobs of the node. Small ones go through it, and are synced together at the end.
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
from pitools.core.fs import file_system, os_error
from pitools.core.progress import Advance
from pitools.stage.copy.journal import Done, Journal, Written, line
from pitools.stage.copy.tasks import SMALL, range_count, tasks
from pitools.stage.copy.worker import MODE, NEW, Copier, Range, Work, wrong_digest
from pitools.stage.copy.write import Flusher
from pitools.stage.sources.base import Dataset, Source
from pitools.stage.sources.local import Folders, LocalSource
from pitools.store import digest as digests
from pitools.store.manifest import FileEntry

# File systems of this machine's own disks and memory; others, such as nfs and lustre, are asked over a network.
_HERE = {"tmpfs", "ext4", "xfs", "btrfs", "overlay"}


class Orders(NamedTuple):
    """How to copy. readers: threads, over all cores. bytes_per_s: of all readers together, 0 for no limit.

    first: all files by their place in the manifest in the order wanted, in groups that no batch of small ones spans;
    None for the engine's own order.
    finished: called with each file's place once it is written and verified.
    inspect: called in a worker with the place and the content of each small file; inspected: called here with what it
    returned, by place.
    """

    readers: int
    bytes_per_s: float = 0
    first: Sequence[Sequence[int]] | None = None
    finished: Callable[[int], None] = lambda _: None
    inspect: Callable[[int, memoryview], Any] | None = None
    inspected: Callable[[dict[int, Any]], None] = lambda _: None


def readers_for(dataset: Dataset) -> int:
    """Threads to read with: as many as keep the cores busy while some of them wait for bytes."""
    cores = len(os.sched_getaffinity(0))
    if not isinstance(dataset.source, LocalSource):
        return max(8, min(16, 4 * cores))  # a request's way there and back is long
    files = dataset.manifest.files
    small = sum(entry.bytes for entry in files) < len(files) * SMALL
    if small and file_system(dataset.source.folder) in _HERE:
        return min(16, cores)  # they never wait, and a second thread would only take the interpreter from the first
    return forked_pool.default_readers()


def is_durable(files: Sequence[FileEntry]) -> bool:
    """Whether each file is synced as it is written, not all of them at the end.

    fsync of a shard overlaps with the next one's read. For thousands of small files each is a journal commit, and
    one syncfs, though it waits for other writers' data too, is far cheaper.
    """
    return len(files) <= 256 or sum(entry.bytes for entry in files) >= len(files) << 20


def by_ranges(source: Source, to: Path, orders: Orders) -> bool:
    """Whether large files are copied range by range.

    A source that may lie about single files, as peers may, has to be asked again for whole ones; and so is a clone.
    """
    return orders.first is None and not _may_clone(source, to)


def copy(
    dataset: Dataset, to: Path, done: Done, journal: Journal, orders: Orders, *, linked: set[int], advance: Advance
) -> dict[int, str]:
    """Bring every file that is neither `done` nor `linked` from the dataset's source into the folder `to`.

    Durable on return, but for names; where files are not synced one by one (`is_durable`), also those. Returns the
    digest found of each file for which the manifest has none.
    advance: called with the bytes written, also with 0 as time passes.

    Raises DataError when a source file is missing, a link, or not of its size and digest; NoSpace or ClusterError
    when `to` cannot take it; Unreachable when the source does not answer.
    """
    files, source = dataset.manifest.files, dataset.source
    if isinstance(source, LocalSource):
        # Memory that is the source itself cannot be left to others.
        source = structs.replace(source, once=file_system(source.folder) != "tmpfs")
    durable = is_durable(files)
    found = {index: text for index, text in done.files.items() if text}
    ranges = {index: dict[int, bytes]() for index in done.ranges}
    clone, ranged = _may_clone(dataset.source, to), by_ranges(dataset.source, to, orders)
    plan = [
        task
        for group in orders.first or [range(len(files))]
        for task in tasks(
            files,
            [index for index in group if index not in done.files and index not in linked],
            done.ranges,
            ranged=ranged,
            in_order=orders.first is not None,
            readers=orders.readers,
        )
    ]
    on_disk = file_system(to) != "tmpfs"  # which is the page cache, and where allocating is writing
    direct = on_disk and any(files[task.files[0]].bytes >= SMALL for task in plan) and _takes_direct(to)
    work = Work(source, files, str(to), on_disk, clone, direct, durable, orders.bytes_per_s, orders.inspect)

    def take(result: Written | Range) -> None:
        if isinstance(result, Range):
            journal.wrote_range(*result)
            digests_of = ranges.setdefault(result.file, {})
            digests_of[result.number] = result.digest
            if len(digests_of) < range_count(files[result.file]):
                return journal.flush()
            result = _finish(work, result.file, ranges.pop(result.file))
        journal.wrote(result)
        found.update(result.digests)
        orders.inspected(result.inspected)
        for index in result.files:
            orders.finished(index)
        return journal.flush()

    if durable:
        forked_pool.run(plan, partial(Copier, work), take, readers=orders.readers, advance=advance)
        return found
    with Flusher(to) as flusher:

        def moved(count: int) -> None:
            flusher.moved(count)
            advance(count)

        forked_pool.run(plan, partial(Copier, work), take, readers=orders.readers, advance=moved)
    return found


def _finish(work: Work, index: int, ranges: dict[int, bytes]) -> Written:
    """A file of which all ranges are written: judge them together, and close it to writers."""
    entry = work.files[index]
    found = digests.of_ranges(ranges[number] for number in range(len(ranges)))
    if entry.digest and found != entry.digest:
        raise wrong_digest(entry, found, f"{work.source.label}/{entry.path}")
    where = Path(work.to) / entry.path
    try:
        descriptor = os.open(where, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.fchmod(descriptor, MODE)
            status = os.fstat(descriptor)
            if status.st_size != entry.bytes:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        finally:
            os.close(descriptor)
    except OSError as error:
        raise os_error(error, where) from error
    new = "" if entry.digest else found
    return Written((index,), line(index, status, new).encode(), {index: new} if new else {}, {})


def write_file(to: Path, path: str, data: bytes) -> None:
    """Write a file of which no source has the bytes into the folder `to`. Raises NoSpace or ClusterError."""
    within, _, name = path.rpartition("/")
    try:
        with contextlib.closing(Folders(to, make=True)) as folders:
            at = folders.enter(within)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=at)
            descriptor = os.open(name, NEW, MODE, dir_fd=at)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(descriptor, MODE)
            os.fsync(descriptor)
    except OSError as error:
        raise os_error(error, to / path) from error


def _may_clone(source: Source, to: Path) -> bool:
    """Whether files there can share blocks with the source's."""
    if not isinstance(source, LocalSource) or file_system(to) not in ("xfs", "btrfs"):
        return False
    return source.folder.stat().st_dev == to.stat().st_dev


def _takes_direct(to: Path) -> bool:
    """Whether files there can be written past the page cache."""
    try:
        os.close(os.open(to, os.O_TMPFILE | os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC, 0o600))
    except OSError:
        return False
    return True
