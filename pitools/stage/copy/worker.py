"""What one worker thread does: read a file or a range of one, hash it, write it, and compare."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from pitools.core.errors import DataError
from pitools.core.fs import allocate, os_error
from pitools.core.shared_progress import Seat
from pitools.stage.copy.journal import Written, line
from pitools.stage.copy.tasks import SMALL, Task
from pitools.stage.copy.write import clone, write, write_direct
from pitools.stage.sources.base import Source, SourceFile
from pitools.stage.sources.local import BLOCK, Folders
from pitools.store import digest as digests
from pitools.store.manifest import FileEntry

# Published versions do not change; the mode says so to whoever would edit one in place.
MODE = 0o444
NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_SHARED = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_DIRECT_BLOCK = 1 << 20


class Range(NamedTuple):
    """A range of a large file that was written."""

    file: int
    number: int
    digest: bytes


class Work(NamedTuple):
    """What all workers of one copy know. bytes_per_s: of all of them together, 0 for no limit.

    allocate: give files their blocks before they are written, which is faster than finding them one by one. clone:
    ask the file system to share the source's blocks. direct: write large files past the page cache. durable: sync
    each file. inspect: as in `Orders`.
    """

    source: Source
    files: tuple[FileEntry, ...]
    to: str
    allocate: bool
    clone: bool
    direct: bool
    durable: bool
    bytes_per_s: float
    inspect: Callable[[int, memoryview], Any] | None = None


class Copier:
    """One thread's share of the work: its reader, its buffer, and the folders it last wrote to."""

    def __init__(self, work: Work, seat: Seat) -> None:
        self._work, self._seat = work, seat
        self._reader = work.source.connect()
        self._step = max(BLOCK, work.source.block)
        # Page-aligned, as O_DIRECT wants it. Also, 16 bytes into a page, where malloc puts a large bytearray, the
        # kernel's copies take four times as long on AMD's Zen (`rep movsb` into nearly the same page offset).
        self._buffer = memoryview(mmap.mmap(-1, max(SMALL, _DIRECT_BLOCK, self._step)))
        self._folders = Folders(Path(work.to), make=True)

    def __call__(self, task: Task) -> Written | Range:
        """Copy the task's files, or its range of one; what was written."""
        if task.length < 0:
            written = Written(task.files, b"", {}, {})
            lines = "".join([self._copy(index, written) for index in task.files])
            return written._replace(lines=lines.encode())
        return self._copy_range(task.files[0], task)

    def close(self) -> None:
        """Close what is open."""
        self._folders.close()
        self._reader.close()

    def _copy(self, index: int, written: Written) -> str:
        entry = self._work.files[index]
        small = entry.bytes < SMALL
        where = f"{self._work.to}/{entry.path}"
        file = self._reader.open(entry.path)
        try:
            self._compare_size(entry, file.size)
            found = self._read(entry, file) if small else ""
            if small and self._work.inspect:
                written.inspected[index] = self._work.inspect(index, self._buffer[: entry.bytes])
            try:
                descriptor = self._create(entry.path)
            except OSError as error:
                raise os_error(error, Path(where)) from error
            try:
                if small:
                    if self._work.allocate:
                        allocate(descriptor, 0, entry.bytes)
                    write(descriptor, self._buffer[: entry.bytes], 0)
                else:
                    found = self._bring(entry, file, descriptor)
                if self._work.durable:
                    os.fsync(descriptor)
                status = os.fstat(descriptor)
            except OSError as error:
                raise os_error(error, Path(where)) from error
            finally:
                os.close(descriptor)
        finally:
            file.close()
        if entry.digest:
            return line(index, status)
        written.digests[index] = found
        return line(index, status, found)

    def _read(self, entry: FileEntry, file: SourceFile) -> str:
        """A small file into the buffer; its digest. A source that can is asked a second time when it is wrong."""
        while True:
            filled = 0
            while filled < entry.bytes:
                filled += self._must_read(entry, file, self._buffer[filled : entry.bytes], filled)
            self._count(filled)
            found = digests.of_bytes(self._buffer[: entry.bytes])
            if self._is_right(entry, found, file):
                return found

    def _bring(self, entry: FileEntry, file: SourceFile, descriptor: int) -> str:
        """A large file, shared with the source where the file system can, else copied; its digest."""
        if not (self._work.clone and clone(descriptor, file)):
            return self._stream(entry, file, descriptor)
        self._compare_size(entry, os.fstat(descriptor).st_size)  # it may have grown since it was opened
        # What is judged is the clone, which nobody writes to any more.
        hasher, at = digests.hasher_for(entry.digest), 0
        while at < entry.bytes and (count := os.preadv(descriptor, [self._buffer[:BLOCK]], at)):
            hasher.update(self._buffer[:count])
            self._count(count)
            at += count
        self._compare_size(entry, at)
        self._is_right(entry, found := hasher.text(), file)
        return found

    def _stream(self, entry: FileEntry, file: SourceFile, descriptor: int) -> str:
        while True:
            hasher = digests.hasher_for(entry.digest)
            self._pump(entry, file, descriptor, 0, entry.bytes, hasher)
            if self._is_right(entry, found := hasher.text(), file):
                return found

    def _copy_range(self, index: int, task: Task) -> Range:
        entry, number = self._work.files[index], task.offset // digests.RANGE
        where = f"{self._work.to}/{entry.path}"
        try:
            within, _, name = entry.path.rpartition("/")
            descriptor = os.open(name, _SHARED, 0o600, dir_fd=self._folders.enter(within))
        except OSError as error:
            raise os_error(error, Path(where)) from error
        try:
            if task.known and self._stands(where, task):
                return Range(index, number, task.known)
            hasher = digests.Hasher()
            file = self._reader.open(entry.path)
            try:
                self._compare_size(entry, file.size)
                self._pump(entry, file, descriptor, task.offset, task.length, hasher)
            finally:
                file.close()
            if self._work.durable:
                os.fsync(descriptor)
        except OSError as error:
            raise os_error(error, Path(where)) from error
        finally:
            os.close(descriptor)
        return Range(index, number, bytes.fromhex(hasher.text().partition(":")[2]))

    def _stands(self, where: str, task: Task) -> bool:
        """Whether a range that an earlier copy wrote is on the disk as it was written down."""
        hasher, at, end = digests.Hasher(), task.offset, task.offset + task.length
        descriptor = os.open(where, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            while at < end and (count := os.preadv(descriptor, [self._buffer[: min(BLOCK, end - at)]], at)):
                hasher.update(self._buffer[:count])
                self._seat.alive()  # nothing is written, so nothing of what is reserved is used
                at += count
        finally:
            os.close(descriptor)
        return at == end and hasher.text().endswith(task.known.hex())

    def _pump(
        self, entry: FileEntry, file: SourceFile, descriptor: int, at: int, length: int, hasher: digests.Hasher
    ) -> None:
        """Read, hash and write `length` bytes from `at` on, a buffer at a time."""
        end = at + length
        # Much at once where it goes to the disk, else what the caches hold.
        room, put = self._step, write
        if self._work.direct:
            room, put = len(self._buffer), write_direct
            fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_DIRECT)
        given = at
        while at < end:
            if self._work.allocate and at >= given:  # not more at a time than the hold leaves free
                given = min(end, at + digests.RANGE)
                allocate(descriptor, at, given - at)
            filled, want = 0, min(room, end - at)
            while filled < want:
                block = self._buffer[filled : min(filled + self._step, want)]
                count = self._must_read(entry, file, block, at + filled)
                hasher.update(block[:count])
                filled += count
            put(descriptor, self._buffer[:filled], at)
            self._count(filled)
            at += filled

    def _must_read(self, entry: FileEntry, file: SourceFile, view: memoryview, offset: int) -> int:
        count = file.read_into(view, offset)
        if not count:
            self._compare_size(entry, offset)
        return count

    def _count(self, count: int) -> None:
        self._seat.moved(count)
        if self._work.bytes_per_s:
            self._seat.wait(self._work.bytes_per_s)

    def _create(self, path: str) -> int:
        within, _, name = path.rpartition("/")
        at = self._folders.enter(within)
        try:
            return os.open(name, NEW, MODE, dir_fd=at)
        except FileExistsError:  # an interrupted copy left it, not known to be whole
            os.unlink(name, dir_fd=at)
            return os.open(name, NEW, MODE, dir_fd=at)

    def _is_right(self, entry: FileEntry, found: str, file: SourceFile) -> bool:
        """Whether to keep what was read; False to read it again, from elsewhere. Raises DataError."""
        if not entry.digest or found == entry.digest:
            return True
        distrust = getattr(file, "distrust", None)
        if distrust and distrust():
            return False
        raise wrong_digest(entry, found, f"{self._work.source.label}/{entry.path}")

    def _compare_size(self, entry: FileEntry, size: int) -> None:
        if size != entry.bytes:
            what = f"the manifest says {entry.bytes} bytes, the file has {size}"
            hint = "it was changed or cut short: run `check` on the source"
            raise DataError(what, where=f"{self._work.source.label}/{entry.path}", hint=hint)


def wrong_digest(entry: FileEntry, found: str, where: str) -> DataError:
    """What to say of content that is not what the manifest says."""
    what = f"the manifest says {entry.digest}, the content is {found}"
    return DataError(what, where=where, hint="it was changed or is damaged: run `check` on the source")
