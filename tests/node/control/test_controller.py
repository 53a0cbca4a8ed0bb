"""The controller over a Slurm in memory, with people who drain and resume, killed anywhere: caps, ownership, ends."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pitools.core import timestamps
from pitools.core.errors import UsageError
from pitools.node import spool
from pitools.node.check.config import Control
from pitools.node.check.this_node import NodeCheck, refusing
from pitools.node.control import incidents, policy, tick
from pitools.node.control.incidents import EntryKind
from pitools.node.types import Action, Finding, NodeFacts, NodeReport
from pitools.slurm.records import Node
from tests.node.control.world import LEAVES, NODES, Clock, World


@pytest.mark.parametrize(
    ("seed", "damage"), [*((seed, 0.0) for seed in range(16)), *((11 + 9 * i, 0.1) for i in range(6))]
)
def test_caps_and_ownership_hold_whatever_happens(tmp_path: Path, clock: Clock, seed: int, damage: float) -> None:
    """Half of the nodes fail, people drain and resume, Slurm fails, the controller is killed; then all is healed.

    damage: how often a line of the journal is.
    """
    limits: dict[str, Any] = {"max_share_leaf": 0.25, "max_share_partition": 0.2, "max_share_hour": 0.2}
    world = World(tmp_path, clock, seed, 0.15, bench_before_return=seed % 2 == 1, **limits)
    people: dict[str, str] = {}
    path = tmp_path / "control" / "journal.jsonl"
    for _ in range(150):
        clock.pass_minutes(world.dice.uniform(0, 8))
        node = world.dice.choice(NODES)
        match world.dice.randrange(9):
            case 0 if len(world.faulty) < len(NODES) // 2:
                world.faulty[node] = world.dice.choice(["drain", "reboot", "drain-after-job", "report", "none"])
            case 1:
                world.faulty.pop(node, None)
                world.boots[node] += 1
                world.slow[node] = world.dice.choice(["passed", "passed", "unknown"])
            case 2:
                world.slurm.reasons[node] = people[node] = f"{world.dice.choice(['NHC:', 'bob:', 'pit'])} broken"
            case 3 if node in people:
                world.slurm.reasons.pop(node, None)
                people.pop(node)
            case 4 if node in world.ours() - people.keys():
                world.slurm.reasons.pop(node)  # a person resumes a node that we drained
            case 5 if node in world.ours() - people.keys():
                world.slurm.reasons[node] = people[node] = f"{world.slurm.reasons[node]}; bob: mine"
            case _:
                world.report()
        if world.dice.random() < damage and path.exists():
            lines = path.read_bytes().split(b"\n")
            number = world.dice.randrange(max(1, len(lines) - 1))
            lines[number] = world.dice.choice([b"garbage", b"\0" * 40, lines[number][:120], lines[number][:-5] + b"x"])
            path.write_bytes(b"\n".join(lines))
        world.tick()
        assert {name: world.slurm.reasons.get(name) for name in people} == people
        ours = world.ours()
        for members in LEAVES.values():
            assert len(ours.intersection(members)) <= 2
        assert len(ours) <= 3  # of the 16 of train; a fifth
    opened = re.findall(rb'"opened","incident":"([^"]+)"', path.read_bytes())
    assert len(set(opened)) == len(opened)
    assert all(incidents.incident_of_reason(reason)[0] for _, reason in world.slurm.resumed)
    world.faulty.clear()
    world.slow.clear()
    world.slurm.share = 0.0
    for name in NODES:
        world.boots[name] += 1
    for _ in range(5):
        clock.pass_minutes(11)
        world.report()
        world.tick()
    open_ones = [one for one in incidents.read_incidents(path).incidents.values() if one.phase != "over"]
    assert all(one.is_escalated and (one.asked_at or damage) for one in open_ones)  # after an hour without a bench
    world.slurm.benched = None
    tick.Controller(world.slurm, world.config).return_nodes([one.node for one in open_ones])  # type: ignore[arg-type]
    assert world.ours() <= people.keys()
    assert not any(spool.is_bench_requested(tmp_path, name) for name in NODES)
    assert {one.phase for one in incidents.read_incidents(path).incidents.values()} <= {"over"}


def test_each_drain_is_made_once(tmp_path: Path, clock: Clock) -> None:
    """A second tick, and one that finds an intent carried out, change nothing."""
    world = World(tmp_path, clock)
    world.faulty["n03"] = "drain"
    world.report()
    assert [(row.act, row.node, row.done) for row in world.tick()] == [("drain", "n03", True)]
    assert world.slurm.calls == 2 + 1 + 2 + 1  # the poll and its topology; a look; the act, counted twice; another look
    assert world.slurm.reasons == {"n03": "pit node [n03-20261101000000] gpu-count: gpus: 7 (expected exactly 8)"}
    assert world.tick() == []
    journal = tmp_path / "control" / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(lines[0])  # killed between Slurm's answer and its entry
    assert [row.act for row in world.tick()] == ["drain"]
    assert [entry.kind for entry in world.entries()] == [EntryKind.OPENED, EntryKind.DRAINED]


def test_nodes_are_told_what_was_dealt_with(tmp_path: Path, clock: Clock) -> None:
    """All evidence while a node is drained; after a person's resume, that of before, while it is young."""
    world = World(tmp_path, clock)
    world.faulty = {"n03": "drain", "n04": "report"}

    def told() -> str:
        clock.pass_minutes(1)
        world.report()
        world.tick()
        return spool.handled_until(tmp_path, "n03")

    assert told() == policy.DRAINED
    assert told() == policy.DRAINED
    world.faulty.clear()
    world.slurm.reasons.clear()
    assert told() == timestamps.to_rfc3339(clock.now - timedelta(minutes=1))  # the last poll that saw it drained
    assert told() == timestamps.to_rfc3339(clock.now - timedelta(minutes=2))
    assert spool.handled_until(tmp_path, "n04") == ""
    clock.pass_minutes(60)
    assert told() == ""


