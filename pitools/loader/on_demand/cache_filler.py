"""A version's unfinished folder in the cache, filled file by file as they are wanted, and published when it is whole.

What is done and verified is in the stager's own journal: `pit-stage run` goes on from it, and so does this from what an
interrupted `pit-stage run` left. The version's lock is held all the while, so that there is one writer.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path

from pitools.core.errors import DataError, PitError
from pitools.core.fs import allocate, from_os_error, fs_type, remove_tree, sync_fs
from pitools.stage.cache import records
from pitools.stage.cache.disk_quota import QuotaLimits, reserve
from pitools.stage.cache.layout import journal_path, needed_bytes, partial_path, set_path
from pitools.stage.copy import journal
from pitools.stage.copy.copy import is_durable
from pitools.stage.copy.hardlink import link_shared
from pitools.stage.copy.journal import CopyJournal, WrittenFiles, journal_line
from pitools.stage.copy.resume import write_manifest_last
from pitools.stage.copy.worker import CREATE_FLAGS, FILE_MODE, digest_error
from pitools.stage.copy.write import write_all
from pitools.stage.sources.base import Dataset, SourceFile, all_folders
from pitools.stage.stage import publish_new
from pitools.store.digest import hasher_for
from pitools.store.manifest import FILE_NAME, FileEntry

# At once. A shard comes in parts, so that the first reader of one does not wait for a single connection.
_FILE_THREADS, _REQUEST_THREADS = 8, 16
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC


class CacheFiller:
    """One version being filled; any threads may ask. It ends with its process, which may be killed at any moment."""

    def __init__(
        self, dataset: Dataset, root: Path, limits: QuotaLimits, report_progress: Callable[[int, int], None]
    ) -> None:
        """tell: is called with bytes that are here, of how many. Call with the version's lock held.

        Raises NoSpace, TryLater, ClusterError.
        """
        self._dataset, self._root, self._report_progress = dataset, root, report_progress
        self._files = dataset.manifest.files
        self._places = {entry.path: index for index, entry in enumerate(self._files)}
        self._folder = partial_path(root, dataset.version)
        self._durable = is_durable(self._files)
        self._lock = threading.Lock()
        self._futures: dict[int, Future[None]] = {}
        self._scratch = threading.local()
        self._stack = ExitStack()
        self.published = False
        try:
            self._begin(limits)
        except OSError as error:
            raise from_os_error(error, self._folder) from error

    def _begin(self, limits: QuotaLimits) -> None:
        folder, version, files = self._folder, self._dataset.version, self._files
        folder.mkdir(mode=0o700, exist_ok=True)
        path = journal_path(self._root, version)
        done = journal.read_journal(path, folder, version, files)
        if not done.files:  # what is there is not known to be good
            remove_tree(folder)
            folder.mkdir(mode=0o700)
        linked = link_shared(self._dataset, self._root, folder, set(done.files))
        self._here = done.files.keys() | linked
        for within in sorted(all_folders(files)):
            (folder / within).mkdir(exist_ok=True)
            (folder / within).chmod(0o755)  # whatever the umask; who may enter is for the root to say
        left = [entry for index, entry in enumerate(files) if index not in self._here]
        for entry in left:
            (folder / entry.path).unlink(missing_ok=True)
        self._bytes = self._dataset.manifest.total_bytes - sum(entry.bytes for entry in left)
        in_flight = _FILE_THREADS * max((entry.bytes for entry in left), default=0)
        needed = needed_bytes(left)
        self._used = self._stack.enter_context(
            reserve(self._root, version, needed, limits, in_flight=min(needed, in_flight))
        )
        self._journal = CopyJournal(path, version, durable=self._durable, append=bool(done.files))
        self._stack.callback(self._journal.close)
        self._at = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._on_disk = fs_type(folder) != "tmpfs"  # where allocating is writing
        self._bringing = ThreadPoolExecutor(_FILE_THREADS, thread_name_prefix="file")
        self._settling = ThreadPoolExecutor(2, thread_name_prefix="disk")
        self._asking = ThreadPoolExecutor(_REQUEST_THREADS, thread_name_prefix="request")
        if not left:
            self._publish()

    def open_file(self, path: str) -> int:
        """A descriptor of a file, brought and verified before, or of the folder where the path is "".

        Raises DataError (it is not in the version, or not what the manifest says), Unreachable, NoSpace, ClusterError.
        """
        if path == FILE_NAME:
            descriptor = os.memfd_create(FILE_NAME, os.MFD_CLOEXEC)
            write_all(descriptor, memoryview(self._dataset.data), 0)
            return descriptor
        if not path:
            return os.open(".", _READ | os.O_DIRECTORY, dir_fd=self._at)
        if path not in self._places:
            what, where = "missing: the manifest does not name it", f"{self._dataset.source.label}/{path}"
            raise DataError(what, where=where, hint="ingest it again")
        if coming := self._future_of(self._places[path]):
            coming.result()
        return os.open(path, _READ, dir_fd=self._at)

    def finish(self) -> None:
        """Write down what is here, and begin nothing more: the process ends now."""
        self._settling.shutdown()
        self._lock.acquire()

    def _future_of(self, index: int) -> Future[None] | None:
        """The bringing of a file, begun once however many want it; None for one that is here."""
        with self._lock:
            if index in self._here:
                return None
            if index not in self._futures:
                self._futures[index] = self._bringing.submit(self._fetch_file, index)
            return self._futures[index]

    def _fetch_file(self, index: int) -> None:
        path = self._folder / self._files[index].path
        try:
            self._fetch(self._files[index], path)
        except BaseException as error:
            self._drop_future(index)
            if isinstance(error, OSError):
                raise from_os_error(error, path) from error
            raise
        # Who waits for it need not wait for the disk as well.
        self._settling.submit(self._record_done, index)

    def _record_done(self, index: int) -> None:
        """Write down that a file is here, once it is on the disk; with the last one, publish."""
        entry = self._files[index]
        try:
            descriptor = os.open(self._folder / entry.path, _READ)
            try:
                if self._durable:
                    os.fsync(descriptor)
                status = os.fstat(descriptor)
            finally:
                os.close(descriptor)
            with self._lock:
                self._journal.add_files(WrittenFiles((index,), journal_line(index, status).encode(), {}, {}))
                self._journal.flush()
                self._here.add(index)
                del self._futures[index]
                self._used(entry.bytes)
                self._bytes += entry.bytes
                self._report_progress(self._bytes, self._dataset.manifest.total_bytes)
                if len(self._here) == len(self._files):
                    self._publish()
        except (OSError, PitError):
            if index not in self._here:
                self._drop_future(index)  # the next who wants it is told; to publish is tried again by the next process

    def _drop_future(self, index: int) -> None:
        with self._lock:
            (self._folder / self._files[index].path).unlink(missing_ok=True)
            self._futures.pop(index, None)  # who wants it after an error has it tried again

    def _fetch(self, entry: FileEntry, path: Path) -> None:
        """Write one file, and compare what was written. Raises PitError, OSError."""
        descriptor = os.open(path, CREATE_FLAGS, FILE_MODE)
        try:
            if self._on_disk:
                allocate(descriptor, 0, entry.bytes)
            source = self._dataset.source
            file = source.connect().open(entry.path)
            parts = [
                self._asking.submit(
                    self._fetch_range, file, descriptor, offset, min(source.block, entry.bytes - offset)
                )
                for offset in range(0, entry.bytes, source.block)
            ]
            wait(parts)  # all of them, also after an error: they write to the descriptor
            for part in parts:
                part.result()
            found = self._digest(descriptor, entry)
            if found != entry.digest:
                raise digest_error(entry, found, f"{source.label}/{entry.path}")
        finally:
            os.close(descriptor)

    def _fetch_range(self, file: SourceFile, descriptor: int, offset: int, length: int) -> None:
        view, filled = self._buffer()[:length], 0
        while filled < length:
            count = file.read_into(view[filled:], offset + filled)
            if not count:
                raise DataError(f"it ends after byte {offset + filled}", where=self._dataset.source.label)
            filled += count
        write_all(descriptor, view, offset)

    def _digest(self, descriptor: int, entry: FileEntry) -> str:
        """Of what the file holds now, not of what was received: the disk and the kernel are part of the way."""
        hasher, at, view = hasher_for(entry.digest), 0, self._buffer()
        while count := os.preadv(descriptor, [view], at):
            hasher.update(view[:count])
            at += count
        return hasher.digest()

    def _buffer(self) -> memoryview:
        if not hasattr(self._scratch, "view"):
            self._scratch.view = memoryview(mmap.mmap(-1, self._dataset.source.block))
        view: memoryview = self._scratch.view
        return view

    def _publish(self) -> None:
        """Make it a staged version like any other."""
        version, root, manifest = self._dataset.version, self._root, self._dataset.manifest
        self._stack.close()
        if not self._durable:
            sync_fs(self._folder)
        new = write_manifest_last(self._folder, self._dataset)
        # First, because a set without a record is one of unknown source, which is never evicted.
        records.write_stage_record(root, version, source=self._dataset.source.label, n_bytes=manifest.total_bytes)
        publish_new(new, set_path(root, version), root)
        journal_path(root, version).unlink(missing_ok=True)
        self.published = True
