"""The journal of a partial copy: finished, verified files, so that an interrupted copy can be resumed.

<root>/.tmp/<version>.journal     text; a last line without a newline is ignored
    pit.stage-journal/1 <version> <boot> <durable|volatile>
    f <index> <inode> <ctime> <digest>        a finished file; index: in the manifest; digest: if the manifest has none
    r <index> <range> <hex>                   a range of a large file, and its digest
    d <index>                                 the file was removed: ranges of it that are listed above are not written

A file is trusted while its inode, size and change time are those recorded. A written range is read again and compared.
After a crash of the machine volatile entries, whose bytes may not be on the disk, are ignored.
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
    """Files that were written and verified, by manifest index.

    lines: their journal lines, formatted by the worker to relieve the parent. digests: of files for which the manifest
    has none. inspected: results of `CopyOptions.inspect`.
    """

    files: tuple[int, ...]
    lines: bytes
    digests: dict[int, str]
    inspected: dict[int, Any]


def journal_line(file: int, stat: os.stat_result, digest: str = "") -> str:
    """Return the journal's line of a finished file. digest: of a file for which the manifest has none."""
    return f"f {file} {stat.st_ino} {stat.st_ctime_ns} {digest}\n"


class FinishedFiles(NamedTuple):
    """The result of an earlier copy: digests of whole files by index ("" if in the manifest), and of ranges."""

    files: dict[int, str]
    ranges: dict[int, dict[int, bytes]]


def read_journal(path: Path, folder: Path, version: str, files: tuple[FileEntry, ...]) -> FinishedFiles:
    """Read the finished files of this version in `folder`; none when the journal is of another version, torn or
    stale.
    """
    finished = FinishedFiles({}, {})
    try:
        lines = path.read_bytes().decode("ascii", "replace").split("\n")[:-1]
    except OSError:
        return finished
    if not lines or not _is_valid_header(lines[0].split(" "), version):
        return finished
    for line in lines[1:]:
        kind, *fields = line.split(" ")
        try:
            if kind == "f":
                _add_finished_file(finished, folder, files, fields)
            elif kind == "r":
                index, number = int(fields[0]), int(fields[1])
                digest = bytes.fromhex(fields[2])
                if 0 <= number < range_count(files[index]) and index >= 0 and len(digest) == 16:
                    finished.ranges.setdefault(index, {})[number] = digest
            elif kind == "d":
                finished.ranges.pop(int(fields[0]), None)
        except (ValueError, IndexError):
            continue
    for index in finished.ranges.keys() & finished.files.keys():
        del finished.ranges[index]
    return finished


def _is_valid_header(header: list[str], version: str) -> bool:
    return header[:2] == [_SCHEMA, version] and (header[2:] == [boot_id(), "volatile"] or header[3:] == ["durable"])


def _add_finished_file(finished: FinishedFiles, folder: Path, files: tuple[FileEntry, ...], fields: list[str]) -> None:
    index, inode, ctime_ns = (int(field) for field in fields[:3])
    if index < 0:
        return
    try:
        status = os.stat(f"{folder}/{files[index].path}", follow_symlinks=False)  # noqa: PTH116 - a hundred thousand
    except OSError:
        return
    if (status.st_ino, status.st_ctime_ns, status.st_size) == (inode, ctime_ns, files[index].bytes):
        finished.files[index] = fields[3]


def boot_id() -> str:
    """Return the kernel's boot id."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


class CopyJournal:
    """The journal being written, by the process that holds the version's lock."""

    def __init__(self, path: Path, version: str, *, durable: bool, append: bool) -> None:
        """Open the journal. append: continue one with the same header; else start a new one. Raises NoSpace,
        ClusterError.
        """
        self._path, self._lines = path, bytearray()
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_APPEND
        try:
            self._descriptor = os.open(path, flags if append else flags | os.O_TRUNC, 0o600)
            if append:  # cut off a torn last line
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
        """Add files that are written and verified, and synced if the journal is durable."""
        self._lines += written.lines

    def add_range(self, file: int, number: int, digest: bytes) -> None:
        """Add a written range of a large file."""
        self._lines += f"r {file} {number} {digest.hex()}\n".encode()

    def drop_ranges(self, file: int) -> None:
        """Take back the ranges of a large file, which is begun again."""
        self._lines += f"d {file}\n".encode()

    def flush(self) -> None:
        """Write the lines to the file, where they survive this process. Raises NoSpace, ClusterError."""
        try:
            while self._lines:
                del self._lines[: os.write(self._descriptor, self._lines)]
        except OSError as error:
            raise from_os_error(error, self._path) from error

    def close(self) -> None:
        """Flush and close."""
        try:
            self.flush()
        finally:
            os.close(self._descriptor)