@pytest.mark.parametrize(("action", "refuses"), [("drain-after-job", False), ("drain", True)])
def test_a_node_with_jobs_is_drained_at_once(action: Action, refuses: bool) -> None:
    """Slurm lets them end; `drain-after-job` keeps no job off until then."""
    now = "2026-11-01T12:00:00.000Z"
    finding = Finding(node="n03", check="gpus", state="failed", level="critical", action=action, evidence_at=now)
    report = NodeReport(node="n03", boot_id="", checked_at=now, findings=(finding,))
    view = policy.NodeView("n03", is_drained=False, is_down=False, has_jobs=True, reason="")
    assert [one.act for one in policy.decide(now, {"n03": view}, {"n03": report}, [], Control(), {})] == ["drain"]
    facts = NodeFacts(node="n03", boot_id="", gathered_at=now, tables={})
    assert bool(refusing(NodeCheck(facts, [finding], []))) is refuses


def test_a_dry_run_changes_nothing(tmp_path: Path, clock: Clock) -> None:
    """It says what would be done, and leaves neither a drain nor a journal."""
    world = World(tmp_path, clock)
    world.faulty["n03"] = "drain"
    world.report()
    assert [(row.act, row.done) for row in world.tick(act=False)] == [("drain", False)]
    assert not world.slurm.reasons
    assert not (tmp_path / "control").exists()


