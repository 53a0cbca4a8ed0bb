"""Write records to stdout: a table on a terminal, JSON Lines in a pipe."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import IO, Any, Literal

from pitools.core.record import Record

Format = Literal["auto", "table", "jsonl", "tsv", "csv", "hosts"]
_MIN_COLUMN = 24  # characters that a cut cell keeps

FORMATS: tuple[Format, ...] = ("auto", "table", "jsonl", "tsv", "csv", "hosts")


class Output:
    """The output of a command's records. Use as a context manager; call it once per record.

    Args:
        form: `auto` is a table on a terminal and JSON Lines elsewhere; `hosts` is one folded list of the
            records' `node` fields.
        columns: record fields shown in a table, TSV or CSV, in this order; every field when empty. `FIELD.KEY` is a
            value of a field that is a dictionary.
        ends_with_reader: the command ends when nobody reads on (`| head -1`): for those without an end, or of long
            reading. Others drop their records and go on: a change of several steps is never left half made.
    """

    def __init__(
        self,
        form: str = "auto",
        columns: Sequence[str] = (),
        stream: IO[str] | None = None,
        *,
        ends_with_reader: bool = False,
    ) -> None:
        self.stream = stream or sys.stdout
        self._ends_with_reader = ends_with_reader
        if form == "auto":
            form = "table" if self.stream.isatty() else "jsonl"
        self.form = form
        self.columns = tuple(columns)
        self._rows: list[Record] = []

    def __call__(self, record: Record) -> None:
        """Write one record."""
        if self.form == "jsonl":
            import msgspec

            self._line(msgspec.json.encode(record).decode())
        elif self.form in ("tsv", "csv"):
            names = self._names(record)
            if not self._rows:
                self._rows.append(record)
                self._separated([name.rpartition(".")[2] for name in names])
            format_one = format_cell if self.form == "tsv" else _csv_cell
            self._separated([format_one(_value(record, name)) for name in names])
        else:
            self._rows.append(record)

    def __enter__(self) -> Output:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Also after an error: JSON Lines would have been printed by then, too.
        if self.form == "table" and self._rows:
            self._table()
        elif self.form == "hosts":
            from pitools.core import hostlist

            self._line(hostlist.fold(node for row in self._rows if (node := getattr(row, "node", ""))))

    def _names(self, record: Record) -> tuple[str, ...]:
        return self.columns or record.__struct_fields__

    def _separated(self, cells: Sequence[str]) -> None:
        if self.form == "tsv":
            self._line("\t".join(cells))
            return
        import csv

        csv.writer(self, lineterminator="").writerow(cells)

    def _line(self, text: str) -> None:
        try:
            self.stream.write(text + "\n")
            self.stream.flush()
        except BrokenPipeError:
            if self._ends_with_reader:
                raise
            null, unread = os.open(os.devnull, os.O_WRONLY), self.stream.fileno()
            if os.path.sameopenfile(unread, 2):  # `2>&1 |`: its notes, too
                os.dup2(null, 2)
            os.dup2(null, unread)  # the buffer is flushed once more at the end
            os.close(null)

    write = _line  # for csv.writer

    def _table(self) -> None:
        names = self._names(self._rows[0])
        rows = [[format_cell(_value(row, name)) for name in names] for row in self._rows]
        width = shutil.get_terminal_size().columns if self.stream.isatty() else 0
        for line in fit_table(names, rows, width) if width else format_table(names, rows):
            self._line(line)


def _value(record: Record, name: str) -> Any:
    """Return a field's value, or for `FIELD.KEY` a value of the dictionary in it, None without the key."""
    field, _, key = name.partition(".")
    value = getattr(record, field)
    return value.get(key) if key else value


def format_table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterable[str]:
    """Return the lines of a table with aligned columns, readable by `awk`; numbers are right-aligned.

    Not by `rich`, whose import would slow down every listing.
    """
    rows = [list(row) for row in rows]
    heads = [_format_header(name) for name in names]
    widths = [max(len(head), *(len(row[i]) for row in rows)) if rows else len(head) for i, head in enumerate(heads)]
    numeric = [bool(rows) and all(_is_number(row[i]) for row in rows) for i in range(len(heads))]
    for row in [heads, *rows]:
        cells = [text.rjust(w) if n else text.ljust(w) for text, w, n in zip(row, widths, numeric, strict=True)]
        yield "  ".join(cells).rstrip()


def fit_table(names: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Iterable[str]:
    """Return the lines of a table for a terminal of `width` characters.

    If it is too wide, a single row is printed as one line per column. Of several rows, the longest cells are cut, but
    not in the first column, whose values users copy into commands; then the last columns are omitted, marked by `…`.
    """
    heads = [_format_header(name) for name in names]
    widths = [max(len(head), *(len(row[i]) for row in rows)) for i, head in enumerate(heads)]
    excess = sum(widths) + 2 * (len(widths) - 1) - width
    if excess > 0 and len(rows) == 1:
        side = max(map(len, heads))
        return [f"{head.ljust(side)}  {text}" for head, text in zip(heads, rows[0], strict=True)]
    while excess > 0 and (longest := max(widths[1:], default=0)) > _MIN_COLUMN:
        widths[widths.index(longest, 1)] -= 1
        excess -= 1
    shown = len(widths)
    while shown > 2 and sum(widths[:shown]) + 2 * (shown - 1) + (shown < len(widths)) * 3 > width:
        shown -= 1
    cut_rows = [[_truncate(text, w) for text, w in zip(row[:shown], widths, strict=False)] for row in rows]
    head, *lines = format_table(names[:shown], cut_rows)
    return [head + "  …" if shown < len(widths) else head, *lines]


def _truncate(text: str, width: int) -> str:
    if len(text) <= width:
        return text
    return "…" + text[-(width - 1) :] if text.startswith("/") else text[: width - 1] + "…"


def _format_header(name: str) -> str:
    return name.rpartition(".")[2].replace("_", " ").upper()


def printable(text: str, other: str = " ") -> str:
    """Return a text in which each character that cannot be printed, as a newline, is another one."""
    return "".join(sign if sign.isprintable() else other for sign in text)


def format_cell(value: Any) -> str:
    """Return a value as printable text on one line: `-` for an empty one, control characters escaped."""
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (list, tuple, set, frozenset)):
        return ",".join(format_cell(item) for item in value) or "-"
    if isinstance(value, dict):
        return ",".join(f"{key}={format_cell(item)}" for key, item in value.items()) or "-"
    text = str(value)
    return text if text.isprintable() else text.encode("unicode_escape").decode()


def _csv_cell(value: Any) -> str:
    """Return a value as a CSV cell: empty for None, a number with all its digits, a formula as text: with a `'`."""
    if isinstance(value, float):
        return repr(value)
    text = "" if value is None or value == "" else format_cell(value)
    return f"'{text}" if text[1:] and text[0] in "=+-@" and not isinstance(value, int) else text


def default_format() -> str:
    """Return the format without --format: `PIT_FORMAT`, or `auto`."""
    return os.environ.get("PIT_FORMAT", "auto")


def _is_number(text: str) -> bool:
    return (
        text in ("-", "inf")
        or text.replace(".", "", 1).replace("-", "", 1).replace("e", "", 1).replace("+", "", 1).isdigit()
    )
