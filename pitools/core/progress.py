"""Progress of long work, on stderr: a bar on a terminal, nothing elsewhere (records are the log there)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[int], None]


@contextmanager
def bar(title: str, total: int, *, unit: str = "bytes") -> Iterator[Advance]:
    """A bar of `total` bytes (`unit="bytes"`) or of anything counted; yields a function that advances it by n."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich import progress
    from rich.console import Console

    counted: list[progress.ProgressColumn]
    if unit == "bytes":
        counted = [progress.DownloadColumn(binary_units=True), progress.TransferSpeedColumn()]
    else:
        counted = [progress.MofNCompleteColumn(), progress.TextColumn(unit)]
    columns = [
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        *counted,
        progress.TimeRemainingColumn(),
    ]
    with progress.Progress(*columns, console=Console(stderr=True)) as shown:
        task = shown.add_task(title, total=total)
        yield lambda n: shown.update(task, advance=n)
