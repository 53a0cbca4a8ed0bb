"""Folders as streams: what goes to a site, and what comes back from one, which is believed nothing.

A stream is a plain tar, because every site has something that reads and writes it.
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
    """One thing in a stream: its name there, and the file here, the bytes, or the link that it is; else a folder."""

    name: str
    path: Path | None = None
    data: bytes | None = None
    link: str = ""


def entries_of_dir(folder: Path) -> Iterator[TarEntry]:
    """All that is in a folder, by name. Raises DataError for a link, a device, or a name that is not printable."""
    for path in sorted(folder.rglob("*")):
        kind = path.lstat().st_mode
        name = str(path.relative_to(folder))
        if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)) or not name.isprintable():
            raise DataError(f"neither a file nor a folder of a printable name: {name!r}", where=str(folder))
        yield TarEntry(name=name, path=path if stat.S_ISREG(kind) else None)


def write_tar(entries: Iterable[TarEntry], out: BinaryIO) -> int:
    """Write entries as a tar; bytes of their files. Owners stay behind, and of modes all but what is executable.

    Raises DataError for a file that shrinks while it is read, and what reading it raises.
    """
    total = 0
    with tarfile.open(fileobj=out, mode="w|", bufsize=_BLOCK) as tar:
        tar.copybufsize = _BLOCK  # type: ignore[attr-defined]  # of tarfile's own; 16 KiB without
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
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise DataError("not a file any more", where=str(path), hint="it is being changed: try again")
        info.size, info.mtime = found.st_size, found.st_mtime
        info.mode = 0o755 if found.st_mode & 0o100 else 0o644
        left = _FixedSizeReader(file, path, found.st_size)
        tar.addfile(info, left)  # type: ignore[arg-type]  # it needs no more than `read`
    return found.st_size


class _FixedSizeReader:
    """A file as long as it was: what is appended meanwhile is not sent, and what is cut off is told."""

    def __init__(self, file: BinaryIO, path: Path, size: int) -> None:
        self._file, self._path, self._left = file, path, size

    def read(self, size: int) -> bytes:
        block = self._file.read(min(size, self._left))
        if len(block) < min(size, self._left):
            raise DataError("it shrank while it was read", where=str(self._path), hint="try again")
        self._left -= len(block)
        return block


def unpack_tar(stream: BinaryIO, to: Path, *, limit: int) -> int:
    """Unpack a tar that somebody sent into a folder; bytes of its files.

    Only files and folders come through, by plain relative names, with modes of ours. Raises DataError for anything
    else, for more bytes than `limit`, and for half a tar.
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
        raise DataError(f"half an answer, or none: {error}") from error
    while stream.read(_BLOCK):  # who writes it is to end in peace
        pass
    return total


def _unpack(tar: tarfile.TarFile, member: tarfile.TarInfo, to: Path) -> None:
    name = member.name.rstrip("/")
    if not (member.isreg() or member.isdir()) or not name.isprintable() or {"", ".", ".."} & set(name.split("/")):
        raise DataError(f"it sent something that is neither file nor folder, or with a strange name: {name!r}")
    path = to / name
    if member.isdir():
        path.mkdir(parents=True, exist_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    source = tar.extractfile(member)
    assert source is not None
    left = member.size
    with path.open("xb") as file:
        while block := source.read(_BLOCK):
            file.write(block)
            left -= len(block)
    if left:
        raise DataError("half a file", where=name)


class TarPipe:
    """A pipe with a thread at one end, for a program at the other.

    is_source: whether the thread writes, and the program reads. The `with` gives the program's end, and closes it.
    """

    def __init__(self, work: Callable[[BinaryIO], object], *, is_source: bool) -> None:
        back, front = os.pipe()
        mine, theirs = (front, back) if is_source else (back, front)
        self.end: BinaryIO = os.fdopen(theirs, "rb" if is_source else "wb", buffering=0)
        self._outcome: list[object] = []
        self._failed: list[BaseException] = []
        hand = os.fdopen(mine, "wb" if is_source else "rb")
        self._thread = threading.Thread(target=self._run, args=(work, hand), daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[BinaryIO], object], hand: BinaryIO) -> None:
        try:
            with hand:
                self._outcome.append(work(hand))
        except BrokenPipeError:  # the program has its own reasons, and tells them
            pass
        except BaseException as error:  # noqa: BLE001 (raised where the result is asked for)
            self._failed.append(error)

    def __enter__(self) -> BinaryIO:
        return self.end

    def __exit__(self, *_: object) -> None:
        self.end.close()
        # Not for ever: what holds the other end open may be nobody of ours.
        self._thread.join(_JOIN_S)

    def failed(self) -> PitError | None:
        """What went wrong in the thread."""
        error = self._failed[0] if self._failed else None
        if error is None or isinstance(error, PitError):
            return error
        if isinstance(error, OSError):
            return from_os_error(error, Path(error.filename or ""))
        raise error

    def result(self) -> object:
        """What the thread's work returned; None where it was cut short."""
        return self._outcome[0] if self._outcome else None
