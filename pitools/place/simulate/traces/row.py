"""One job of a trace, whatever the form."""

from __future__ import annotations

from datetime import UTC, datetime
from math import isfinite
from typing import NamedTuple


class TraceRow(NamedTuple):
    """What a form's reader makes of one row; the columns of `model.Trace`. submit_s: on any clock."""

    job_id: str
    submit_s: float
    gpus: int
    run_s: float
    limit_s: float = 0.0
    owner: str = ""
    title: str = ""
    group: str = ""
    predicted_s: float = 0.0


def split_lines(text: str) -> list[str]:
    """The lines of a file; unlike splitlines(), none ends at the odd separators that names of jobs may hold."""
    return text.replace("\r\n", "\n").split("\n")


def parse_number(text: str, what: str) -> float:
    """A finite number. Raises ValueError naming what it should have been."""
    try:
        value = float(text)
    except (TypeError, ValueError):
        raise ValueError(f"{what} is {text!r}, no number") from None
    if not isfinite(value):
        raise ValueError(f"{what} is {text!r}")
    return value


def parse_whole(text: str, what: str) -> int:
    """A whole number. Raises ValueError naming what it should have been."""
    value = parse_number(text, what)
    if value != int(value):
        raise ValueError(f"{what} is {text!r}, no whole number")
    return int(value)


def parse_naive_time(text: str, what: str) -> float:
    """Unix time of zoneless text; its zone does not matter, for only differences do. Raises ValueError."""
    try:
        found = datetime.fromisoformat(text)
    except (TypeError, ValueError):
        raise ValueError(f"{what} is {text!r}, no time") from None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
