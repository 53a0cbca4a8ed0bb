"""What collectors share: what each is asked for, and small files, of which None is what cannot be read or parsed."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

_MAX_BYTES = 1 << 22
_READ_BYTES = 1 << 16  # at a time: /proc/sys refuses 4 MiB


class Query(NamedTuple):
    """What a collector is asked for.

    names: what checks name for its table. hung: the subjects that did not answer, to be left out. root: the folder of
    /proc, /sys, /dev and /etc. node: the node's name in Slurm; default: the host's. runs_programs: journalctl may be
    run.
    """

    names: Collection[str] = ()
    hung: Collection[str] = ()
    root: Path = Path("/")
    node: str = ""
    runs_programs: bool = True

    @property
    def proc(self) -> Path:
        """The folder of /proc."""
        return self.root / "proc"

    @property
    def sys(self) -> Path:
        """The folder of /sys."""
        return self.root / "sys"

    def names_left(self) -> list[str]:
        """Return the names that are to be read, in order."""
        return sorted(set(self.names).difference(self.hung))


def read_bytes(path: Path | str, limit: int = _MAX_BYTES) -> bytes | None:
    """Return a file's first bytes; None if it cannot be read."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError):
        return None
    try:
        data = part = os.read(file, min(limit, _READ_BYTES))
        while part and len(data) < limit:  # one read returns at most a page of many of these files
            part = os.read(file, min(limit - len(data), _READ_BYTES))
            data += part
    except OSError:  # a driver's answer, as ENODEV of a sensor that sleeps
        return None
    finally:
        os.close(file)
    return data


def read_text(path: Path | str, limit: int = _MAX_BYTES) -> str | None:
    """Return a file's text without white space around it; None if it cannot be read."""
    data = read_bytes(path, limit)
    return None if data is None else data.decode(errors="replace").strip()


def read_int(path: Path | str) -> int | None:
    """Return a file's number; None if it cannot be read, or is none."""
    return to_int(read_text(path, limit=64))


def read_scaled(path: Path | str, divisor: float) -> float | None:
    """Return a file's number in another unit; None if it cannot be read, or is none."""
    number = read_int(path)
    return None if number is None else number / divisor


def read_measure(path: Path | str) -> float | None:
    """Return the number that a file begins with, as of `16.0 GT/s PCIe`; None if it cannot be read, or is none."""
    return to_float((read_text(path, limit=64) or "").partition(" ")[0])


def read_flag(path: Path | str) -> bool | None:
    """Return whether a file's number is not 0; None if it cannot be read, or is none."""
    number = read_int(path)
    return None if number is None else bool(number)


def to_int(text: str | None) -> int | None:
    """Return a text's whole number, in 64 bits; None if it is none."""
    try:
        number = int(text) if text is not None else None
    except ValueError:
        return None
    return number if number is not None and -(1 << 63) <= number < 1 << 64 else None


def to_float(text: str | None) -> float | None:
    """Return a text's finite number; None if it is none."""
    try:
        number = float(text) if text is not None else None
    except ValueError:
        return None
    return number if number is not None and abs(number) < float("inf") else None


def list_names(folder: Path | str) -> list[str]:
    """Return the sorted names in a folder; none if it cannot be read."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []
