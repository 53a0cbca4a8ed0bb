"""Times as text: RFC 3339, UTC, to the millisecond."""

from __future__ import annotations

from datetime import UTC, datetime


def now_rfc3339() -> str:
    """Return the present time, as `2026-11-21T01:33:41.123Z`."""
    return to_rfc3339(datetime.now(UTC))


def to_rfc3339(moment: datetime) -> str:
    """Return an aware time as RFC 3339 UTC text."""
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def unix_to_rfc3339(unix_s: float) -> str:
    """Return a Unix time as RFC 3339 UTC text. Raises ValueError, OverflowError or OSError beyond the year 9999."""
    return to_rfc3339(datetime.fromtimestamp(unix_s, UTC))


def rfc3339_to_unix(text: str) -> float | None:
    """Return an RFC 3339 time as Unix time; None for other text, and without a zone."""
    try:
        moment = datetime.fromisoformat(text)
        return moment.timestamp() if moment.tzinfo else None
    except (ValueError, OverflowError):
        return None


def seconds_between(earlier: object, later: object) -> float | None:
    """Return the seconds from one time to another; None if one of them is no time, or has no time zone."""
    try:
        return (datetime.fromisoformat(str(later)) - datetime.fromisoformat(str(earlier))).total_seconds()
    except (ValueError, TypeError, OverflowError):
        return None
