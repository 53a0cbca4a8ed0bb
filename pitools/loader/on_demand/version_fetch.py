"""Fill a version's partial folder in the cache file by file on request, and publish it when it is complete.

Verified files are recorded in the stager's journal, so `pit-stage run` and this process each keep the other's finished
files, and of a large file the ranges that `pit-stage run` wrote; those written here are not recorded. The version's
lock is held throughout: there is one writer.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path

from pitools.core.errors import DataError, PitError
from pitools.core.fs import allocate, from_os_error, fs_type, remove_tree, sync_fs
from pitools.stage.cache import records
from pitools.stage.cache.layout import journal_path, needed_bytes, partial_path, staged_path
from pitools.stage.cache.space import RootLimits, reserve
from pitools.stage.copy import journal
from pitools.stage.copy.copy import syncs_each_file
from pitools.stage.copy.hardlink import link_shared
from pitools.stage.copy.journal import CopyJournal, WrittenFiles, journal_line
from pitools.stage.copy.resume import remove_stale, require_inodes, write_manifest_last, written_range_bytes
from pitools.stage.copy.worker import CREATE_FLAGS, FILE_MODE, digest_error
from pitools.stage.copy.write import write_all
from pitools.stage.sources.base import DatasetVersion, SourceFile, all_folders
from pitools.stage.stage import publish_new
from pitools.store.digest import RANGE_BYTES, hasher_for
from pitools.store.manifest import MANIFEST_FILE, FileEntry

# A shard is fetched in parts: its first reader does not depend on the speed of a single connection.
_FILE_THREADS, _REQUEST_THREADS = 8, 16
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC


class VersionFetch:
    """The writer of one version's partial folder; thread-safe. Its process may be killed at any moment."""

    def __init__(
        self, dataset: DatasetVersion, root: Path, limits: RootLimits, report_progress: Callable[[int, int], None]
    ) -> None:
        """report_progress: called with (bytes present, bytes in total). The caller holds the version's lock.

        Raises NoSpace, TryLater, ClusterError.
        """
        self._dataset, self._root, self._report_progress = dataset, root, report_progress
        self._files = dataset.manifest.files
        self._indices = {entry.path: index for index, entry in enumerate(self._files)}
        self._folder = partial_path(root, dataset.version)
        self._syncs_each_file = syncs_each_file(self._files)
        self._lock = threading.Lock()
        self._futures: dict[int, Future[None]] = {}
        self._scratch = threading.local()
        self._stack = ExitStack()
        self.published = False
        try:
            self._begin(limits)
        except OSError as error:
            raise from_os_error(error, self._folder) from error

    def _begin(self, limits: RootLimits) -> None:
        folder, version, files = self._folder, self._dataset.version, self._files
        folder.mkdir(mode=0o700, exist_ok=True)
        path = journal_path(self._root, version)
        done = journal.read_journal(path, folder, version, files)
        is_new, listed = not done.files and not done.ranges, set(done.ranges)
        if is_new:  # without a journal, the files present are unverified
            remove_tree(folder)
            folder.mkdir(mode=0o700)
        linked = link_shared(self._dataset, self._root, folder, set(done.files))
        self._present = done.files.keys() | linked
        for subfolder in sorted(all_folders(files)):
            (folder / subfolder).mkdir(exist_ok=True)
            (folder / subfolder).chmod(0o755)  # independent of the umask; the root's mode controls access
        if not is_new:
            remove_stale(folder, files, done, linked)
        self._ranges = done.ranges
        self._resumed_bytes = {index: written_range_bytes(files, {index: done.ranges[index]}) for index in done.ranges}
        missing = [entry for index, entry in enumerate(files) if index not in self._present]
        require_inodes(self._root, len(missing))
        self._bytes = self._dataset.manifest.total_bytes - sum(entry.bytes for entry in missing)
        in_flight = _FILE_THREADS * max((entry.bytes for entry in missing), default=0)
        needed = needed_bytes(missing) - sum(self._resumed_bytes.values())
        self._report_used = self._stack.enter_context(
            reserve(self._root, version, needed, limits, in_flight=min(needed, in_flight))
        )
        self._journal = CopyJournal(path, version, durable=self._syncs_each_file, append=not is_new)
        self._stack.callback(self._journal.close)
        for index in listed - done.ranges.keys():
            self._journal.drop_ranges(index)
        self._journal.flush()
        self._folder_fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._on_disk = fs_type(folder) != "tmpfs"  # on tmpfs, to allocate is to write
        self._file_threads = ThreadPoolExecutor(_FILE_THREADS, thread_name_prefix="file")
        self._record_threads = ThreadPoolExecutor(2, thread_name_prefix="disk")
        self._request_threads = ThreadPoolExecutor(_REQUEST_THREADS, thread_name_prefix="request")
        if not missing:
            self._publish()

    def open_file(self, path: str) -> int:
        """Fetch and verify a file if needed, and return a descriptor of it; path "": of the version's folder.

        Raises DataError if the version has no such file or its digest differs; Unreachable, NoSpace, ClusterError.
        """
        if path == MANIFEST_FILE:
            descriptor = os.memfd_create(MANIFEST_FILE, os.MFD_CLOEXEC)
            write_all(descriptor, memoryview(self._dataset.data), 0)
            return descriptor
        if not path:
            return os.open(".", _READ | os.O_DIRECTORY, dir_fd=self._folder_fd)
        if path not in self._indices:
            message, where = f"{path}: not in the manifest", f"{self._dataset.source.label}/{path}"
            raise DataError(message, where=where, hint="ingest the dataset again")
        if future := self._future_of(self._indices[path]):
            future.result()
        return os.open(path, _READ, dir_fd=self._folder_fd)

    def finish(self) -> None:
        """Record the files fetched so far, and block further ones. For use before the process exits."""
        self._record_threads.shutdown()
        self._lock.acquire()

    def _future_of(self, index: int) -> Future[None] | None:
        """Return the future of a file's fetch, shared by all requests; None if the file is present."""
        with self._lock:
            if index in self._present:
                return None
            if index not in self._futures:
                self._futures[index] = self._file_threads.submit(self._fetch_file, index)
            return self._futures[index]

    def _fetch_file(self, index: int) -> None:
        path = self._folder / self._files[index].path
        try:
            self._fetch(index, path)
        except BaseException as error:
            self._drop_future(index)
            if isinstance(error, OSError):
                raise from_os_error(error, path) from error
            raise
        # In another thread: the requests do not wait for the fsync.
        self._record_threads.submit(self._record_done, index)

    def _record_done(self, index: int) -> None:
        """Add a file to the journal after its fsync; publish after the last file."""
        entry = self._files[index]
        try:
            descriptor = os.open(self._folder / entry.path, _READ)
            try:
                if self._syncs_each_file:
                    os.fsync(descriptor)
                status = os.fstat(descriptor)
            finally:
                os.close(descriptor)
            with self._lock:
                self._journal.add_files(WrittenFiles((index,), journal_line(index, status).encode(), {}, {}))
                self._journal.flush()
                self._present.add(index)
                del self._futures[index]
                self._report_used(entry.bytes - self._resumed_bytes.get(index, 0))
                self._bytes += entry.bytes
                self._report_progress(self._bytes, self._dataset.manifest.total_bytes)
                if len(self._present) == len(self._files):
                    self._publish()
        except (OSError, PitError):
            if index not in self._present:
                self._drop_future(index)  # the next request retries the file; the next process retries publishing

    def _drop_future(self, index: int) -> None:
        path = self._folder / self._files[index].path
        with self._lock:
            if index not in self._ranges:
                path.unlink(missing_ok=True)
            elif path.exists():
                path.chmod(0o600)  # also where it was whole, and could not be recorded
            self._futures.pop(index, None)  # so that the next request tries again

    def _fetch(self, index: int, path: Path) -> None:
        """Download one file, except ranges already written, and verify the file on disk. Raises PitError, OSError."""
        entry, source = self._files[index], self._dataset.source
        descriptor = os.open(path, CREATE_FLAGS & ~os.O_EXCL if index in self._ranges else CREATE_FLAGS, FILE_MODE)
        try:
            if self._on_disk:
                allocate(descriptor, 0, entry.bytes)
            file = source.connect().open(entry.path)
            self._fetch_parts(file, descriptor, entry, self._ranges.get(index, ()))
            digest = self._digest(descriptor, entry)
            if digest != entry.digest and index in self._ranges:
                with self._lock:
                    del self._ranges[index]
                    self._journal.drop_ranges(index)
                    self._journal.flush()
                self._fetch_parts(file, descriptor, entry, ())
                digest = self._digest(descriptor, entry)
            if digest != entry.digest:
                raise digest_error(entry, digest, f"{source.label}/{entry.path}")
            os.fchmod(descriptor, FILE_MODE)
        finally:
            os.close(descriptor)

    def _fetch_parts(self, file: SourceFile, descriptor: int, entry: FileEntry, written: Collection[int]) -> None:
        """Download a file in parts. written: numbers of the ranges to leave out."""
        block = self._dataset.source.block
        parts = [
            self._request_threads.submit(self._fetch_range, file, descriptor, offset, min(block, entry.bytes - offset))
            for offset in range(0, entry.bytes, block)
            if not {offset // RANGE_BYTES, (min(offset + block, entry.bytes) - 1) // RANGE_BYTES} <= set(written)
        ]
        wait(parts)  # also after an error: all of them write to the descriptor
        for part in parts:
            part.result()

    def _fetch_range(self, file: SourceFile, descriptor: int, offset: int, length: int) -> None:
        view, filled = self._buffer()[:length], 0
        while filled < length:
            count = file.read_into(view[filled:], offset + filled)
            if not count:
                problem = f"object: truncated (expected {offset + length} bytes or more, got {offset + filled})"
                raise DataError(problem, where=self._dataset.source.label)
            filled += count
        write_all(descriptor, view, offset)

    def _digest(self, descriptor: int, entry: FileEntry) -> str:
        """Return the digest of the file as read back, which covers errors of disk and kernel, too."""
        hasher, offset, view = hasher_for(entry.digest), 0, self._buffer()
        while count := os.preadv(descriptor, [view], offset):
            hasher.update(view[:count])
            offset += count
        return hasher.digest()

    def _buffer(self) -> memoryview:
        if not hasattr(self._scratch, "view"):
            self._scratch.view = memoryview(mmap.mmap(-1, self._dataset.source.block))
        view: memoryview = self._scratch.view
        return view

    def _publish(self) -> None:
        """Publish the folder as a staged version."""
        version, root, manifest = self._dataset.version, self._root, self._dataset.manifest
        self._stack.close()
        if not self._syncs_each_file:
            sync_fs(self._folder)
        new = write_manifest_last(self._folder, self._dataset)
        # Before publishing: a version without a record has an unknown source, and is never evicted.
        records.write_stage_record(root, version, source=self._dataset.source.label, n_bytes=manifest.total_bytes)
        publish_new(new, staged_path(root, version), root, synced=False, replace=True)
        journal_path(root, version).unlink(missing_ok=True)
        self.published = True
