"""A journal that crashes and full disks truncate."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pitools.core.errors import ClusterError, DataError, NoSpace
from pitools.core.journal import DamagedLine, append_record, read_journal, read_lines
from pitools.core.record import Record


class Line(Record, frozen=True, kw_only=True, tag="test.line/1"):
    number: int


def numbers(path: Path) -> list[int]:
    return [line.number for line in read_journal(path, Line)]


def test_a_truncated_line_is_left_out_and_then_removed(tmp_path: Path) -> None:
    """Cut at each byte of the second line: the first is read, and the next append makes a whole journal."""
    path = tmp_path / "journal.jsonl"
    assert numbers(path) == []
    for number in range(2):
        append_record(path, Line(number=number), mode=0o640)
    data = path.read_bytes()
    assert path.stat().st_mode & 0o777 == 0o640
    for end in range(data.index(b"\n") + 1, len(data)):
        path.write_bytes(data[:end])
        assert numbers(path) == [0]
        append_record(path, Line(number=7), durable=False)
        assert numbers(path) == [0, 7]


def test_a_damaged_or_unreadable_journal_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never an empty one: its intents would be lost; and a short write is a full disk."""
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b'{"schema":"test.line/1","number":7}\n{"schema":"test.line/1","number":"x"}\n')
    with pytest.raises(DataError) as caught:
        read_journal(path, Line)
    assert caught.value.where == f"{path}:2"
    whole, damaged = read_lines(path, Line)
    assert whole == Line(number=7)
    assert isinstance(damaged, DamagedLine)
    assert (damaged.number, damaged.data) == (2, b'{"schema":"test.line/1","number":"x"}')
    with pytest.raises(ClusterError):
        read_journal(tmp_path, Line)
    path.unlink()
    monkeypatch.setattr(os, "write", lambda _descriptor, data: len(data) - 1)
    with pytest.raises(NoSpace):
        append_record(path, Line(number=1))


def test_after_an_error_nothing_but_the_record_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fills up within a line leaves the journal as it was; one that cannot sync may have the record."""
    path = tmp_path / "journal.jsonl"
    append_record(path, Line(number=0))
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:-1]))
        with pytest.raises(NoSpace):
            append_record(path, Line(number=1))
    assert numbers(path) == [0]
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: (tmp_path / "none").stat())
        with pytest.raises(ClusterError):
            append_record(path, Line(number=2))
    assert numbers(path) == [0, 2]
    append_record(path, Line(number=3))
    assert numbers(path) == [0, 2, 3]
