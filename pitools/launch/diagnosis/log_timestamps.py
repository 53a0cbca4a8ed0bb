"""Parse the timestamps of log lines, in the formats of common programs.

A time counts only within the attempt's span, because programs also print dates of other things. Clocks of nodes differ
slightly. A time without a zone is taken as local time or UTC.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from pitools.core import timestamps

TOLERANCE_S = 3.0  # clocks synchronised by NTP differ by less; a lost peer is noticed within it
_LOOSE_TOLERANCE = timedelta(minutes=2)
_ISO = re.compile(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(?:[.,](\d{1,9}))?(Z|[+-]\d\d:?\d\d)?")
_GLOG = re.compile(r"(?:^|[\s\]:\[])[IWEF](\d\d)(\d\d) (\d\d):(\d\d):(\d\d)\.(\d{1,9})")
_EPOCH = re.compile(r"(?:^|[\s\]:\[])[IWEF]0000 00:00:(\d{9,11})\.(\d{1,9})")  # absl before its flags are parsed
_SYSLOG = re.compile(r"([A-Z][a-z]{2}) {1,2}(\d{1,2}) (\d\d):(\d\d):(\d\d)(?:\.\d+)?(?: (\d{4}))?\b")
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


class TimeSpan(NamedTuple):
    """The start and the end of an attempt; None if unknown."""

    first: datetime | None
    last: datetime | None

    def __contains__(self, moment: object) -> bool:
        if not isinstance(moment, datetime):
            return False
        after = self.first is None or moment >= self.first - _LOOSE_TOLERANCE
        return after and (self.last is None or moment <= self.last + _LOOSE_TOLERANCE)


def parse_timestamp(text: str) -> datetime | None:
    """Parse a record's RFC 3339 time; None for "" and for other text."""
    try:
        moment = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def make_span(started: str, ended: str) -> TimeSpan:
    """Return the span between two RFC 3339 times; either may be ""."""
    return TimeSpan(parse_timestamp(started), parse_timestamp(ended))


def timestamp_of_line(line: str, within: TimeSpan) -> str:
    """Return the timestamp near the beginning of a log line as RFC 3339 UTC; "" without one inside `within`."""
    head = line[:240]
    try:
        for moment in _parse_candidates(head, within):
            if moment in within:
                return timestamps.to_rfc3339(moment)
    except (ValueError, OverflowError, OSError):  # 2026-13-45 and the like
        pass
    return ""


def timestamp_of_file(seconds: float, within: TimeSpan) -> str:
    """Return a file's time of change (Unix time, seconds) as RFC 3339; "" outside `within`, as after a copy."""
    moment = datetime.fromtimestamp(seconds, UTC)
    return timestamps.to_rfc3339(moment) if moment in within else ""


def seconds_between(earlier: str, later: str) -> float | None:
    """Return the seconds between two RFC 3339 times; None if either is unknown."""
    first, last = parse_timestamp(earlier), parse_timestamp(later)
    return (last - first).total_seconds() if first and last else None


def _parse_candidates(head: str, within: TimeSpan) -> list[datetime]:
    """Return the times that the text may denote, the most likely first."""
    if match := _EPOCH.search(head):
        return [datetime.fromtimestamp(float(f"{match[1]}.{match[2]}"), UTC)]
    if match := _ISO.search(head):
        fraction = (match[3] or "0")[:6].ljust(6, "0")
        zone = (match[4] or "").replace("Z", "+00:00")
        moment = datetime.fromisoformat(f"{match[1]}T{match[2]}.{fraction}{zone}")
        return [moment] if moment.tzinfo else _candidate_zones(moment)
    year = (within.last or within.first or datetime.now(UTC)).year
    if match := _GLOG.search(head):
        month, day, hour, minute, second = map(int, match.groups()[:5])
        fraction = int(match[6][:6].ljust(6, "0"))
        return _candidate_zones(datetime(year, month, day, hour, minute, second, fraction))  # noqa: DTZ001 (naive)
    if (match := _SYSLOG.search(head)) and match[1] in _MONTHS:
        day, hour, minute, second = map(int, match.groups()[1:5])
        month = _MONTHS.index(match[1]) + 1
        return _candidate_zones(datetime(int(match[6] or year), month, day, hour, minute, second))  # noqa: DTZ001
    return []


def _candidate_zones(naive: datetime) -> list[datetime]:
    return [naive.astimezone(), naive.replace(tzinfo=UTC)]
