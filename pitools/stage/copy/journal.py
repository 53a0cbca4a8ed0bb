"""What of an unfinished copy is done and verified, so that an interrupted one goes on where it stopped.

<root>/.tmp/<version>.journal     text; a last line without its end is not there
    pit.stage-journal/1 <version> <boot> <durable|volatile>
    f <index> <inode> <ctime> <digest>        a whole file, by its place in the manifest; its digest where that has none
    r <index> <range> <hex>                   a range of a large file, and its digest

A file is believed only while it is the very file that was written: its inode, size and change time. A range is read
again where it was written, and compared. After a crash of the machine, volatile entries, whose bytes were not yet on
the disk when they were written down, count for nothing.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

from pitools.core.fs import from_os_error
from pitools.stage.copy.tasks import range_count
from pitools.store.manifest import FileEntry

_SCHEMA = "pit.stage-journal/1"


class WrittenFiles(NamedTuple):
    """Files that were written and verified, by their place in the manifest.

    lines: what the journal says of them, made by who wrote them, so that the parent of all has little to do.
    digests: what was found, for files of which the manifest has none. inspected: results of `CopyOptions.inspect`.
    """

    files: tuple[int, ...]
    lines: bytes
    digests: dict[int, str]
    inspected: dict[int, Any]


def journal_line(file: int, stat: os.stat_result, digest: str = "") -> str:
    """Return the journal's line of a written file. digest: of a file for which the manifest has none."""
    return f"f {file} {stat.st_ino} {stat.st_ctime_ns} {digest}\n"


class FinishedFiles(NamedTuple):
    """What an earlier copy left: digests of whole files by index ("" as in the manifest), and of ranges."""

    files: dict[int, str]
    ranges: dict[int, dict[int, bytes]]


def read_journal(path: Path, folder: Path, version: str, files: tuple[FileEntry, ...]) -> FinishedFiles:
    """Read what is done of this version in `folder`; nothing when the journal is another's, torn or stale."""
    done = FinishedFiles({}, {})
    try:
        lines = path.read_bytes().decode("ascii", "replace").split("\n")[:-1]
    except OSError:
        return done
    if not lines or not _is_valid(lines[0].split(" "), version):
        return done
    for line in lines[1:]:
        kind, *fields = line.split(" ")
        try:
            if kind == "f":
                _accept_file(done, folder, files, fields)
            elif kind == "r":
                index, number = int(fields[0]), int(fields[1])
                digest = bytes.fromhex(fields[2])
                if 0 <= number < range_count(files[index]) and index >= 0 and len(digest) == 16:
                    done.ranges.setdefault(index, {})[number] = digest
        except (ValueError, IndexError):
            continue
    for index in done.ranges.keys() & done.files.keys():
        del done.ranges[index]
    return done


def _is_valid(header: list[str], version: str) -> bool:
    return header[:2] == [_SCHEMA, version] and (header[2:] == [boot_id(), "volatile"] or header[3:] == ["durable"])


def _accept_file(done: FinishedFiles, folder: Path, files: tuple[FileEntry, ...], fields: list[str]) -> None:
    index, inode, ctime_ns = (int(field) for field in fields[:3])
    if index < 0:
        return
    try:
        status = os.stat(f"{folder}/{files[index].path}", follow_symlinks=False)  # noqa: PTH116 - a hundred thousand
    except OSError:
        return
    if (status.st_ino, status.st_ctime_ns, status.st_size) == (inode, ctime_ns, files[index].bytes):
        done.files[index] = fields[3]


def boot_id() -> str:
    """Return the kernel's boot id."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


class CopyJournal:
    """The journal being written; one writer, who holds the version's lock."""

    def __init__(self, path: Path, version: str, *, durable: bool, append: bool) -> None:
        """Open it. append: continue a journal of the same header; else begin anew. Raises NoSpace, ClusterError."""
        self._path, self._lines = path, bytearray()
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_APPEND
        try:
            self._descriptor = os.open(path, flags if append else flags | os.O_TRUNC, 0o600)
            if append:  # a torn last line is not there, and must not be ended by the next one
                os.ftruncate(self._descriptor, path.read_bytes().rfind(b"\n") + 1)
        except OSError as error:
            raise from_os_error(error, path) from error
        if not append:
            self._lines += f"{_SCHEMA} {version} {boot_id()} {'durable' if durable else 'volatile'}\n".encode()
            try:
                self.flush()
            except BaseException:
                os.close(self._descriptor)
                raise

    def add_files(self, written: WrittenFiles) -> None:
        """Add files that are written and verified, and synced where the journal is durable."""
        self._lines += written.lines

    def add_range(self, file: int, number: int, digest: bytes) -> None:
        """Add a written range of a large file."""
        self._lines += f"r {file} {number} {digest.hex()}\n".encode()

    def flush(self) -> None:
        """Write the lines to the file, where they outlive this process. Raises NoSpace, ClusterError."""
        try:
            while self._lines:
                del self._lines[: os.write(self._descriptor, self._lines)]
        except OSError as error:
            raise from_os_error(error, self._path) from error

    def close(self) -> None:
        """Write what is left, and close."""
        try:
            self.flush()
        finally:
            os.close(self._descriptor)
