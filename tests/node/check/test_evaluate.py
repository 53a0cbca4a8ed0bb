"""Checks judge facts: what is unknown never fails; rates, groups, bursts and clearing events."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pitools.core import timestamps
from pitools.node.check.evaluate import evaluate, remembered
from pitools.node.check.rule import Check
from pitools.node.tables import TABLES
from pitools.node.types import FactTable, NodeFacts, Row, State, Value

NOON = datetime(2026, 11, 26, 12, tzinfo=UTC)


def at(minutes: float) -> str:
    """Return a time that long before noon, when the facts are read."""
    return timestamps.to_rfc3339(NOON - timedelta(minutes=minutes))


def facts(table: str, rows: Sequence[Row], *, ago_min: float = 0.0, boot: str = "b1", **more: Any) -> NodeFacts:
    read = FactTable(table=table, source="test", read_at=at(ago_min), cost_s=0.0, rows=tuple(rows), **more)
    return NodeFacts(node="n1", boot_id=boot, gathered_at=at(ago_min), tables={table: read})


def states(check: Check, rows: Sequence[Row], before: NodeFacts | None = None, **more: Any) -> list[State]:
    return [finding.state for finding in evaluate([check], facts(check.table, rows, **more), before)]


def check(table: str, key: str = "", **tests: Any) -> Check:
    return Check(name="c", table=table, key=key, **tests)


VALUES = st.none() | st.booleans() | st.integers(-5, 20) | st.sampled_from([0.5, math.nan]) | st.sampled_from("ab")
TESTS: dict[str, Any] = {
    "min": st.floats(-5, 20),
    "max": st.floats(-5, 20),
    "equals": st.sampled_from([True, False, 1, "a"]),
    "any_of": st.lists(st.sampled_from([True, 1, "a", 0.5]), min_size=1).map(tuple),
    "pattern": st.sampled_from(["a", "[ab]|5"]),
    "max_increase": st.floats(0, 5),
    "max_rate": st.sampled_from(["1/s", "2/min", "3/h", "1/d"]),
    "all_equal": st.just(True),
    "count": st.integers(0, 4),
    "min_count": st.integers(1, 4),
    "max_count": st.integers(0, 4),
    "group_by": st.just(("size_bytes",)),
}
CHECKS = st.fixed_dictionaries({}, optional=TESTS).map(
    lambda tests: check("mounts", "used_share", where={"type": "ext4"}, **tests)
)
ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "target": st.integers(0, 6).map(str),
            "type": st.sampled_from(["ext4", "nfs", None]),
            "used_share": VALUES,
            "size_bytes": st.sampled_from([1, 2, None]),
        }
    ),
    max_size=6,
    unique_by=lambda row: row["target"],
)


def fails(one: Check, rows: Sequence[Row], before: NodeFacts | None = None) -> bool:
    return "failed" in states(one, rows, before)


@given(CHECKS, ROWS, ROWS, st.data())
def test_a_row_that_fails_cannot_be_excused_by_the_unknown(
    one: Check, rows: list[Row], older: list[Row], data: st.DataObject
) -> None:
    """If facts fail with something unknown, they fail whatever the unknown values are."""
    before = facts("mounts", older, ago_min=10)
    one = msgspec.structs.replace(one, all_equal=None, group_by=())  # these compare rows with each other
    if not fails(one, rows, before):
        return
    known = [
        {
            **row,
            "used_share": row["used_share"] if row["used_share"] is not None else data.draw(VALUES),
            "type": row["type"] or data.draw(st.sampled_from(["ext4", "nfs"])),
        }
        for row in rows
    ]
    assert fails(one, known, before)


@given(CHECKS, ROWS, ROWS)
def test_each_check_has_one_verdict_for_a_row(one: Check, rows: list[Row], older: list[Row]) -> None:
    """A check has findings that failed or are unknown, or a single one that passed; none fails on no rows to be."""
    found = states(one, rows, facts("mounts", older, ago_min=10))
    assert found == ["passed"] or (found and "passed" not in found)
    value_tests = msgspec.structs.replace(one, count=None, min_count=None, max_count=None)
    assert states(value_tests, []) == ["passed"]


@given(CHECKS)
def test_a_table_that_is_unknown_fails_nothing(one: Check) -> None:
    """A table that could not be read, or was not, makes the finding unknown."""
    assert states(one, [], unknown="no answer within 5 s") == ["unknown"]
    other = evaluate([one], facts("gpus", []))
    assert [finding.state for finding in other] == ["unknown"]


@pytest.mark.parametrize("kinds", [("ext4", None), (None, None)])
def test_rows_that_may_be_meant_are_neither_there_nor_missing(kinds: tuple[Value, ...]) -> None:
    """A row whose value of `where` is unknown makes a number unknown, not wrong; too many without it is wrong."""
    rows: list[Row] = [{"target": str(number), "type": kind} for number, kind in enumerate(kinds)]
    assert states(check("mounts", where={"type": "ext4"}, min_count=2), rows) == ["unknown"]
    assert states(check("mounts", where={"type": "ext4"}, max_count=1), rows) == ["unknown"]
    assert states(check("mounts", where={"type": "ext4"}, min_count=3), rows) == ["failed"]
    certain = kinds.count("ext4")
    expected: list[State] = ["failed"] if certain else ["unknown"]
    assert states(check("mounts", where={"type": "ext4"}, max_count=0), rows) == expected


@pytest.mark.parametrize(("used", "expected"), [(0.95, "unknown"), (0.5, "passed")])
def test_a_value_of_a_row_that_may_be_meant(used: float, expected: State) -> None:
    """A wrong value of a row that may be meant is unknown, not wrong; a right one passes either way."""
    rows: list[Row] = [{"target": "/", "type": None, "used_share": used}]
    assert states(check("mounts", "used_share", where={"type": "ext4"}, max=0.9), rows) == [expected]


def test_true_is_not_one() -> None:
    """Flags and numbers are told apart by equals and any_of, as by `where`."""
    row: list[Row] = [{"index": 0, "remap_failed": True}]
    assert states(check("gpus", "remap_failed", equals=True), row) == ["passed"]
    assert states(check("gpus", "remap_failed", equals=1), row) == ["failed"]
    assert states(check("gpus", "remap_failed", any_of=(1, 2)), row) == ["failed"]
    assert states(check("gpus", where={"remap_failed": 1}, max_count=0), row) == ["passed"]


def test_regular_expressions_choose_rows() -> None:
    """`re:` in `where` is for the whole value, of text and of integers."""
    rows: list[Row] = [
        {"pid": 1, "command": "/usr/sbin/sshd -D", "uid": 0},
        {"pid": 2, "command": "x sshd", "uid": 1000},
    ]
    assert states(check("processes", where={"command": r"re:\S*sshd( .*)?"}, count=1), rows) == ["passed"]
    assert states(check("processes", where={"uid": r"re:\d{4,}"}, count=1), rows) == ["passed"]
    assert states(check("processes", where={"uid": r"re:\d{3}"}, count=0), rows) == ["passed"]


def port(errors: Value, **more: Any) -> list[Row]:
    return [{"port": "mlx5_0/1", "symbol_errors": errors, **more}]


@pytest.mark.parametrize(
    ("before", "now", "boot", "expected"),
    [
        (5, 5, "b1", "passed"),
        (5, 6, "b1", "failed"),
        (5, 6, "b2", "passed"),  # another boot
        (5, 6, "", "passed"),  # of which nothing is known
        (500, 6, "b1", "passed"),  # the device was reset
        (None, 6, "b1", "passed"),
        (5, None, "b1", "unknown"),
        ("x", 6, "b1", "passed"),
    ],
)
def test_increases_are_of_one_boot(before: Value, now: Value, boot: str, expected: State) -> None:
    """A counter is compared with the last gathering of the same boot, unless it was reset in between."""
    older = facts("rdma_ports", port(before), ago_min=5, boot=boot)
    one = check("rdma_ports", "symbol_errors", max_increase=0)
    assert states(one, port(now), older) == [expected]
    assert states(one, port(now)) == ["unknown" if now is None else "passed"]


def test_a_limit_holds_without_an_earlier_gathering() -> None:
    """A check of an increase and a limit tests the limit at the first gathering, too."""
    assert states(check("rdma_ports", "symbol_errors", max_increase=5, max=100), port(101)) == ["failed"]


@pytest.mark.parametrize(
    ("rate", "increase", "ago_min", "expected"),
    [
        ("120/h", 10, 5, "passed"),
        ("120/h", 11, 5, "failed"),
        ("120/h", 2, 0.01, "passed"),  # what a minute allows
        ("3/d", 1, 5, "passed"),  # one event is no rate
        ("3/d", 2, 5, "failed"),
        ("10/s", 3000, 5, "passed"),
        ("10/s", 3001, 5, "failed"),
        ("10/s", 10**6, -5, "passed"),  # the clock was set back: how long it took is unknown
    ],
)
def test_rates(rate: str, increase: int, ago_min: float, expected: State) -> None:
    """A rate is the increase by the time since the last gathering."""
    older = facts("rdma_ports", port(0), ago_min=ago_min)
    assert states(check("rdma_ports", "symbol_errors", max_rate=rate), port(increase), older) == [expected]


def test_rates_do_not_follow_a_clock_that_is_set() -> None:
    """The time between two gatherings is by the clock of the boot: setting the clock back makes no rate."""
    one = check("rdma_ports", "symbol_errors", max_rate="120/h")
    older = facts("rdma_ports", port(0), ago_min=1, uptime_s=1000.0)
    assert states(one, port(100), older, uptime_s=4600.0) == ["passed"]
    assert states(one, port(121), older, uptime_s=4600.0) == ["failed"]


def xid(minutes: float | str, device: str = "0000:b5:00.0", code: int = 31, **more: Any) -> Row:
    when = at(minutes) if isinstance(minutes, int | float) else minutes
    return {
        "event": id(minutes),
        "kind": "xid",
        "code": code,
        "device": device,
        "at": when,
        "text": f"Xid {code}",
        **more,
    }


TWICE = check("kernel_log", where={"kind": "xid", "code": 31}, max_age="24h", group_by=("device",), max_count=1)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([xid(5), xid(60)], "failed"),
        ([xid(5), xid(60, device="0000:b6:00.0")], "passed"),  # different GPUs
        ([xid(5), xid(60, code=13)], "passed"),
        ([xid(5), xid(25 * 60)], "passed"),  # too old
        ([xid(5), xid("")], "unknown"),
        ([xid(5), xid("yesterday")], "unknown"),
        ([xid(5), xid("2026-11-26 11:00:00")], "unknown"),  # in which time zone?
        ([xid(5), xid(-60)], "failed"),  # the clock was set back
        ([xid(5), {**xid(6), "code": None}], "passed"),  # a line that names no code
    ],
)
def test_groups_within(rows: list[Row], expected: State) -> None:
    """Events count by device and within a time; one whose time is unknown may count."""
    assert states(TWICE, rows) == [expected]


@pytest.mark.parametrize(("used", "hint"), [(1.0, "make room"), (None, ""), (0.1, "")])
def test_what_failed_says_what_to_do(used: Value, hint: str) -> None:
    """A check that passed, or is unknown, asks for nothing."""
    one = check("mounts", "used_share", max=0.9, hint="make room")
    (finding,) = evaluate([one], facts("mounts", [{"target": "/", "used_share": used}]))
    assert finding.hint == hint


def test_an_event_is_the_evidence() -> None:
    """A finding about events names the group, quotes the last line, and is as old as the last event."""
    (finding,) = evaluate([TWICE], facts("kernel_log", [xid(60), xid(5, text="Xid 31\x1b[0m")]))
    assert (finding.subject, finding.evidence_at) == ("0000:b5:00.0", at(5))
    assert "Xid 31?[0m" in finding.message


@pytest.mark.parametrize(("gaps_min", "expected"), [([0, 2, 4, 6], "passed"), ([0, 2, 4, 10], "failed")])
def test_bursts_count_once(gaps_min: list[float], expected: State) -> None:
    """Events that follow each other closely are one, however many."""
    one = msgspec.structs.replace(TWICE, merge_within="3min")
    assert states(one, [xid(gap) for gap in reversed(gaps_min)]) == [expected]


def test_a_row_of_several_lines_begins_with_the_first() -> None:
    """One that began two minutes after another and goes on for an hour is of the same burst."""
    one = msgspec.structs.replace(TWICE, merge_within="3min")
    for began_min, expected in ((78, "passed"), (70, "failed")):
        assert states(one, [xid(80), xid(10, began=at(began_min))]) == [expected]


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([("nas1", "timeout")], "failed"),
        ([("nas1", "timeout"), ("nas1", "ok")], "passed"),
        ([("nas1", "ok"), ("nas1", "timeout")], "failed"),
        ([("nas1", "timeout"), ("nas2", "ok")], "failed"),
        ([("nas1", "timeout"), ("nas1", "ok"), ("nas2", "timeout")], "failed"),
    ],
)
def test_later_events_clear(events: list[tuple[str, str]], expected: State) -> None:
    """A later event of the same group ends earlier ones; of another group it does not."""
    one = check(
        "kernel_log",
        where={"kind": "nfs", "state": "timeout"},
        cleared_by={"kind": "nfs", "state": "ok"},
        group_by=("device",),
        max_count=0,
    )
    rows: list[Row] = [
        {"event": number, "kind": "nfs", "device": server, "state": state, "at": at(30 - number)}
        for number, (server, state) in enumerate(events)
    ]
    assert states(one, rows) == [expected]


def test_findings_are_few() -> None:
    """Of many that failed the last says how many more there are; values that are unknown are one finding."""
    rows: list[Row] = [{"target": str(n), "used_share": None if n < 30 else 1.0} for n in range(50)]
    findings = evaluate([check("mounts", "used_share", max=0.9)], facts("mounts", rows))
    assert [finding.state for finding in findings] == ["failed"] * 16
    assert findings[-1].message.startswith("6 more")
    (finding,) = evaluate([check("mounts", "used_share", max=0.9)], facts("mounts", rows[:30]))
    assert (finding.state, finding.subject) == ("unknown", "")
    (finding,) = evaluate([check("mounts", "used_share", max=0.9)], facts("mounts", rows[:1]))
    assert (finding.state, finding.subject) == ("unknown", "0")


@pytest.mark.parametrize(
    ("where", "more", "expected"),
    [
        ({"target": "/scrach"}, {}, "unknown"),
        ({"target": "/home"}, {}, "passed"),
        ({"target": "/home", "type": "nfs"}, {}, "passed"),  # it is there, and not meant
        ({"target": ("/scrach", "/tmp")}, {}, "passed"),
        ({"target": "/scr*"}, {}, "passed"),
        ({"target": "/scrach"}, {"min_count": 1}, "failed"),
        ({}, {}, "passed"),
    ],
)
def test_one_row_that_is_not_there(where: dict[str, Any], more: dict[str, Any], expected: State) -> None:
    """A check of the value of a row that it names is unknown without it: the name may be misspelt."""
    rows: list[Row] = [{"target": "/home", "type": "xfs", "used_share": 0.1}]
    assert states(check("mounts", "used_share", where=where, max=0.9, **more), rows) == [expected]


def test_values_that_differ_from_most() -> None:
    """all_equal accuses the rows that differ from most."""
    rows: list[Row] = [{"index": n, "vbios": "96.00" if n != 3 else "95.00"} for n in range(8)]
    (finding,) = evaluate([check("gpus", "vbios", all_equal=True)], facts("gpus", rows))
    assert (finding.state, finding.subject) == ("failed", "3")


def test_each_table_can_be_checked() -> None:
    """What identifies the rows of a table, and what checks name in it, are keys of it."""
    for name, table in TABLES.items():
        assert {table.subject, table.named} - {""} <= set(table.keys), name


@pytest.mark.parametrize("most", [0, 1])
def test_too_many_groups_hide_failures_alone(most: int) -> None:
    """What is unknown stays so, however few groups may fail; a row without a time may be one of the last day."""
    one = check("kernel_log", max_count=0, group_by=("device",), max_age="24h", max_groups=most)
    failing: list[Row] = [{"device": device, "at": at(1)} for device in "ab"]
    assert states(one, []) == ["passed"]
    assert states(one, failing) == ["passed"]
    assert states(one, failing[:1]) == ["passed" if most == 0 else "failed"]
    assert states(one, [*failing, {"device": "c", "at": None}]) == ["unknown"]
    assert states(one, [], unknown="no permission") == ["unknown"]


def remember(one: Check, rows: Sequence[Row], before: NodeFacts | None = None, **more: Any) -> NodeFacts:
    """Return the facts as the next gathering has them: with what failed."""
    now = facts(one.table, rows, **more)
    return msgspec.structs.replace(now, failed=remembered(evaluate([one], now, before), now, before))


GONE = [{"target": "/", "responds": True}]


@pytest.mark.parametrize(
    ("rows", "more", "expected"),
    [
        (GONE, {}, "unknown"),
        ([], {"unknown": "no answer"}, "unknown"),
        (GONE, {"boot": "b2"}, "passed"),
        ([*GONE, {"target": "/scratch", "responds": True}], {}, "passed"),
        ([*GONE, {"target": "/scratch", "responds": False}], {}, "failed"),
    ],
    ids=["gone", "not read", "another boot", "heals", "fails"],
)
def test_what_failed_and_is_gone_is_not_healed(rows: list[Row], more: dict[str, Any], expected: State) -> None:
    """It heals where it is there again, or after a boot, however many reports later. A process may go."""
    one = check("mounts", "responds", equals=True)
    before = remember(one, [*GONE, {"target": "/scratch", "responds": False}])
    for _ in range(2):
        assert states(one, rows, before, **more) == [expected]
        before = remember(one, rows, before, **more)
    mild = msgspec.structs.replace(one, action="report")
    assert states(mild, GONE, remember(mild, [{"target": "/scratch", "responds": False}])) == ["passed"]
    of_processes = check("processes", "cpu_s", max=1)
    assert states(of_processes, [], remember(of_processes, [{"pid": 7, "cpu_s": 9}])) == ["passed"]


def test_an_event_ends_by_its_line_and_not_by_its_age() -> None:
    """One that a line ends is unknown until then; the finding of another says that it is of an event."""
    lost: Row = {"kind": "gpu", "state": "lost", "device": "g1", "at": at(100)}
    one = check("kernel_log", where={"state": "lost"}, max_age="2h", group_by=("device",), max_count=0)
    ends = msgspec.structs.replace(one, cleared_by={"state": "ok"})
    before = remember(ends, [lost])
    ok: Row = {**lost, "state": "ok"}
    assert states(ends, [], before) == ["unknown"]
    for early in (at(110), "", None):
        assert states(ends, [{**ok, "at": early}], before) == ["unknown"]
    assert states(ends, [{**ok, "device": "g2", "at": at(90)}], before) == ["unknown"]
    assert states(ends, [{**ok, "at": at(90)}], before) == states(one, [], remember(one, [lost])) == ["passed"]
    assert [evaluate([each], facts("kernel_log", [lost]))[0].is_event for each in (one, ends)] == [True, False]


def test_a_message_has_the_value_of_a_row_for_an_expression() -> None:
    """What was found, where it was; the expression where no row has such a value."""
    where = {"uid": "re:(?!(?!)$)(?:[1-9][0-9]{3,})", "job_id": ""}
    rows: list[Row] = [{"pid": 7, "uid": 1001, "job_id": ""}]
    (found,) = evaluate([check("processes", where=where, max_count=0)], facts("processes", rows))
    assert found.message == "processes with uid 1001 job_id : 1 (expected at most 0)"
    (found,) = evaluate([check("processes", where=where, min_count=1)], facts("processes", []))
    assert "[1-9]" in found.message
