"""A journal with damaged lines, or lost: what that concerns is left to a person, all else goes on, no line is lost."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pitools.core.journal import DamagedLine
from pitools.node.control import incidents
from pitools.node.control.incidents import EntryKind, IncidentEntry, fold
from pitools.node.control.tick import Controller
from tests.node.control.world import Clock, World


def step(world: World, *faulty: str, minutes: float = 11) -> list[tuple[str, str]]:
    """Let time pass, all nodes report, and the controller tick."""
    world.clock.pass_minutes(minutes)
    world.faulty = dict.fromkeys(faulty, "drain")
    world.report()
    return [(row.act, row.node) for row in world.tick()]


def past(folder: Path, clock: Clock) -> tuple[World, list[bytes]]:
    """Return a world with incidents that are over, drained or recovered, and the lines of its journal."""
    world = World(folder, clock, max_share_partition=1.0, max_share_leaf=1.0)
    for faulty in (["n00", "n01"], [], [], ["n01", "n02", "n03"], ["n03"], ["n03", "n04"]):
        step(world, *faulty)
    world.slurm.reasons["n09"] = "bob: fans"
    assert world.ours() == {"n03", "n04"}
    return world, (folder / "control" / "journal.jsonl").read_bytes().splitlines(keepends=True)


NAMED = b'"incident":"n03-1","node":"n03"'


@pytest.mark.parametrize(
    "text", [b"\0" * 200, b"garbage", b"[]", b"{}", NAMED + b"\0", NAMED + b"\xff", NAMED[:-1] + b'3"']
)
def test_a_line_that_names_nothing_concerns_what_is_open_there(tmp_path: Path, clock: Clock, text: bytes) -> None:
    """Told once, with its number; the two that are drained wait for a person; a later incident comes and goes."""
    world, lines = past(tmp_path, clock)
    path = tmp_path / "control" / "journal.jsonl"
    path.write_bytes(b"".join([*lines, text + b"\n"]))
    world.clock.pass_minutes(11)
    world.report()
    world.faulty.clear()
    rows, problems = Controller(world.slurm, world.config).tick(act=True)  # type: ignore[arg-type]
    assert sorted((row.act, row.node) for row in rows) == [("escalate", "n03"), ("escalate", "n04")]
    assert [f"line {len(lines) + 1}:" in one for one in problems] == [True, False]
    assert problems[1].startswith("n[03-04]: for a person: the journal is damaged")
    assert Controller(world.slurm, world.config).tick(act=True).problems == []  # type: ignore[arg-type]
    assert step(world, "n05") == [("recover", "n03"), ("recover", "n04"), ("drain", "n05")]
    assert [step(world), step(world)] == [[("recover", "n05")], [("return", "n05")]]
    assert world.ours() == {"n03", "n04"}
    rows = Controller(world.slurm, world.config).return_nodes(["n03", "n04"]).rows  # type: ignore[arg-type]
    assert [row.done for row in rows] == [True, True]
    assert path.read_bytes().startswith(b"".join([*lines, text + b"\n"]))
    incomplete = [one.node for one in incidents.read_incidents(path).incidents.values() if one.is_incomplete]
    assert incomplete == ["n03", "n04"]  # once each: not those that were over


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(number=st.integers(0, 14), cut=st.integers(1, 60), fill=st.sampled_from([b"", b"x", b"\0"]))
def test_one_damaged_line_stops_nothing(
    tmp_path_factory: pytest.TempPathFactory, clock: Clock, number: int, cut: int, fill: bytes
) -> None:
    """Cut or overwritten: no drain is made or ended twice, and each node is back, or waits for a person."""
    folder = tmp_path_factory.mktemp("spool")
    world, lines = past(folder, clock)
    entry = msgspec.json.decode(lines[number % len(lines)], type=IncidentEntry)
    lines[number % len(lines)] = lines[number % len(lines)][:-cut] + fill * cut + b"\n"
    path, resumed = folder / "control" / "journal.jsonl", len(world.slurm.resumed)
    path.write_bytes(b"".join(lines))
    acts = [act for _ in range(4) for act in step(world)]
    assert {act for act, _ in acts} <= {"recover", "return", "escalate", "release"}
    escalated = {node for act, node in acts if act == "escalate"}
    concerned = {entry.node} if fill != b"\0" and b'"node":' in lines[number % len(lines)] else {"n03", "n04"}
    assert escalated <= concerned
    assert world.ours() == escalated
    assert {node for node, _ in world.slurm.resumed[resumed:]} == {"n03", "n04"} - escalated
    assert world.slurm.reasons["n09"] == "bob: fans"
    assert path.read_bytes().startswith(b"".join(lines))
    after = incidents.read_incidents(path).incidents
    assert {one.node for one in after.values() if one.phase != "over"} == escalated


@pytest.mark.parametrize("kind", list(EntryKind))
def test_an_incident_is_left_to_a_person_whichever_of_its_lines_is_damaged(kind: EntryKind) -> None:
    """Its first, a middle or its last one; not another one's, nor an incident that was over."""

    def entry(kind: EntryKind, node: str) -> IncidentEntry:
        return IncidentEntry(at="2026-11-01T10:00:00.000Z", kind=kind, incident=f"{node}-1", node=node)

    text = msgspec.json.encode(entry(kind, "n1")).replace(b'"at"', b'"att"')
    opened, drained = EntryKind.OPENED, EntryKind.DRAINED
    before = [entry(drained, "n1")] if kind is opened else [entry(opened, "n1"), entry(drained, "n1")]
    others = [entry(opened, "n2"), entry(opened, "n3"), entry(EntryKind.RETURNED, "n3")]
    after = (
        [*others, DamagedLine(1, text, ""), *before] if kind is opened else [*others, *before, DamagedLine(9, text, "")]
    )
    assert {one.node: one.is_incomplete for one in fold(after).values()} == {"n1": True, "n2": False, "n3": False}


