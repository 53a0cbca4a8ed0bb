"""Read the Standard Workload Format: 18 columns of numbers, -1 for unknown, comments after `;`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pitools.place.simulate.traces.row import TraceRow, parse_number, parse_whole, split_lines

_CANCELLED = "5"


def rows(text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield (line, columns) of each row, with the submit time as Unix time if the comments say when the log begins."""
    began = re.search(r"^;\s*UnixStartTime:\s*(\d+)", text, re.MULTILINE)
    for line, raw in enumerate(split_lines(text), start=1):
        if raw.strip() and not raw.lstrip().startswith(";"):
            yield line, [*raw.split(), began[1] if began else "0"]


def row(raw: list[str]) -> TraceRow | None:
    """Return a job, its processors as GPUs; None if it was cancelled before it ran. Raises ValueError."""
    *raw, began = raw
    if len(raw) != 18:
        raise ValueError(f"{len(raw)} columns instead of 18")
    run_s = parse_number(raw[3], "run time")
    units = parse_whole(raw[4], "processors")
    if units <= 0:
        units = parse_whole(raw[7], "requested processors")
    if run_s <= 0 and (raw[10] == _CANCELLED or run_s == 0):
        return None
    return TraceRow(
        job_id=raw[0],
        submit_s=parse_number(raw[1], "submit time") + int(began),
        gpus=units,
        run_s=run_s,
        limit_s=max(0.0, parse_number(raw[8], "requested time")),
        owner=_known_or_empty(raw[11]),
        job_name=_known_or_empty(raw[13]),
        queue=_known_or_empty(raw[14]),
        account=_known_or_empty(raw[12]),
        wait_s=max(-1.0, parse_number(raw[2], "wait time")),
    )


def _known_or_empty(text: str) -> str:
    return "" if text.startswith("-") else text
