"""Progress of long work, on stderr: a bar on a terminal, elsewhere lines of JSON."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from pitools.core.record import Record

if TYPE_CHECKING:
    from rich.progress import ProgressColumn

Advance = Callable[[int], None]

_DRAW_EVERY_S = 0.1
# Short operations print no line.
_LINE_EVERY_S = 30.0


class Progress(Record, frozen=True, kw_only=True, tag="pit.progress/1"):
    """The progress of an operation. done, total: in `unit`. parts: files, if they are counted, too.

    total: 0 if unknown; remaining_s is null then.
    """

    title: str
    unit: str
    done: int
    total: int
    parts: int
    total_parts: int
    wall_s: float
    remaining_s: float | None


class ProgressBar:
    """A counter that is displayed at intervals. Call it with the units done since the last call, also with 0."""

    def __init__(
        self, title: str, total: int, unit: str, parts: int, show: Callable[[ProgressBar], None], every_s: float
    ):
        self.title, self.total, self.unit, self.all_parts = title, total, unit, parts
        self.done = self.parts = 0
        self.started = time.monotonic()
        self._show, self._every_s, self._due = show, every_s, self.started + every_s
        self._lock = threading.Lock()

    def __call__(self, count: int) -> None:
        """Add `count` units; from any thread."""
        with self._lock:
            self.done += count
            if (now := time.monotonic()) >= self._due:
                self._show(self)
                self._due = now + self._every_s

    def add_file(self) -> None:
        """Count a finished file; displayed with the next call."""
        self.parts += 1


@contextmanager
def progress_bar(
    title: str, total: int, *, unit: str = "bytes", parts: int = 0, quiet: bool = False
) -> Iterator[ProgressBar]:
    """Display a progress bar on a terminal, or lines of JSON elsewhere; yield the counter.

    total: in `unit`, 0 if unknown. parts: files. quiet: count, and display nothing.
    """
    if quiet:
        yield ProgressBar(title, total, unit, parts, lambda _: None, _LINE_EVERY_S)
    elif not sys.stderr.isatty():
        yield ProgressBar(title, total, unit, parts, _print_line, _LINE_EVERY_S)
    else:
        with _make_drawer(title, total, unit, parts) as show:
            bar = ProgressBar(title, total, unit, parts, show, _DRAW_EVERY_S)
            yield bar
            show(bar)


def _print_line(bar: ProgressBar) -> None:
    wall_s = time.monotonic() - bar.started
    remaining_s = wall_s * max(0, bar.total - bar.done) / bar.done if bar.done and bar.total else None
    record = Progress(
        title=bar.title,
        unit=bar.unit,
        done=bar.done,
        total=bar.total,
        parts=bar.parts,
        total_parts=bar.all_parts,
        wall_s=round(wall_s, 1),
        remaining_s=None if remaining_s is None else round(remaining_s, 1),
    )
    print(msgspec.json.encode(record).decode(), file=sys.stderr, flush=True)


@contextmanager
def _make_drawer(title: str, total: int, unit: str, parts: int) -> Iterator[Callable[[ProgressBar], None]]:
    from rich import progress
    from rich.console import Console

    columns: list[ProgressColumn] = [progress.TextColumn("{task.description}"), progress.BarColumn()]
    if unit == "bytes":
        columns += [progress.DownloadColumn(binary_units=True), progress.TransferSpeedColumn()]
    else:
        columns += [progress.MofNCompleteColumn(), progress.TextColumn(unit)]
    if parts:
        columns.append(progress.TextColumn("{task.fields[parts]} files"))
    columns.append(progress.TimeRemainingColumn())
    # Without rich's own thread: staging forks its workers.
    display = progress.Progress(*columns, console=Console(stderr=True), auto_refresh=False)
    with display:
        fields: dict[str, Any] = {"parts": f"0/{parts}"}
        task = display.add_task(title, total=total or None, **fields)

        def show(bar: ProgressBar) -> None:
            display.update(task, completed=bar.done, parts=f"{bar.parts}/{parts}", refresh=True)

        yield show
