"""Bounded reads of untrusted files, and text from them that is safe to print on a terminal."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from pitools.core.fs import open_regular

MAX_LINE = 1000  # characters of a line that are searched
MAX_SHOWN = 300  # characters of a line that are kept
_ESCAPES = re.compile(rb"\x1b\[[0-?]{0,64}[ -/]{0,16}[@-~]|\x1b\][^\x07\x1b\n]{0,512}(?:\x07|\x1b\\)?|\x1b[@-_]?")


class LogText(NamedTuple):
    """A part of a file as text. line: the number of its first line, 0 if the part does not begin the file."""

    text: str
    line: int
    size: int
    mtime: float


def read_head(path: Path, max_bytes: int) -> LogText | None:
    """Return the first bytes of a file; None if it cannot be read."""
    return _read_range(path, 0, max_bytes)


def read_tail(path: Path, max_bytes: int) -> LogText | None:
    """Return the last bytes of a file; None if it cannot be read."""
    return _read_range(path, -max_bytes, max_bytes)


def _read_range(path: Path, offset: int, max_bytes: int) -> LogText | None:
    try:
        with open_regular(path) as file:
            size = file.seek(0, 2)
            start = max(0, size + offset) if offset < 0 else offset
            file.seek(start)
            data = file.read(max_bytes)
            mtime = path.stat().st_mtime
    except (OSError, ValueError):
        return None
    if start:  # the rest of a cut line could be misread
        data = data[data.find(b"\n") + 1 :]
    return LogText(decode_log(data), 0 if start else 1, size, mtime)


def decode_log(data: bytes) -> str:
    """Return bytes as text without terminal escapes; carriage returns of progress bars become line ends."""
    if b"\x1b" in data:
        data = _ESCAPES.sub(b"", data)
    return data.decode("utf-8", "replace").replace("\r\n", "\n").replace("\r", "\n")


def one_line(text: str, max_chars: int = MAX_SHOWN) -> str:
    """Return text as one printable line of at most `max_chars` characters."""
    line = " ".join(text[: 4 * max_chars].split())
    line = "".join(char if char.isprintable() else "?" for char in line)
    return line if len(line) <= max_chars else line[: max_chars - 1] + "…"
