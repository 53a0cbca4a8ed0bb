from __future__ import annotations

import io
import json
import sys
import threading

import pytest

from pitools.core import progress
from pitools.core.progress import progress_bar


class Terminal(io.StringIO):
    """Standard error that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar_of_bytes_and_files(monkeypatch: pytest.MonkeyPatch):
    """What is done at the end is drawn, with its files; no thread draws, for it could not be forked along."""
    monkeypatch.setattr(sys, "stderr", shown := Terminal())
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    before = threading.enumerate()
    with progress_bar("pick", 4 << 20, parts=2) as advance:
        assert threading.enumerate() == before
        advance(4 << 20)
        advance.add_file()
        advance.add_file()
    assert "pick" in shown.getvalue()
    assert "4.0/4.0 MiB" in shown.getvalue()
    assert "2/2 files" in shown.getvalue()


def test_a_log_gets_a_line_of_json_now_and_then(monkeypatch: pytest.MonkeyPatch, capsys):
    """Only of work that takes long: a job's log is read by people too."""
    with progress_bar("pick", 100, parts=4) as advance:
        advance(10)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "_LINE_EVERY_S", 0.0)
    with progress_bar("pick", 100, parts=4) as advance:
        advance.add_file()
        advance(25)
    (line,) = capsys.readouterr().err.splitlines()
    record = json.loads(line)
    assert (record["schema"], record["title"], record["done"], record["total"]) == ("pit.progress/1", "pick", 25, 100)
    assert (record["parts"], record["total_parts"]) == (1, 4)
    assert record["remaining_s"] == pytest.approx(3 * record["wall_s"], abs=0.2)


def test_an_unknown_total_is_no_full_bar(monkeypatch: pytest.MonkeyPatch, capsys):
    """Neither 100 % nor a time that is left is claimed; more than the total is not less than none left."""
    monkeypatch.setattr(progress, "_LINE_EVERY_S", 0.0)
    with progress_bar("run", 0, unit="steps") as advance:
        advance(25)
    with progress_bar("run", 10, unit="steps") as advance:
        advance(25)
    unknown, over = map(json.loads, capsys.readouterr().err.splitlines())
    assert (unknown["done"], unknown["total"], unknown["remaining_s"]) == (25, 0, None)
    assert over["remaining_s"] == 0
    monkeypatch.setattr(sys, "stderr", shown := Terminal())
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    with progress_bar("run", 0, unit="steps") as advance:
        advance(25)
    assert "25/?" in shown.getvalue()


def test_a_quiet_bar_says_nothing(monkeypatch: pytest.MonkeyPatch):
    """Cron mails whatever is printed, so nothing is, not even on a terminal."""
    monkeypatch.setattr(sys, "stderr", shown := Terminal())
    with progress_bar("pick", 100, quiet=True) as advance:
        advance(100)
    assert shown.getvalue() == ""
    assert advance.done == 100
