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
from pitools.core.fs import allocate, file_system, os_error, remove_tree, sync_file_system
from pitools.stage.cache import records
from pitools.stage.cache.disk_quota import Limits, reserved
from pitools.stage.cache.layout import journal_path, needed_bytes, object_path, partial_path
from pitools.stage.copy import journal
from pitools.stage.copy.copy import is_durable
from pitools.stage.copy.hardlink import link_shared
from pitools.stage.copy.journal import Journal, Written, line
from pitools.stage.copy.resume import seal
from pitools.stage.copy.worker import MODE, NEW, wrong_digest
from pitools.stage.copy.write import write
from pitools.stage.sources.base import Dataset, SourceFile, folders_of
from pitools.stage.stage import publish_new
from pitools.store.digest import hasher_for
from pitools.store.manifest import FILE_NAME, FileEntry

# At once. A shard comes in parts, so that the first reader of one does not wait for a single connection.
_FILES, _REQUESTS = 8, 16
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC


class Fill:
    """One version being filled; any threads may ask. It ends with its process, which may be killed at any moment."""

    def __init__(self, dataset: Dataset, root: Path, limits: Limits, tell: Callable[[int, int], None]) -> None:
        """tell: is called with bytes that are here, of how many. Call with the version's lock held.

        Raises NoSpace, TryLater, ClusterError.
        """
        self._dataset, self._root, self._tell = dataset, root, tell
        self._files = dataset.manifest.files
        self._places = {entry.path: index for index, entry in enumerate(self._files)}
        self._folder = partial_path(root, dataset.version)
        self._durable = is_durable(self._files)
        self._lock = threading.Lock()
        self._coming: dict[int, Future[None]] = {}
        self._scratch = threading.local()
        self._stack = ExitStack()
        self.published = False
        try:
            self._begin(limits)
        except OSError as error:
            raise os_error(error, self._folder) from error

    def _begin(self, limits: Limits) -> None:
        folder, version, files = self._folder, self._dataset.version, self._files
        folder.mkdir(mode=0o700, exist_ok=True)
        path = journal_path(self._root, version)
        done = journal.read(path, folder, version, files)
        if not done.files:  # what is there is not known to be good
            remove_tree(folder)
            folder.mkdir(mode=0o700)
        linked = link_shared(self._dataset, self._root, folder, set(done.files))
        self._here = done.files.keys() | linked
        for within in sorted(folders_of(files)):
            (folder / within).mkdir(exist_ok=True)
            (folder / within).chmod(0o755)  # whatever the umask; who may enter is for the root to say
        left = [entry for index, entry in enumerate(files) if index not in self._here]
        for entry in left:
            (folder / entry.path).unlink(missing_ok=True)
        self._bytes = self._dataset.manifest.total_bytes - sum(entry.bytes for entry in left)
        in_flight = _FILES * max((entry.bytes for entry in left), default=0)
        needed = needed_bytes(left)
        self._used = self._stack.enter_context(
            reserved(self._root, version, needed, limits, in_flight=min(needed, in_flight))
        )
        self._journal = Journal(path, version, durable=self._durable, keep=bool(done.files))
        self._stack.callback(self._journal.close)
        self._at = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._on_disk = file_system(folder) != "tmpfs"  # where allocating is writing
        self._bringing = ThreadPoolExecutor(_FILES, thread_name_prefix="file")
        self._settling = ThreadPoolExecutor(2, thread_name_prefix="disk")
        self._asking = ThreadPoolExecutor(_REQUESTS, thread_name_prefix="request")
        if not left:
            self._publish()

    def open(self, path: str) -> int:
        """A descriptor of a file, brought and verified before, or of the folder where the path is "".

        Raises DataError (it is not in the version, or not what the manifest says), Unreachable, NoSpace, ClusterError.
        """
        if path == FILE_NAME:
            descriptor = os.memfd_create(FILE_NAME, os.MFD_CLOEXEC)
            write(descriptor, memoryview(self._dataset.data), 0)
            return descriptor
        if not path:
            return os.open(".", _READ | os.O_DIRECTORY, dir_fd=self._at)
        if path not in self._places:
            what, where = "missing: the manifest does not name it", f"{self._dataset.source.label}/{path}"
            raise DataError(what, where=where, hint="ingest it again")
        if coming := self._wanted(self._places[path]):
            coming.result()
        return os.open(path, _READ, dir_fd=self._at)

    def finish(self) -> None:
        """Write down what is here, and begin nothing more: the process ends now."""
        self._settling.shutdown()
        self._lock.acquire()

    def _wanted(self, index: int) -> Future[None] | None:
        """The bringing of a file, begun once however many want it; None for one that is here."""
        with self._lock:
            if index in self._here:
                return None
            if index not in self._coming:
                self._coming[index] = self._bringing.submit(self._bring, index)
            return self._coming[index]

    def _bring(self, index: int) -> None:
        path = self._folder / self._files[index].path
        try:
            self._fetch(self._files[index], path)
        except BaseException as error:
            self._forget(index)
            if isinstance(error, OSError):
                raise os_error(error, path) from error
            raise
        # Who waits for it need not wait for the disk as well.
        self._settling.submit(self._settle, index)

    def _settle(self, index: int) -> None:
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
                self._journal.wrote(Written((index,), line(index, status).encode(), {}, {}))
                self._journal.flush()
                self._here.add(index)
                del self._coming[index]
                self._used(entry.bytes)
                self._bytes += entry.bytes
                self._tell(self._bytes, self._dataset.manifest.total_bytes)
                if len(self._here) == len(self._files):
                    self._publish()
        except (OSError, PitError):
            if index not in self._here:
                self._forget(index)  # the next who wants it is told; to publish is tried again by the next process

    def _forget(self, index: int) -> None:
        with self._lock:
            (self._folder / self._files[index].path).unlink(missing_ok=True)
            self._coming.pop(index, None)  # who wants it after an error has it tried again

    def _fetch(self, entry: FileEntry, path: Path) -> None:
        """Write one file, and compare what was written. Raises PitError, OSError."""
        descriptor = os.open(path, NEW, MODE)
        try:
            if self._on_disk:
                allocate(descriptor, 0, entry.bytes)
            source = self._dataset.source
            file = source.connect().open(entry.path)
            parts = [
                self._asking.submit(self._part, file, descriptor, offset, min(source.block, entry.bytes - offset))
                for offset in range(0, entry.bytes, source.block)
            ]
            wait(parts)  # all of them, also after an error: they write to the descriptor
            for part in parts:
                part.result()
            found = self._digest(descriptor, entry)
            if found != entry.digest:
                raise wrong_digest(entry, found, f"{source.label}/{entry.path}")
        finally:
            os.close(descriptor)

    def _part(self, file: SourceFile, descriptor: int, offset: int, length: int) -> None:
        view, filled = self._buffer()[:length], 0
        while filled < length:
            count = file.read_into(view[filled:], offset + filled)
            if not count:
                raise DataError(f"it ends after byte {offset + filled}", where=self._dataset.source.label)
            filled += count
        write(descriptor, view, offset)

    def _digest(self, descriptor: int, entry: FileEntry) -> str:
        """Of what the file holds now, not of what was received: the disk and the kernel are part of the way."""
        hasher, at, view = hasher_for(entry.digest), 0, self._buffer()
        while count := os.preadv(descriptor, [view], at):
            hasher.update(view[:count])
            at += count
        return hasher.text()

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
            sync_file_system(self._folder)
        new = seal(self._folder, self._dataset)
        # First, because a set without a record is one of unknown source, which is never evicted.
        records.write(root, version, source=self._dataset.source.label, n_bytes=manifest.total_bytes)
        publish_new(new, object_path(root, version), root)
        journal_path(root, version).unlink(missing_ok=True)
        self.published = True