@pytest.mark.parametrize(
    ("change", "drained"),
    [
        ({}, True),
        ({"is_shadow": True}, False),
        ({"state": "unknown"}, False),
        ({"action": "report"}, False),
        ({"evidence_at": "2026-10-31T22:59:59.000Z"}, False),
        ({"evidence_at": "2026-10-31T23:00:01.000Z"}, True),
        ({"evidence_at": "2026-11-01T00:04:59.000Z"}, True),
        ({"evidence_at": "2026-11-01T00:05:01.000Z"}, False),
        ({"evidence_at": "2027-01-01T00:00:00.000Z"}, False),
        ({"evidence_at": "yesterday"}, False),
    ],
)
def test_only_fresh_evidence_that_says_so_drains(
    tmp_path: Path, clock: Clock, change: dict[str, object], drained: bool
) -> None:
    """Unknown, shadow, mild, old, or of a clock that is wrong: it drains nothing."""
    world = World(tmp_path, clock)
    world.faulty["n03"] = "drain"
    world.report()
    path = tmp_path / "n03.json"
    report = msgspec.json.decode(path.read_bytes(), type=NodeReport)
    finding = msgspec.structs.replace(report.findings[0], **change)
    spool.write_report(tmp_path, msgspec.structs.replace(report, findings=(finding,)))
    world.tick()
    assert world.ours() == ({"n03"} if drained else set())


def test_a_node_returns_when_its_checks_have_passed_for_a_while(tmp_path: Path, clock: Clock) -> None:
    """A flap begins the time anew; a reboot needs none of it."""
    world = World(tmp_path, clock)

    def ticks(minutes: float) -> list[str]:
        clock.pass_minutes(minutes)
        world.report()
        return [row.act for row in world.tick()]

    world.faulty["n03"] = "drain"
    assert ticks(1) == ["drain"]
    world.faulty.clear()
    assert ticks(1) == ["recover"]
    assert ticks(9) == []
    world.faulty["n03"] = "drain"
    assert ticks(1) == ["relapse"]
    world.faulty.clear()
    assert ticks(1) == ["recover"]
    assert ticks(9) == []
    assert ticks(2) == ["return"]
    assert not world.ours()
    world.faulty["n03"] = "drain"
    assert ticks(1) == ["drain"]
    world.faulty.clear()
    world.boots["n03"] += 1
    assert ticks(1) == ["recover", "return"]


def test_a_bench_precedes_a_return_where_the_site_wants_it(tmp_path: Path, clock: Clock) -> None:
    """Asked for once the checks pass, awaited while it has no result; one that fails is for a person."""
    world = World(tmp_path, clock, bench_before_return=True, max_share_partition=1.0)
    world.faulty["n03"] = world.faulty["n04"] = "drain"

    def ticks() -> list[tuple[str, str, bool]]:
        clock.pass_minutes(11)
        world.report()
        return [(row.act, row.node, row.done) for row in world.tick()]

    assert ticks() == [("drain", "n03", True), ("drain", "n04", True)]
    world.faulty.clear()
    world.slow = {"n03": "unknown", "n04": "failed"}
    assert ticks() == [("recover", "n03", True), ("recover", "n04", True)]
    assert ticks() == [("bench", "n03", True), ("bench", "n04", True)]
    assert ticks() == [("relapse", "n04", True), ("escalate", "n04", True)]
    assert spool.is_bench_requested(tmp_path, "n03")
    world.slow.pop("n03")
    assert ticks() == [("return", "n03", True), ("recover", "n04", True)]
    assert ticks() == []
    assert world.ours() == {"n04"}
    assert not spool.is_bench_requested(tmp_path, "n04")
    world.slurm.benched = None  # a person needs none
    assert [row.done for row in tick.Controller(world.slurm, world.config).return_nodes(["n04"]).rows] == [True]  # type: ignore[arg-type]


def test_a_bench_without_a_result_is_left_to_a_person(tmp_path: Path, clock: Clock) -> None:
    """It is awaited for an hour, and no longer; asked for anew when its checks failed and pass again."""
    world = World(tmp_path, clock, bench_before_return=True, max_share_partition=1.0)
    world.slow = {"n03": "unknown"}
    acts = []
    for faulty in [True, *[False] * 5, True, *[False] * 20]:
        world.faulty = {"n03": "drain"} if faulty else {}
        clock.pass_minutes(11)
        world.report()
        acts += [row.act for row in world.tick()]
    assert acts == ["drain", "recover", "bench", "relapse", "recover", "bench", "escalate"]
    assert not spool.is_bench_requested(tmp_path, "n03")


