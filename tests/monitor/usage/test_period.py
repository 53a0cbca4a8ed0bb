"""The periods of reports."""

from __future__ import annotations

import pytest

from pitools.core.errors import UsageError
from pitools.monitor.usage.period import parse_period


def test_months_of_a_period() -> None:
    """Calendar months in UTC, cut by the period's ends; only one that ends now is current."""
    windows = parse_period("2025-11-15", "2026-02-10", is_monthly=True)
    assert [window.text[0][:10] for window in windows] == ["2025-11-15", "2025-12-01", "2026-01-01", "2026-02-01"]
    assert [window.text[1][:10] for window in windows] == ["2025-12-01", "2026-01-01", "2026-02-01", "2026-02-10"]
    assert not any(window.is_current for window in windows)
    (window,) = parse_period(None, None)
    assert window.text[0][8:10] == "01"
    assert window.is_current
    assert [each.is_current for each in parse_period("750d", None, is_monthly=True)][-2:] == [False, True]
    with pytest.raises(UsageError):
        parse_period("2026-02-10", "2026-02-10")
    with pytest.raises(UsageError):
        parse_period("5000d", None)
    assert len(parse_period("5000d", None, asks_sacct=False)) == 1
