"""Times as text: RFC 3339, UTC, to the millisecond."""

from __future__ import annotations

from datetime import UTC, datetime


def now() -> str:
    """The present, as `2026-11-21T01:33:41.123Z`."""
    return text(datetime.now(UTC))


def text(moment: datetime) -> str:
    """An aware moment as RFC 3339 UTC text."""
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