def test_the_hour_of_a_bench_begins_anew_after_a_failure(tmp_path: Path, clock: Clock) -> None:
    """Also where the node, booted again meanwhile, needs no stable time between its recovery and its bench."""
    world = World(tmp_path, clock, bench_before_return=True, max_share_partition=1.0)
    world.slow = {"n03": "unknown"}
    acts = []
    for faulty, minutes in ((True, 11), (False, 11), (False, 11), (True, 11), (False, 70), (False, 11)):
        world.faulty = {"n03": "drain"} if faulty else {}
        world.boots["n03"] = len(acts) > 0
        clock.pass_minutes(minutes)
        world.report()
        acts += [row.act for row in world.tick()]
    assert acts[-2:] == ["recover", "bench"]
    assert "escalate" not in acts


def test_a_clock_that_is_set_back_returns_nothing_and_forgets_no_limit(tmp_path: Path, clock: Clock) -> None:
    """Checks pass for a while by the clock as it is now, and the drains of the hour are those of before, too."""
    world = World(tmp_path, clock, max_share_hour=0.125, max_share_partition=1.0)
    acts: list[list[str]] = []

    def tick_after(minutes: float, *faulty: str) -> None:
        clock.pass_minutes(minutes)
        world.faulty = dict.fromkeys(faulty, "drain")
        world.report()
        acts.append([row.act for row in world.tick()])

    tick_after(0, "n03", "n04")
    tick_after(20)
    tick_after(-6)
    tick_after(9)
    tick_after(2)
    assert acts == [["drain"] * 2, ["recover"] * 2, ["recover"] * 2, [], ["return"] * 2]
    tick_after(-40, "n05", "n06")
    assert acts[-1] == ["hold"] * 2


def test_a_clock_that_was_a_year_ahead_holds_no_node(tmp_path: Path, clock: Clock) -> None:
    """A node that was drained then recovers, and one that was returned then is drained anew."""
    world = World(tmp_path, clock, max_share_partition=1.0)
    acts: list[list[tuple[str, str]]] = []

    def tick_after(minutes: float, *faulty: str) -> None:
        clock.pass_minutes(minutes)
        world.faulty = dict.fromkeys(faulty, "drain")
        world.report()
        acts.append([(row.act, row.node) for row in world.tick()])

    year = 60.0 * 24 * 365
    tick_after(year, "n03", "n04")
    tick_after(1, "n03")
    tick_after(11, "n03")
    assert acts == [[("drain", "n03"), ("drain", "n04")], [("recover", "n04")], [("return", "n04")]]
    tick_after(-year, "n04")
    tick_after(11)
    assert acts[-2:] == [[("recover", "n03"), ("drain", "n04")], [("return", "n03"), ("recover", "n04")]]


@pytest.mark.parametrize("polls_before", [0, 1])
def test_a_node_that_is_down_is_not_resumed(tmp_path: Path, clock: Clock, polls_before: int) -> None:
    """Neither by a person's `pit node return` nor by a tick, also where it went down since the poll."""
    world = World(tmp_path, clock)
    world.faulty["n03"] = "drain"
    world.report()
    world.tick()
    world.faulty.clear()
    for minutes in (1, 11):
        clock.pass_minutes(minutes)
        world.report()
        if minutes == 1:
            world.tick()
    listed = world.slurm.nodes

    def nodes(names: str = "") -> list[Node]:
        is_down = names or not polls_before
        return [msgspec.structs.replace(one, state="down") if is_down else one for one in listed(names)]

    world.slurm.nodes = nodes  # type: ignore[method-assign]
    (row,) = tick.Controller(world.slurm, world.config).return_nodes(["n03"]).rows  # type: ignore[arg-type]
    assert (row.done, "down" in row.why, "not done" in row.why) == (False, True, bool(polls_before))
    assert not any(row.done for row in world.tick())
    assert world.slurm.resumed == []
    world.slurm.nodes = listed  # type: ignore[method-assign]
    assert [(row.act, row.done) for row in world.tick()] == [("return", True)]


