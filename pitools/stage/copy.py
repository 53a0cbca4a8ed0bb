"""One pass over the files of a version: read, hash, write. What is written was verified, or nothing is kept."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path, PurePosixPath
from threading import Event

from pitools.core.errors import DataError
from pitools.core.files import os_error
from pitools.core.progress import Advance
from pitools.stage.source import Dataset, open_file, opened, reading
from pitools.stage.workers import for_each, pump
from pitools.store.manifest import FILE_NAME, FileEntry

# Published versions do not change; the mode says so to whoever would edit one in place.
_MODE = 0o444


def copy(dataset: Dataset, to: Path, *, readers: int, advance: Advance) -> None:
    """Copy exactly what the manifest names, and the manifest, into the new folder `to`; durable on return.

    Raises DataError when a source file is missing, a link, or not of its size and digest; NoSpace or ClusterError
    when `to` cannot take it. What is then in `to` is for the caller to remove.
    """
    files = dataset.manifest.files
    one_by_one = _sync_one_by_one(files)
    _make_folders(to, files)
    with opened(dataset.folder) as root:
        work = partial(_copy_file, dataset.folder, root, to, one_by_one, advance)
        # The largest first, so that no reader is left alone with one at the end.
        for_each(sorted(files, key=lambda entry: -entry.bytes), work, threads=readers)
    _write(to / FILE_NAME, lambda put: put(memoryview(dataset.data)), sync=one_by_one)
    if not one_by_one:
        _sync_file_system(to)


def _copy_file(
    folder: Path, root: int, to: Path, sync: bool, advance: Advance,
    entry: FileEntry, buffer: memoryview, stop: Event,
) -> None:  # fmt: skip
    where = folder / entry.path
    descriptor = open_file(root, entry.path, where=where)

    def fill(put: Callable[[memoryview], None]) -> None:
        def sink(block: memoryview) -> None:
            put(block)
            advance(len(block))

        with reading(where):
            found = pump(descriptor, buffer, sink, limit=entry.bytes, stop=stop)
        _compare(entry, found, where)

    try:
        _compare_size(entry, os.fstat(descriptor).st_size, where)
        _write(to / entry.path, fill, sync=sync)
    finally:
        os.close(descriptor)


def _compare_size(entry: FileEntry, size: int, where: Path) -> None:
    if size != entry.bytes:
        what = f"the manifest says {entry.bytes} bytes, the file has {size}"
        raise DataError(what, where=str(where), hint="it was changed or cut short: run `check` on the source")


def _compare(entry: FileEntry, found: tuple[int, str], where: Path) -> None:
    _compare_size(entry, found[0], where)
    if found[1] != entry.digest:
        what = f"the manifest says {entry.digest}, the content is {found[1]}"
        raise DataError(what, where=str(where), hint="it was changed or is damaged: run `check` on the source")


def _write(path: Path, fill: Callable[[Callable[[memoryview], None]], None], *, sync: bool) -> None:
    """Create a file and let `fill(put)` write it. OSErrors of this file, and only of this one, become ours."""

    def put(block: memoryview) -> None:
        try:
            while block:
                block = block[os.write(descriptor, block) :]
        except OSError as error:
            raise os_error(error, path) from error

    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, _MODE)
        try:
            fill(put)
            if sync:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise os_error(error, path) from error


def _make_folders(to: Path, files: tuple[FileEntry, ...]) -> None:
    try:
        for folder in sorted({PurePosixPath(entry.path).parent for entry in files}):
            (to / folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise os_error(error, to) from error


def _sync_one_by_one(files: tuple[FileEntry, ...]) -> bool:
    # fsync of a shard overlaps with the next one's read. For thousands of small files each is a journal commit, and
    # one syncfs, though it waits for other writers' data too, is far cheaper.
    return len(files) <= 256 or sum(entry.bytes for entry in files) >= len(files) << 20


def _sync_file_system(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(descriptor):
            number = ctypes.get_errno()
            raise os_error(OSError(number, os.strerror(number)), folder)
    finally:
        os.close(descriptor)
