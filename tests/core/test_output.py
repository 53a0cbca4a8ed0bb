"""Records to stdout."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pitools.core.output import Output, fit_table, format_cell, format_table
from pitools.core.record import Record


class Row(Record, frozen=True, kw_only=True, tag="pit.row/1"):
    node: str
    free_bytes: int
    note: str = ""


ROWS = [Row(node="n02", free_bytes=5), Row(node="n01", free_bytes=12345, note="a b")]


def text(form: str, columns: tuple[str, ...] = ()) -> str:
    stream = io.StringIO()
    with Output(form, columns, stream) as out:
        for row in ROWS:
            out(row)
    return stream.getvalue()


def test_a_pipe_gets_one_object_a_line_with_its_schema_first() -> None:
    """`auto` on something that is no terminal is JSON Lines."""
    lines = text("auto").splitlines()
    assert [json.loads(line)["node"] for line in lines] == ["n02", "n01"]
    assert all(line.startswith('{"schema":"pit.row/1"') for line in lines)


def test_a_table_aligns_and_keeps_the_order_of_columns() -> None:
    """Numbers stand to the right, also infinite and large ones; nothing is `-`."""
    assert list(format_table(("wait_s",), [["5"], ["inf"], ["1e+10"]])) == ["WAIT S", "     5", "   inf", " 1e+10"]
    assert text("table", ("node", "free_bytes", "note")).splitlines() == [
        "NODE  FREE BYTES  NOTE",
        "n02            5  -",
        "n01        12345  a b",
    ]


def test_tsv_has_a_head_and_every_row() -> None:
    """The first record appears once, below its head."""
    assert text("tsv", ("node", "free_bytes")).splitlines() == ["node\tfree_bytes", "n02\t5", "n01\t12345"]


def test_csv_has_no_formulas() -> None:
    """Text that a spreadsheet would run is text there; numbers and a lone sign stay as they are."""
    stream = io.StringIO()
    with Output("csv", (), stream) as out:
        for note in ("=cmd()", "@SUM(A1)", "+1", "-2", "\t=x", "-", "a=b"):
            out(Row(node="n", free_bytes=-5, note=note))
    assert [line.split(",") for line in stream.getvalue().splitlines()[1:]] == [
        ["n", "-5", note] for note in ("'=cmd()", "'@SUM(A1)", "'+1", "'-2", "\\t=x", "-", "a=b")
    ]


def test_hosts_folds_the_nodes() -> None:
    """One folded list, ready for sbatch -w."""
    assert text("hosts") == "n[01-02]\n"


@pytest.mark.parametrize("hostile", ["a\nb", "a\x1b[31mb", "a\x00b"])
def test_cells_are_printable(hostile: str) -> None:
    """Text of others cannot break a line or colour a terminal."""
    assert format_cell(hostile).isprintable()


ROW = ["bc-20260101-000000-abc123", "RUNNING", "/scratch/runs/" + "x" * 40, "why it ended, at some length"]
NAMES = ("run_id", "state", "path", "reason")


def test_a_table_fits_its_terminal() -> None:
    """Long cells are cut, paths at their front; then the last columns go, and the head says so. Names stay whole."""
    assert list(fit_table(NAMES, [ROW, ROW], 200))[1].split("  ") == ROW
    for width in (100, 80, 60, 40, 30):
        head, *lines = fit_table(NAMES, [ROW, ROW], width)
        assert max(map(len, [head, *lines])) <= max(width, len(ROW[0]) + 2 + len(ROW[1]) + 3)
        assert all(line.startswith(ROW[0] + "  RUNNING") for line in lines)
        assert head.endswith("…") == (width < 93)
    assert "  …" + "x" * 23 in list(fit_table(NAMES, [ROW, ROW], 80))[1]


def test_one_wide_row_stands_upright() -> None:
    """Nothing of it is cut; one that fits stays a table."""
    assert list(fit_table(NAMES, [ROW], 80))[2] == f"PATH    {ROW[2]}"
    assert len(list(fit_table(NAMES, [ROW], 200))) == 2


_CHANGES = """
import sys
from pitools.core.output import Output
from tests.core.test_output import ROWS
assert sys.stdin.readline()
with Output(sys.argv[1], ends_with_reader=bool(sys.argv[2:])) as out:
    for row in ROWS:
        out(row)
print("and more")
print("and a note", file=sys.stderr, flush=True)
open("end", "w").close()
"""


@pytest.mark.parametrize("form", ["jsonl", "table", "csv", "hosts"])
@pytest.mark.parametrize("with_errors", [False, True])
def test_a_change_goes_on_without_its_reader(form: str, with_errors: bool, tmp_path: Path) -> None:
    """Records that nobody reads are dropped, and notes on the same pipe; a command that only reads ends there."""
    for words in ([], ["ends"]):
        done = subprocess.Popen(
            [sys.executable, "-c", _CHANGES, form, *words],
            cwd=tmp_path,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if with_errors else subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )
        assert done.stdin
        assert done.stdout
        done.stdout.close()
        done.stdin.write(b"go\n")
        done.stdin.close()
        assert (done.wait(60) == 0, (tmp_path / "end").exists()) == (not words, not words)
        (tmp_path / "end").unlink(missing_ok=True)