@pytest.mark.parametrize(("action", "remedy"), [("reboot", "boots"), ("repair", "serials")])
def test_a_node_returns_after_its_remedy_alone(tmp_path: Path, clock: Clock, action: Action, remedy: str) -> None:
    """Without the reboot, or the new part, a person is told once, and only then returns by itself."""
    world = World(tmp_path, clock)
    world.faulty["n03"] = action
    world.report()
    world.tick()
    world.faulty.clear()
    acts = []
    for _ in range(4):
        clock.pass_minutes(11)
        world.report()
        acts += [row.act for row in world.tick()]
    assert acts == ["recover", "escalate"]
    assert world.ours() == {"n03"}


def test_a_node_that_returned_often_is_left_to_a_person(tmp_path: Path, clock: Clock) -> None:
    """The limit counts the returns of a window of time."""
    world = World(tmp_path, clock, max_returns=2)
    acts = []
    for _ in range(3):
        for faulty in (True, False, False):
            clock.pass_minutes(11)
            world.faulty = {"n03": "drain"} if faulty else {}
            world.report()
            acts += [row.act for row in world.tick()]
    assert acts == ["drain", "recover", "return"] * 2 + ["drain", "recover", "escalate"]
    assert world.ours() == {"n03"}


def test_a_lost_journal_loses_no_drain(tmp_path: Path, clock: Clock) -> None:
    """The reason of a node names its incident. What its check asked for is lost: a person returns it."""
    world = World(tmp_path, clock)
    world.faulty["n03"] = "drain"
    world.report()
    world.tick()
    (tmp_path / "control" / "journal.jsonl").unlink()
    world.faulty.clear()
    acts = []
    for _ in range(3):
        clock.pass_minutes(11)
        world.report()
        acts += [row.act for row in world.tick()]
    assert acts == ["adopt", "escalate", "recover"]
    assert world.ours() == {"n03"}


def test_a_drain_of_another_controller_is_left_to_a_person(tmp_path: Path, clock: Clock) -> None:
    """With another spool, it numbers its incidents as this one does: the journal's own of that number is over."""
    world = World(tmp_path, clock)
    world.faulty["n03"] = "drain"
    world.report()
    world.tick()
    (reason,) = (world.slurm.reasons[name] for name in world.ours())
    world.faulty.clear()
    while world.ours():
        clock.pass_minutes(11)
        world.report()
        world.tick()
    world.slurm.reasons["n03"] = reason
    for _ in range(5):
        clock.pass_minutes(11)
        world.report()
        world.tick()
    assert world.ours() == {"n03"}


def test_a_node_that_a_person_set_down_keeps_its_reason(tmp_path: Path, clock: Clock) -> None:
    """A drain would replace the reason; also where it was set down since the poll."""
    world = World(tmp_path, clock)
    world.faulty["n03"] = "drain"
    world.report()
    listed = world.slurm.nodes

    def down(names: str = "") -> list[Node]:
        return [msgspec.structs.replace(one, state="down", reason="psu swap") for one in listed(names)]

    for polls_before in (0, 1):
        world.slurm.nodes = lambda names="", before=polls_before: (listed if not names and before else down)(names)  # type: ignore[method-assign]
        world.tick()
        assert not world.slurm.reasons
        assert {entry.kind for entry in world.entries()} <= {EntryKind.OPENED, EntryKind.RELEASED}