def test_an_incident_ends_where_the_next_of_its_node_begins(tmp_path: Path, clock: Clock) -> None:
    """The line that ended it was lost, or the node would have two."""
    world = World(tmp_path, clock)
    for faulty in (["n03"], [], [], ["n03"]):
        step(world, *faulty)
    first, second = fold(one for one in world.entries() if one.kind is not EntryKind.RETURNED).values()
    assert (first.phase, first.outcome, first.over_at) == ("over", "released", second.opened_at)
    assert second.phase == "drained"


def test_a_drain_that_was_begun_is_decided_anew_where_its_end_may_be_lost(tmp_path: Path, clock: Clock) -> None:
    """Others were drained since: to make it now would be beyond the limits."""
    world = World(tmp_path, clock, max_share_leaf=0.125, max_share_partition=1.0)
    step(world, "n03")
    path = tmp_path / "control" / "journal.jsonl"
    begun = path.read_bytes().splitlines(keepends=True)[0]
    path.write_bytes(begun)  # killed before Slurm drained it
    world.slurm.reasons.clear()
    assert [step(world), step(world, "n04")] == [[("release", "n03")], [("drain", "n04")]]
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], b"garbage\n", *lines[2:]]))
    assert step(world, "n03", "n04") == [("release", "n03")]
    assert step(world, "n03", "n04") == [("hold", "n03")]


def test_a_lost_journal_repeats_no_id(tmp_path: Path, clock: Clock) -> None:
    """Nor does another controller's: a drain with its reason is not taken for an incident of this journal."""
    world = World(tmp_path / "a", clock)
    (tmp_path / "a").mkdir()
    assert step(world, "n03") == [("drain", "n03")]
    (first,) = world.entries()[:1]
    assert [step(world), step(world)] == [[("recover", "n03")], [("return", "n03")]]
    (tmp_path / "a" / "control" / "journal.jsonl").rename(tmp_path / "old.jsonl")
    assert step(world, "n03") == [("drain", "n03")]
    (second,) = world.entries()[:1]
    assert first.incident != second.incident
    (tmp_path / "old.jsonl").rename(tmp_path / "a" / "control" / "journal.jsonl")
    assert step(world) == [("adopt", "n03"), ("escalate", "n03")]
    assert (
        incidents.read_incidents(tmp_path / "a" / "control" / "journal.jsonl").incidents[first.incident].phase == "over"
    )


def test_drains_that_a_lost_journal_had_count_for_the_limits(tmp_path: Path, clock: Clock) -> None:
    """In the tick that finds them, too."""
    world = World(tmp_path, clock, max_share_partition=1.0)
    assert step(world, "n00", "n01") == [("drain", "n00"), ("drain", "n01")]
    (tmp_path / "control" / "journal.jsonl").unlink()
    acts = step(world, "n00", "n01", "n02", "n03")
    assert [one for one in acts if one[0] in ("drain", "hold")] == [("hold", "n02"), ("hold", "n03")]


def test_two_incidents_of_a_second_have_two_ids() -> None:
    """As after a clock was set back."""
    at = "2026-11-26T19:12:59.123Z"
    first = incidents.new_id("gpu-07", at, [])
    assert (first, incidents.new_id("gpu-07", at, [first])) == ("gpu-07-20261126191259", "gpu-07-20261126191260")
    assert incidents.incident_of_reason(f"pit node [{first}] gpus: 7") == (first, "gpus")
