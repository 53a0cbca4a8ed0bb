"""The Standard Workload Format: 18 columns of numbers, -1 for what is not known, comments after `;`."""

from __future__ import annotations

from collections.abc import Iterator

from pitools.place.simulate.traces.row import Row, lines, number, whole

_CANCELLED = "5"


def rows(text: str) -> Iterator[tuple[int, list[str]]]:
    """(line, columns) of each row."""
    for line, found in enumerate(lines(text), start=1):
        if found.strip() and not found.lstrip().startswith(";"):
            yield line, found.split()


def row(raw: list[str]) -> Row | None:
    """A job, its processors as GPUs; None for one that was cancelled before it ran. Raises ValueError."""
    if len(raw) != 18:
        raise ValueError(f"{len(raw)} columns instead of 18")
    run_s = number(raw[3], "run time")
    units = whole(raw[4], "processors")
    if units <= 0:
        units = whole(raw[7], "requested processors")
    if run_s <= 0 and (raw[10] == _CANCELLED or run_s == 0):
        return None
    return Row(
        job_id=raw[0],
        submit_s=number(raw[1], "submit time"),
        gpus=units,
        run_s=run_s,
        limit_s=max(0.0, number(raw[8], "requested time")),
        owner=_known(raw[11]),
        title=_known(raw[13]),
        group=_known(raw[14]),
    )


def _known(text: str) -> str:
    return "" if text.startswith("-") else text