@pytest.mark.parametrize(("report", "acts"), [("failing", ["drain"]), ("passing", ["release"]), ("none", [])])
def test_a_begun_drain_is_made_only_while_a_report_asks_for_it(
    tmp_path: Path, clock: Clock, report: str, acts: list[str]
) -> None:
    """The controller was killed between its intent and Slurm, and the node is well since, or silent."""
    world = World(tmp_path, clock)
    world.faulty["n03"] = "drain"
    world.report()
    world.tick()
    journal = tmp_path / "control" / "journal.jsonl"
    journal.write_bytes(journal.read_bytes().splitlines(keepends=True)[0])
    world.slurm.reasons.clear()
    clock.pass_minutes(20)
    if report != "none":
        world.faulty = {"n03": "drain"} if report == "failing" else {}
        world.report()
    assert [row.act for row in world.tick()] == acts
    assert world.ours() == ({"n03"} if report == "failing" else set())


@pytest.mark.parametrize(
    ("before", "after", "act"),
    [
        ("gpus sda:a sdb:b", "gpus sda:c sdb:b", "return"),
        ("gpus sda:a sdb:b", "gpus sdb:b", "relapse"),
        ("gpus sdb:b", "gpus sda:a sdb:b", "escalate"),
        ("gpus sda:a sdb:b", "gpus sda:b sdb:a", "escalate"),
        ("gpus", "gpus sda:a", "escalate"),
        ("gpus sda:a", "gpus", "relapse"),
        ("block_devices sda:a sdb:b", "block_devices sda:a sdb:c", "escalate"),
        ("block_devices sda:a sdb:b", "block_devices sda:c sdb:b", "return"),
    ],
    ids=["replaced", "gone", "back", "renamed", "first read", "not read", "another one", "the one"],
)
def test_only_a_new_serial_number_is_a_repair(before: str, after: str, act: str) -> None:
    """A GPU that fell off the bus and came back, or disks in another order, are no new part; nor is another part."""

    def hardware(text: str) -> dict[str, str]:
        table, *devices = text.split()
        return {f"{table} {name} serial": serial for name, _, serial in (one.partition(":") for one in devices)}

    now = "2026-11-01T12:00:00.000Z"
    incident = incidents.Incident(
        incident="n03-1",
        node="n03",
        check="gpu-count",
        action="repair",
        opened_at="2026-11-01T10:00:00.000Z",
        evidence_at="2026-11-01T10:00:00.000Z",
        message="broken",
        hardware=hardware(before),
        part="gpus 3" if before.startswith("gpus") else "block_devices sda",
        phase="recovered",
        drained_at="2026-11-01T10:00:00.000Z",
        recovered_at="2026-11-01T11:00:00.000Z",
    )
    report = NodeReport(node="n03", boot_id="", checked_at=now, hardware=hardware(after), passed=("gpu-count",))
    view = policy.NodeView("n03", is_drained=True, is_down=False, has_jobs=False, reason=incident.reason)
    decisions = policy.decide(
        now, {"n03": view}, {"n03": report}, [incident], Control(), {"n03": policy.Sight(now, now, now)}
    )
    assert [one.act for one in decisions] == [act]


def test_a_person_returns_what_is_ours_and_was_checked(tmp_path: Path, clock: Clock) -> None:
    """Not before a new report, nor while a check fails, nor a drain of others; even where it was left to a person."""
    world = World(tmp_path, clock)
    world.faulty = {"n03": "reboot"}
    world.report()
    world.tick()
    world.slurm.reasons["n04"] = "bob: fans"
    controller = tick.Controller(world.slurm, world.config)  # type: ignore[arg-type]

    def returned() -> list[bool]:
        clock.pass_minutes(1)
        return [row.done for row in controller.return_nodes(["n03", "n04", "n05"]).rows]

    assert returned() == [False] * 3
    world.report()
    assert returned() == [False] * 3
    world.faulty.clear()
    clock.pass_minutes(20)
    assert returned() == [False] * 3  # the report is too old
    world.report()
    world.tick()
    assert returned() == [True, False, False]
    assert world.slurm.reasons == {"n04": "bob: fans"}
    assert [one.outcome for one in controller.incidents().values()] == ["returned"]
    with pytest.raises(UsageError):
        controller.return_nodes(["n3"])
