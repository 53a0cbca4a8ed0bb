"""A journal: a file of JSON Lines that grows by one record at a time, and whose lock is its writer's.

A line that a crash or a full disk truncated was never acted on: a reader leaves it out, and the next append removes it.
Another damaged line stays where it is: its place says which records it may belong with.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from pitools.core.errors import DataError
from pitools.core.fs import from_os_error, fsync_dir
from pitools.core.record import Record, decode_json

T = TypeVar("T", bound=Record)


class DamagedLine(NamedTuple):
    """A line that is no record. number: from 1. problem: why it is none."""

    number: int
    data: bytes
    problem: str


def read_lines(path: Path, kind: type[T]) -> list[T | DamagedLine]:
    """Return the complete lines, as records or damaged ones; [] without a file. Raises PitError."""
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise from_os_error(error, path) from error
    return [_decode_line(line, number, kind) for number, line in enumerate(lines, 1)]


def _decode_line(line: bytes, number: int, kind: type[T]) -> T | DamagedLine:
    try:
        return decode_json(line, kind)
    except msgspec.DecodeError as error:
        return DamagedLine(number, line, str(error))


def read_journal(path: Path, kind: type[T]) -> list[T]:
    """Return the records of the complete lines; [] without a file. Raises DataError for a damaged line, PitError."""
    records: list[T] = []
    for line in read_lines(path, kind):
        if isinstance(line, DamagedLine):
            place = f"{path}:{line.number}"
            raise DataError(f"not a line of a journal of {kind.__name__}: {line.problem}", where=place)
        records.append(line)
    return records


def append_record(path: Path, record: Record, *, mode: int = 0o600, durable: bool = True) -> None:
    """Append a record. durable: it survives power loss.

    Raises PitError, NoSpace too: readers find the journal as it was, or, after a failed fsync, perhaps with the record,
    which power loss may take back.
    """
    line = msgspec.json.encode(record) + b"\n"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, mode)
        try:
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                os.ftruncate(descriptor, path.read_bytes().rfind(b"\n") + 1)
            if os.write(descriptor, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            if durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if not size:
            fsync_dir(path.parent)
    except OSError as error:
        raise from_os_error(error, path) from error
