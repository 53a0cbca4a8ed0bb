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

from pitools.core.fs import os_error
from pitools.stage.copy.tasks import range_count
from pitools.store.manifest import FileEntry

_SCHEMA = "pit.stage-journal/1"


class Written(NamedTuple):
    """Files that were written and verified, by their place in the manifest.

    lines: what the journal says of them, made by who wrote them, so that the parent of all has little to do.
    digests: what was found, for files of which the manifest has none. inspected: what `Orders.inspect` said of files.
    """

    files: tuple[int, ...]
    lines: bytes
    digests: dict[int, str]
    inspected: dict[int, Any]


def line(file: int, found: os.stat_result, digest: str = "") -> str:
    """The journal's line of a file that was written; digest: where the manifest has none."""
    return f"f {file} {found.st_ino} {found.st_ctime_ns} {digest}\n"


class Done(NamedTuple):
    """What an earlier copy left: digests of whole files by index ("" as in the manifest), and of ranges."""

    files: dict[int, str]
    ranges: dict[int, dict[int, bytes]]


def read(path: Path, folder: Path, version: str, files: tuple[FileEntry, ...]) -> Done:
    """What is done of this version in `folder`; nothing when the journal is another's, torn or stale."""
    done = Done({}, {})
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
                _take_file(done, folder, files, fields)
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
    return header[:2] == [_SCHEMA, version] and (header[2:] == [boot(), "volatile"] or header[3:] == ["durable"])


def _take_file(done: Done, folder: Path, files: tuple[FileEntry, ...], fields: list[str]) -> None:
    index, inode, ctime_ns = (int(field) for field in fields[:3])
    if index < 0:
        return
    try:
        found = os.stat(f"{folder}/{files[index].path}", follow_symlinks=False)  # noqa: PTH116 - a hundred thousand
    except OSError:
        return
    if (found.st_ino, found.st_ctime_ns, found.st_size) == (inode, ctime_ns, files[index].bytes):
        done.files[index] = fields[3]


def boot() -> str:
    """This boot of this machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


class Journal:
    """The journal being written; one writer, who holds the version's lock."""

    def __init__(self, path: Path, version: str, *, durable: bool, keep: bool) -> None:
        """keep: go on with the one that is there, of the same header; else begin anew. Raises NoSpace, ClusterError."""
        self._path, self._lines = path, bytearray()
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_APPEND
        try:
            self._descriptor = os.open(path, flags if keep else flags | os.O_TRUNC, 0o600)
            if keep:  # a torn last line is not there, and must not be ended by the next one
                os.ftruncate(self._descriptor, path.read_bytes().rfind(b"\n") + 1)
        except OSError as error:
            raise os_error(error, path) from error
        if not keep:
            self._lines += f"{_SCHEMA} {version} {boot()} {'durable' if durable else 'volatile'}\n".encode()
            try:
                self.flush()
            except BaseException:
                os.close(self._descriptor)
                raise

    def wrote(self, written: Written) -> None:
        """Files are written and verified, and on the disk where the journal is durable."""
        self._lines += written.lines

    def wrote_range(self, file: int, number: int, digest: bytes) -> None:
        """A range of a large file is written."""
        self._lines += f"r {file} {number} {digest.hex()}\n".encode()

    def flush(self) -> None:
        """Hand the lines to the kernel, which keeps them when this process is killed. Raises NoSpace, ClusterError."""
        try:
            while self._lines:
                del self._lines[: os.write(self._descriptor, self._lines)]
        except OSError as error:
            raise os_error(error, self._path) from error

    def close(self) -> None:
        """Write what is left, and close."""
        try:
            self.flush()
        finally:
            os.close(self._descriptor)
