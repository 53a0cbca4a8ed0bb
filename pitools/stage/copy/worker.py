"""One worker thread of a copy: read a file or a range, hash, write and compare it."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from pitools.core.errors import DataError
from pitools.core.fs import allocate, from_os_error
from pitools.core.shared_progress import WorkerSlot
from pitools.stage.copy.journal import WrittenFiles, journal_line
from pitools.stage.copy.tasks import SMALL_FILE_BYTES, CopyTask
from pitools.stage.copy.write import clone_file, write_all, write_direct
from pitools.stage.sources.base import Source, SourceFile
from pitools.stage.sources.local import READ_BYTES, DirDescriptors
from pitools.store import digest as digests
from pitools.store.manifest import FileEntry

# Published versions must not be edited in place.
FILE_MODE = 0o444
CREATE_FLAGS = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_SHARED_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_DIRECT_BLOCK = 1 << 20


class RangeDigest(NamedTuple):
    """A written range of a large file, and its digest."""

    file: int
    number: int
    digest: bytes


class CopyJob(NamedTuple):
    """The settings of one copy, for all workers. bytes_per_s: of all workers together, 0 for no limit.

    allocate: allocate blocks before writing, which is faster than one by one. clone: share the source's blocks
    (reflink). direct: write large files past the page cache. syncs_each_file: as it is written. inspect: as in
    `CopyOptions`.
    """

    source: Source
    files: tuple[FileEntry, ...]
    target: str
    allocate: bool
    clone: bool
    direct: bool
    syncs_each_file: bool
    bytes_per_s: float
    inspect: Callable[[int, memoryview], Any] | None = None


class CopyWorker:
    """One thread of a copy: its reader, its buffer, and the folders it last wrote to."""

    def __init__(self, job: CopyJob, slot: WorkerSlot) -> None:
        self._job, self._slot = job, slot
        self._reader = job.source.connect()
        self._block_bytes = max(READ_BYTES, job.source.block)
        # Page-aligned, as O_DIRECT requires. Also, at 16 bytes into a page, where malloc puts a large bytearray, the
        # kernel's copies take four times as long on AMD's Zen (`rep movsb` into nearly the same page offset).
        self._buffer = memoryview(mmap.mmap(-1, max(SMALL_FILE_BYTES, _DIRECT_BLOCK, self._block_bytes)))
        self._folders = DirDescriptors(Path(job.target), create=True)

    def __call__(self, task: CopyTask) -> WrittenFiles | RangeDigest:
        """Copy the task's files, or its range of one; return what was written."""
        if task.length < 0:
            written = WrittenFiles(task.files, b"", {}, {})
            lines = "".join([self._copy(index, written) for index in task.files])
            return written._replace(lines=lines.encode())
        return self._copy_range(task.files[0], task)

    def close(self) -> None:
        """Close the reader and the folders."""
        self._folders.close()
        self._reader.close()

    def _copy(self, index: int, written: WrittenFiles) -> str:
        entry = self._job.files[index]
        small = entry.bytes < SMALL_FILE_BYTES
        where = f"{self._job.target}/{entry.path}"
        file = self._reader.open(entry.path)
        try:
            self._compare_size(entry, file.size)
            digest = self._read(entry, file) if small else ""
            if small and self._job.inspect:
                written.inspected[index] = self._job.inspect(index, self._buffer[: entry.bytes])
            try:
                descriptor = self._create(entry.path)
            except OSError as error:
                raise from_os_error(error, Path(where)) from error
            try:
                if small:
                    if self._job.allocate:
                        allocate(descriptor, 0, entry.bytes)
                    write_all(descriptor, self._buffer[: entry.bytes], 0)
                else:
                    digest = self._copy_large(entry, file, descriptor)
                if self._job.syncs_each_file:
                    os.fsync(descriptor)
                status = os.fstat(descriptor)
            except OSError as error:
                raise from_os_error(error, Path(where)) from error
            finally:
                os.close(descriptor)
        finally:
            file.close()
        if entry.digest:
            return journal_line(index, status)
        written.digests[index] = digest
        return journal_line(index, status, digest)

    def _read(self, entry: FileEntry, file: SourceFile) -> str:
        """Read a small file into the buffer; return its digest. A wrong one is read again if the source has
        alternatives.
        """
        while True:
            filled = 0
            while filled < entry.bytes:
                filled += self._read_exactly(entry, file, self._buffer[filled : entry.bytes], filled)
            self._count_bytes(filled)
            digest = digests.digest_bytes(self._buffer[: entry.bytes])
            if self._accept_digest(entry, digest, file):
                return digest

    def _copy_large(self, entry: FileEntry, file: SourceFile, descriptor: int) -> str:
        """Clone a large file if the file system can, else copy it; return its digest."""
        if not (self._job.clone and clone_file(descriptor, file)):
            return self._stream(entry, file, descriptor)
        self._compare_size(entry, os.fstat(descriptor).st_size)  # it may have grown since it was opened
        # Verify the clone, which no process writes to any more.
        hasher, offset = digests.hasher_for(entry.digest), 0
        while offset < entry.bytes and (count := os.preadv(descriptor, [self._buffer[:READ_BYTES]], offset)):
            hasher.update(self._buffer[:count])
            self._count_bytes(count)
            offset += count
        self._compare_size(entry, offset)
        self._accept_digest(entry, digest := hasher.digest(), file)
        return digest

    def _stream(self, entry: FileEntry, file: SourceFile, descriptor: int) -> str:
        while True:
            hasher = digests.hasher_for(entry.digest)
            self._copy_bytes(entry, file, descriptor, 0, entry.bytes, hasher)
            if self._accept_digest(entry, digest := hasher.digest(), file):
                return digest

    def _copy_range(self, index: int, task: CopyTask) -> RangeDigest:
        entry, number = self._job.files[index], task.offset // digests.RANGE_BYTES
        where = f"{self._job.target}/{entry.path}"
        try:
            parent_path, _, name = entry.path.rpartition("/")
            descriptor = os.open(name, _SHARED_FLAGS, 0o600, dir_fd=self._folders.open_dir(parent_path))
        except OSError as error:
            raise from_os_error(error, Path(where)) from error
        try:
            if task.expected_digest and self._is_range_written(where, task):
                return RangeDigest(index, number, task.expected_digest)
            hasher = digests.Hasher()
            file = self._reader.open(entry.path)
            try:
                self._compare_size(entry, file.size)
                self._copy_bytes(entry, file, descriptor, task.offset, task.length, hasher)
            finally:
                file.close()
            if self._job.syncs_each_file:
                os.fsync(descriptor)
        except OSError as error:
            raise from_os_error(error, Path(where)) from error
        finally:
            os.close(descriptor)
        return RangeDigest(index, number, bytes.fromhex(hasher.digest().partition(":")[2]))

    def _is_range_written(self, where: str, task: CopyTask) -> bool:
        """Whether a range written by an earlier copy still has its journalled digest."""
        hasher, offset, end = digests.Hasher(), task.offset, task.offset + task.length
        descriptor = os.open(where, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            while offset < end and (
                count := os.preadv(descriptor, [self._buffer[: min(READ_BYTES, end - offset)]], offset)
            ):
                hasher.update(self._buffer[:count])
                self._slot.heartbeat()  # nothing is written, so no reserved space is used
                offset += count
        finally:
            os.close(descriptor)
        return offset == end and hasher.digest().endswith(task.expected_digest.hex())

    def _copy_bytes(
        self, entry: FileEntry, file: SourceFile, descriptor: int, offset: int, length: int, hasher: digests.Hasher
    ) -> None:
        """Read, hash and write `length` bytes from `offset`, a buffer at a time."""
        end = offset + length
        # Large writes for O_DIRECT, else blocks that fit the caches.
        capacity, write = self._block_bytes, write_all
        if self._job.direct:
            capacity, write = len(self._buffer), write_direct
            fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_DIRECT)
        allocated = offset
        while offset < end:
            if self._job.allocate and offset >= allocated:  # at most the in-flight bytes of the reservation
                allocated = min(end, offset + digests.RANGE_BYTES)
                allocate(descriptor, offset, allocated - offset)
            filled, wanted_bytes = 0, min(capacity, end - offset)
            while filled < wanted_bytes:
                block = self._buffer[filled : min(filled + self._block_bytes, wanted_bytes)]
                count = self._read_exactly(entry, file, block, offset + filled)
                hasher.update(block[:count])
                filled += count
            write(descriptor, self._buffer[:filled], offset)
            self._count_bytes(filled)
            offset += filled

    def _read_exactly(self, entry: FileEntry, file: SourceFile, view: memoryview, offset: int) -> int:
        count = file.read_into(view, offset)
        if not count:
            self._compare_size(entry, offset)
        return count

    def _count_bytes(self, count: int) -> None:
        self._slot.add_bytes(count)
        if self._job.bytes_per_s:
            self._slot.wait_for_bandwidth(self._job.bytes_per_s)

    def _create(self, path: str) -> int:
        parent_path, _, name = path.rpartition("/")
        parent = self._folders.open_dir(parent_path)
        try:
            return os.open(name, CREATE_FLAGS, FILE_MODE, dir_fd=parent)
        except FileExistsError:  # left by an interrupted copy, and perhaps incomplete
            os.unlink(name, dir_fd=parent)
            return os.open(name, CREATE_FLAGS, FILE_MODE, dir_fd=parent)

    def _accept_digest(self, entry: FileEntry, digest: str, file: SourceFile) -> bool:
        """Whether to keep the content; False to read it again from elsewhere. Raises DataError."""
        if not entry.digest or digest == entry.digest:
            return True
        distrust = getattr(file, "distrust", None)
        if distrust and distrust():
            return False
        raise digest_error(entry, digest, f"{self._job.source.label}/{entry.path}")

    def _compare_size(self, entry: FileEntry, size: int) -> None:
        if size != entry.bytes:
            message = f"{size} bytes (expected {entry.bytes}, as in the manifest)"
            hint = "the file was changed or cut short: run `check` on the source"
            raise DataError(message, where=f"{self._job.source.label}/{entry.path}", hint=hint)


def digest_error(entry: FileEntry, digest: str, where: str) -> DataError:
    """Return the error of content whose digest is not the manifest's."""
    message = f"digest {digest} (expected {entry.digest}, as in the manifest)"
    return DataError(message, where=where, hint="the file was changed or is damaged: run `check` on the source")
