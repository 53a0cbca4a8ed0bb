"""Filters of runs: each condition alone and together, over heaps of values; wrong ones are named."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pitools.core.errors import UsageError
from pitools.launch.monitor.run_filter import filter_runs
from pitools.run.run_folder import RunRecord

NOW = datetime(2026, 11, 25, 12, tzinfo=UTC)


def run(**keys: object) -> RunRecord:
    usual: dict[str, object] = {
        "run_id": "bc-1",
        "name": "bc",
        "site": "alpha",
        "job_id": "7",
        "run_dir": "/r",
        "state": "RUNNING",
        "exit_code": None,
        "nodes": 2,
        "created": "2026-11-25T10:00:00.000Z",
        "params": {"lr": 1e-3, "seed": 3},
    }
    return RunRecord(**{**usual, **keys})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "passes"),
    [
        ("", True),
        ("state=running", True),
        ("state!=running", False),
        ("state=pending", False),
        ("name~^b", True),
        ("name~^c", False),
        ("age<3h", True),
        ("age<1h", False),
        ("age>1h,nodes>1", True),
        ("lr=1e-3", True),
        ("lr>0.01", False),
        ("seed<4,lr<1,state~run", True),
        ("exit_code=0", False),
    ],
)
def test_conditions(text: str, passes: bool) -> None:
    """A run passes where all conditions do."""
    assert filter_runs([run()], text, NOW) == [run()] * passes


@given(st.integers(-100, 100), st.integers(-100, 100))
def test_numbers_are_compared_as_numbers(value: int, limit: int) -> None:
    """Not as texts, in which 9 is more than 10."""
    one = run(params={"x": value})
    assert [bool(filter_runs([one], f"x{sign}{limit}")) for sign in ("<", "=", ">", "!=")] == [
        value < limit,
        value == limit,
        value > limit,
        value != limit,
    ]


@pytest.mark.parametrize(
    "text",
    [
        "state",
        "=running",
        "name~(",
        "age=2d",
        "age<soon",
        "age>1",
        "state=COMPLETE",
        "state!=done",
        "state=failed,,b=c",
    ],
)
def test_wrong_conditions_are_named(text: str) -> None:
    """Before any run is read."""
    with pytest.raises(UsageError):
        filter_runs([], text)


def test_a_misspelt_field_is_named() -> None:
    """Where no run has a field or a parameter of that name; a run without the parameter does not pass."""
    with pytest.raises(UsageError, match="stat"):
        filter_runs([run()], "stat=x")
    assert filter_runs([run(), run(params={"other": 1})], "other=1") == [run(params={"other": 1})]
