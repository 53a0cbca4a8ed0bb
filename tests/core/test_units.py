"""Durations and sizes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pitools.core import units
from pitools.core.errors import UsageError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("90s", 90),
        ("30m", 1800),
        ("2h", 7200),
        ("1d12h", 129600),
        ("1.5h", 5400),
        ("30", 1800),
        ("30:15", 1815),
        ("2:00:00", 7200),
        ("1-0", 86400),
        ("1-12:30", 131400),
        ("7-00:00:00", 604800),
        ("5min", 300),
    ],
)
def test_seconds_reads_ours_and_slurms(text: str, expected: int) -> None:
    """Both ways of writing a duration give the same seconds as sbatch."""
    assert units.parse_duration(text) == expected


@pytest.mark.parametrize("text", ["", "h", "2x", "1:2:3:4", "-5", "2 hours", "∞"])
def test_seconds_refuses_the_rest(text: str) -> None:
    """What is not a duration is a usage error that names it."""
    with pytest.raises(UsageError, match="duration"):
        units.parse_duration(text)


@given(st.integers(0, 10**7))
def test_slurm_time_round_trips(total: int) -> None:
    """Every number of seconds survives the way to Slurm and back."""
    assert units.parse_duration(units.to_slurm_time(total)) == total


@given(st.integers(0, 10**6), st.sampled_from([1, 60, 3600, 86400]))
def test_exact_duration_round_trips(number: int, unit_s: int) -> None:
    """It is read back to the second, in one unit."""
    text = units.exact_duration(number * unit_s)
    assert (units.parse_duration(text), text[:-1].isdigit()) == (number * unit_s, True)


@pytest.mark.parametrize(
    ("text", "expected"), [("0", 0), ("4096", 4096), ("1KB", 1000), ("1KiB", 1024), ("1.5 GiB", 1610612736)]
)
def test_size_knows_both_powers(text: str, expected: int) -> None:
    """Decimal and binary units differ."""
    assert units.parse_size(text) == expected


def test_size_refuses_the_rest() -> None:
    """An unknown unit is a usage error."""
    with pytest.raises(UsageError, match="size"):
        units.parse_size("3 parsecs")
