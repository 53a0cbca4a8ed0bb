"""Records to stdout: a table for eyes, JSON Lines for pipes. The one place that decides which."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import IO, Any, Literal

from pitools.core.record import Record

Format = Literal["auto", "table", "jsonl", "tsv", "hosts"]
FORMATS: tuple[Format, ...] = ("auto", "table", "jsonl", "tsv", "hosts")


class Output:
    """Where a command's records go. Use as a context manager; call it once per record.

    Args:
        form: `auto` is a table on a terminal and JSON Lines elsewhere; `hosts` is one folded list of the
            records' `node` fields.
        columns: record fields shown in a table or TSV, in this order; every field when empty.
    """

    def __init__(self, form: str = "auto", columns: Sequence[str] = (), stream: IO[str] | None = None) -> None:
        self.stream = stream or sys.stdout
        if form == "auto":
            form = "table" if self.stream.isatty() else "jsonl"
        self.form = form
        self.columns = tuple(columns)
        self._rows: list[Record] = []

    def __call__(self, record: Record) -> None:
        """Send one record."""
        if self.form == "jsonl":
            import msgspec

            self._line(msgspec.json.encode(record).decode())
        elif self.form == "tsv":
            if not self._rows:
                self._rows.append(record)
                self._line("\t".join(self._names(record)))
            self._line("\t".join(cell(getattr(record, name)) for name in self._names(record)))
        else:
            self._rows.append(record)

    def __enter__(self) -> Output:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A failing command still shows what it had: the records of a table are as true as streamed ones.
        if self.form == "table" and self._rows:
            self._table()
        elif self.form == "hosts":
            from pitools.core import hosts

            self._line(hosts.fold(node for row in self._rows if (node := getattr(row, "node", ""))))

    def _names(self, record: Record) -> tuple[str, ...]:
        return self.columns or record.__struct_fields__

    def _line(self, text: str) -> None:
        self.stream.write(text + "\n")
        self.stream.flush()

    def _table(self) -> None:
        names = self._names(self._rows[0])
        rows = [[cell(getattr(row, name)) for name in names] for row in self._rows]
        for line in table(names, rows):
            self._line(line)


def table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterable[str]:
    """Plain aligned columns, readable without colour and by `awk`; numbers to the right.

    Not `rich`: a listing is the most typed command, and this costs nothing to start.
    """
    rows = [list(row) for row in rows]
    heads = [name.replace("_", " ").upper() for name in names]
    widths = [max(len(head), *(len(row[i]) for row in rows)) if rows else len(head) for i, head in enumerate(heads)]
    numeric = [bool(rows) and all(_is_number(row[i]) for row in rows) for i in range(len(heads))]
    for row in [heads, *rows]:
        cells = [text.rjust(w) if n else text.ljust(w) for text, w, n in zip(row, widths, numeric, strict=True)]
        yield "  ".join(cells).rstrip()


def cell(value: Any) -> str:
    """One value as printable text on one line: `-` for nothing, control characters escaped."""
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (list, tuple, set, frozenset)):
        return ",".join(cell(item) for item in value) or "-"
    if isinstance(value, dict):
        return ",".join(f"{key}={cell(item)}" for key, item in value.items()) or "-"
    text = str(value)
    return text if text.isprintable() else text.encode("unicode_escape").decode()


def default_format() -> str:
    """The format when no flag is given: `PIT_FORMAT`, or `auto`."""
    return os.environ.get("PIT_FORMAT", "auto")


def _is_number(text: str) -> bool:
    return text == "-" or text.replace(".", "", 1).replace("-", "", 1).replace("e", "", 1).isdigit()
