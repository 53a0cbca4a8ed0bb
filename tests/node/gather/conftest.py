"""Folders that stand for /proc, /sys and /etc, and what holds for every row of a collector."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec
import pytest

from pitools.node.tables import TABLES
from pitools.node.types import Row

Write = Callable[[Path, Mapping[str, str | bytes]], Path]
Check = Callable[[str, Iterable[Row]], dict[object, Row]]


@pytest.fixture(scope="session")
def write_tree() -> Write:
    """Write files below a folder, and return it. A value that begins with -> makes a link."""

    def write(root: Path, files: Mapping[str, str | bytes]) -> Path:
        for name, content in files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, bytes):
                path.write_bytes(content)
            elif content.startswith("->"):
                path.symlink_to(content[2:])
            else:
                path.write_text(f"{content}\n")
        return root

    return write


@pytest.fixture(scope="session")
def last_rows() -> Check:
    """Return the rows by subject, of each the last, as the runner does: all keys are of the table, all can be sent."""

    def check(name: str, rows: Iterable[Row]) -> dict[object, Row]:
        table = TABLES[name]
        last: dict[object, Row] = {}
        for row in rows:
            assert set(row) <= set(table.keys)
            assert not table.subject or row[table.subject] is not None
            assert msgspec.json.decode(msgspec.json.encode(row), type=Row) == row
            last[row.get(table.subject)] = row
        return last

    return check
