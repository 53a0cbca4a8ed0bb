"""Send folders to a site and receive them as plain tar streams, which every site can read and write.

Received streams are not trusted: every member is validated.
"""

from __future__ import annotations

import io
import os
import stat
import tarfile
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from pitools.core.errors import DataError, PitError
from pitools.core.fs import from_os_error
from pitools.core.units import format_size

_BLOCK = 1 << 20
_JOIN_S = 10.0
_MAX_MEMBERS = 1_000_000


class TarEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A member of a stream: a file (`path`), bytes (`data`), a symbolic link (`link`), or a folder (none of them)."""

    name: str
    path: Path | None = None
    data: bytes | None = None
    link: str = ""


def entries_of_dir(folder: Path) -> Iterator[TarEntry]:
    """Yield the entries of a folder, sorted by path. Raises DataError for a link, a device or an unprintable name."""
    for path in sorted(folder.rglob("*")):
        kind = path.lstat().st_mode
        name = str(path.relative_to(folder))
        if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)) or not name.isprintable():
            raise DataError(f"neither a file nor a folder of a printable name: {name!r}", where=str(folder))
        yield TarEntry(name=name, path=path if stat.S_ISREG(kind) else None)


def write_tar(entries: Iterable[TarEntry], out: BinaryIO) -> int:
    """Write entries as a tar without owners; of modes only the executable bit is kept. Returns the bytes of the files.

    Raises DataError for a file that shrinks during the read, and the errors of reading.
    """
    total = 0
    with tarfile.open(fileobj=out, mode="w|", bufsize=_BLOCK) as tar:
        tar.copybufsize = _BLOCK  # type: ignore[attr-defined]  # tarfile's copy buffer; default 16 KiB
        for entry in entries:
            info = tarfile.TarInfo(entry.name)
            if entry.path is not None:
                total += _write_file(tar, info, entry.path)
                continue
            if entry.data is not None:
                info.size, info.mode = len(entry.data), 0o644
            elif entry.link:
                info.type, info.linkname = tarfile.SYMTYPE, entry.link
            else:
                info.type, info.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(info, io.BytesIO(entry.data or b""))
            total += len(entry.data or b"")
    return total


def _write_file(tar: tarfile.TarFile, info: tarfile.TarInfo, path: Path) -> int:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise from_os_error(error, path) from error
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise DataError("no longer a file", where=str(path), hint="another process changes it: try again")
        info.size, info.mtime = status.st_size, status.st_mtime
        info.mode = 0o755 if status.st_mode & 0o100 else 0o644
        reader = _FixedSizeReader(file, path, status.st_size)
        tar.addfile(info, reader)  # type: ignore[arg-type]  # only `read` is needed
    return status.st_size


class _FixedSizeReader:
    """Reads a file up to its initial size. Raises DataError if the file shrinks."""

    def __init__(self, file: BinaryIO, path: Path, size: int) -> None:
        self._file, self._path, self._remaining = file, path, size

    def read(self, size: int) -> bytes:
        block = self._file.read(min(size, self._remaining))
        if len(block) < min(size, self._remaining):
            raise DataError("shrank during the read", where=str(self._path), hint="try again")
        self._remaining -= len(block)
        return block


def unpack_tar(stream: BinaryIO, to: Path, *, limit: int) -> int:
    """Unpack a received tar into a folder. Returns the bytes of its files.

    Only files and folders with plain relative names are accepted, with default modes. Raises DataError for any other
    member, for more bytes than `limit`, and for a truncated tar.
    """
    total = 0
    try:
        with tarfile.open(fileobj=stream, mode="r|", bufsize=_BLOCK) as tar:
            for count, member in enumerate(tar):
                total += member.size if member.isreg() else 0
                if total > limit or count >= _MAX_MEMBERS:
                    raise DataError(f"more than {format_size(limit)}, or {_MAX_MEMBERS} files", where=member.name)
                _unpack(tar, member, to)
    except tarfile.TarError as error:
        raise DataError(f"truncated or missing output: {error}") from error
    while stream.read(_BLOCK):  # drain, so that the writer can finish
        pass
    return total


def _unpack(tar: tarfile.TarFile, member: tarfile.TarInfo, to: Path) -> None:
    name = member.name.rstrip("/")
    if not (member.isreg() or member.isdir()) or not name.isprintable() or {"", ".", ".."} & set(name.split("/")):
        raise DataError(f"received a member that is no file or folder, or has an invalid name: {name!r}")
    path = to / name
    if member.isdir():
        path.mkdir(parents=True, exist_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    source = tar.extractfile(member)
    assert source is not None
    remaining = member.size
    with path.open("xb") as file:
        while block := source.read(_BLOCK):
            file.write(block)
            remaining -= len(block)
    if remaining:
        raise DataError("truncated file", where=name)


class TarPipe:
    """A pipe between a thread and a program.

    work: run in the thread with its end. is_source: the thread writes and the program reads. `with` returns the
    program's end and closes it.
    """

    def __init__(self, work: Callable[[BinaryIO], object], *, is_source: bool) -> None:
        read_end, write_end = os.pipe()
        own_end, program_end = (write_end, read_end) if is_source else (read_end, write_end)
        self.end: BinaryIO = os.fdopen(program_end, "rb" if is_source else "wb", buffering=0)
        self._outcome: list[object] = []
        self._failed: list[BaseException] = []
        stream = os.fdopen(own_end, "wb" if is_source else "rb")
        self._thread = threading.Thread(target=self._run, args=(work, stream), daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[BinaryIO], object], stream: BinaryIO) -> None:
        try:
            with stream:
                self._outcome.append(work(stream))
        except BrokenPipeError:  # the program reports its own error
            pass
        except BaseException as error:  # noqa: BLE001 (raised by `failed`)
            self._failed.append(error)

    def __enter__(self) -> BinaryIO:
        return self.end

    def __exit__(self, *_: object) -> None:
        self.end.close()
        # With a time-out: a foreign process may hold the other end open.
        self._thread.join(_JOIN_S)

    def failed(self) -> PitError | None:
        """Return the thread's error, or None."""
        error = self._failed[0] if self._failed else None
        if error is None or isinstance(error, PitError):
            return error
        if isinstance(error, OSError):
            return from_os_error(error, Path(error.filename or ""))
        raise error

    def result(self) -> object:
        """Return the result of `work`, or None if it did not finish."""
        return self._outcome[0] if self._outcome else None
