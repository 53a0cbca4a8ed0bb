"""One job of a trace, in any format."""

from __future__ import annotations

from datetime import UTC, datetime
from math import isfinite
from typing import NamedTuple


class TraceRow(NamedTuple):
    """One job, with the columns of `model.Trace`. submit_s: on any clock. wait_s: -1 if unknown."""

    job_id: str
    submit_s: float
    gpus: int
    run_s: float
    limit_s: float = 0.0
    owner: str = ""
    job_name: str = ""
    queue: str = ""
    rank_score: float = 0.0
    account: str = ""
    wait_s: float = -1.0


class LeftOut(NamedTuple):
    """A job that is none of the trace: why, and the GPU hours that it holds so far."""

    reason: str = "never ran or held no GPU"
    gpu_hours: float = 0.0


def split_lines(text: str) -> list[str]:
    """Return the lines of a file. splitlines() would also split at separators that job names may contain."""
    return text.replace("\r\n", "\n").split("\n")


def parse_number(text: str, column: str) -> float:
    """Return a finite number. Raises ValueError naming the column."""
    try:
        value = float(text)
    except (TypeError, ValueError):
        raise ValueError(f"{column} is {text!r}, no number") from None
    if not isfinite(value):
        raise ValueError(f"{column} is {text!r}")
    return value


def parse_whole(text: str, column: str) -> int:
    """Return an integer. Raises ValueError naming the column."""
    value = parse_number(text, column)
    if value != int(value):
        raise ValueError(f"{column} is {text!r}, no whole number")
    return int(value)


def parse_naive_time(text: str, column: str) -> float:
    """Return seconds since the epoch, or a time without a zone as if in UTC. Raises ValueError naming the column."""
    if str(text).isdecimal() and 8 < len(str(text)) < 12:  # shorter: a date
        return float(text)
    try:
        time = datetime.fromisoformat(text)
    except (TypeError, ValueError):
        raise ValueError(f"{column} is {text!r}, no time") from None
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
