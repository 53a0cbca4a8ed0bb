"""The period of a report: a window, or one for each calendar month (UTC) in it."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime
from typing import NamedTuple

from pitools.core.errors import UsageError
from pitools.core.timestamps import now_rfc3339, unix_to_rfc3339
from pitools.launch.monitor.merged_logs import parse_since

_MAX_DAYS = 3660


class Window(NamedTuple):
    """A time from begin to end, Unix times. is_current: whether it ends now."""

    begin: int
    end: int
    is_current: bool

    @property
    def text(self) -> tuple[str, str]:
        """Both as RFC 3339 text."""
        return unix_to_rfc3339(self.begin), unix_to_rfc3339(self.end)


def parse_period(
    since: str | None, until: str | None, *, is_monthly: bool = False, asks_sacct: bool = True
) -> list[Window]:
    """Return the windows between two times, by default until now, from the first of that month.

    asks_sacct: whether the accounting of each day is read, so that there cannot be very many. Raises UsageError.
    """
    now = _moment(now_rfc3339())
    end = _moment(parse_since(until)) if until else now
    begin = _moment(parse_since(since)) if since else end.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    if begin >= end:
        start = f"--since ({begin.isoformat()})" if since else f"the first of its month ({begin.isoformat()})"
        problem = f"{start} is not before --until ({end.isoformat()})"
        raise UsageError(problem, hint="8d means 8 days ago: --since 8d --until 7d")
    if asks_sacct and (end - begin).days > _MAX_DAYS:
        raise UsageError(f"--since is more than {_MAX_DAYS} days before --until, and sacct is asked for each")
    cuts = [begin]
    while is_monthly and (following := _next_month(cuts[-1])) < end:
        cuts.append(following)
    times = [int(each.timestamp()) for each in (*cuts, end)]
    return [Window(first, last, end >= now and last == times[-1]) for first, last in itertools.pairwise(times)]


def _moment(text: str) -> datetime:
    return datetime.fromisoformat(text).astimezone(UTC)


def _next_month(moment: datetime) -> datetime:
    first = moment.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    return first.replace(year=first.year + first.month // 12, month=first.month % 12 + 1)
