"""What people do, and nodes go through, between a tick and the next one, or within one: nothing of it is overlooked."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from pitools.core import timestamps
from pitools.node import spool
from pitools.node.control import incidents, tick
from pitools.node.control.incidents import EntryKind, IncidentEntry
from pitools.node.types import Finding, NodeReport
from tests.node.control.world import Clock, World

NOTE = "anna: replacing a DIMM, hands off"


def step(world: World, minutes: float = 5, *findings: Finding, ahead: float = 0, **changes: object) -> list[str]:
    """Let time pass, n03 report, with these findings, by a clock that is so far ahead, and the controller tick."""
    world.clock.pass_minutes(minutes + ahead)
    world.report(only="n03")
    path = Path(world.config.spool) / "n03.json"
    report = msgspec.json.decode(path.read_bytes(), type=NodeReport)
    checks = {one.check for one in findings}
    passed = tuple(name for name in (*report.passed, "xid-79") if name not in checks)
    changes |= {"findings": (*report.findings, *findings), "passed": passed}
    spool.write_report(path.parent, msgspec.structs.replace(report, **changes))
    world.clock.pass_minutes(-ahead)
    return [row.act for row in world.tick()]


def event(world: World, minutes_ago: float = 0, *, ahead: float = 0) -> Finding:
    """Return a finding of an event that n03 logged, by its clock."""
    world.clock.pass_minutes(ahead - minutes_ago)
    finding = msgspec.structs.replace(
        world.finding("n03", "xid-79", "drain"), evidence_at=timestamps.now_rfc3339(), is_event=True
    )
    world.clock.pass_minutes(minutes_ago - ahead)
    return finding


@pytest.mark.parametrize("kind", [EntryKind.OPENED, EntryKind.RETURNING])
def test_a_drain_that_a_person_makes_during_an_act_is_kept(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, kind: EntryKind
) -> None:
    """While the intent is written, which may take long; in the milliseconds of the call itself it cannot be known."""
    world, append = World(tmp_path, clock), tick.append_entry

    def append_slowly(path: Path, entry: IncidentEntry) -> None:
        append(path, entry)
        if entry.kind is kind:
            world.slurm.reasons["n03"] = NOTE

    monkeypatch.setattr(tick, "append_entry", append_slowly)
    for faulty in ("drain", "", "", ""):
        world.faulty = {"n03": "drain"} if faulty else {}
        step(world, 11)
    assert world.slurm.reasons == {"n03": NOTE}
    (incident,) = incidents.fold(world.entries()).values()
    assert incident.outcome == EntryKind.RELEASED


def test_a_drain_that_a_person_makes_right_after_ours_is_theirs(tmp_path: Path, clock: Clock) -> None:
    """It is read after the act."""
    world = World(tmp_path, clock, max_share_partition=1.0)
    drain = world.slurm.drain_node

    def drain_and_lose(node: str, reason: str) -> None:
        drain(node, reason)
        world.slurm.reasons[node] = NOTE

    world.slurm.drain_node = drain_and_lose  # type: ignore[method-assign]
    world.faulty = {"n03": "drain"}
    world.report()
    (row,) = world.tick()
    assert (row.done, NOTE in row.why, [one.kind for one in world.entries()]) == (False, True, ["opened", "released"])


@pytest.mark.parametrize(
    "change", ["{} -- RMA 4711, do NOT resume (anna)", "{}.", "pit node [n03-20261101000500] gpu-count: bad"]
)
def test_who_changes_a_part_of_our_reason_takes_the_drain_over(tmp_path: Path, clock: Clock, change: str) -> None:
    """It is released, neither resumed nor adopted, also by `pit node return`."""
    world = World(tmp_path, clock)
    world.faulty = {"n03": "drain"}
    assert step(world) == ["drain"]
    world.slurm.reasons["n03"] = reason = change.format(world.slurm.reasons["n03"])
    world.faulty.clear()
    assert [step(world) for _ in range(5)] == [["release"], [], [], [], []]
    (row,) = tick.Controller(world.slurm, world.config).return_nodes(["n03"]).rows  # type: ignore[arg-type]
    assert (row.done, world.slurm.reasons) == (False, {"n03": reason})


def test_a_reason_of_another_node_is_a_person_s(tmp_path: Path, clock: Clock) -> None:
    """Pasted onto a second node: that stays as it is, and the first one returns."""
    world = World(tmp_path, clock)
    world.faulty = {"n03": "drain"}
    assert step(world) == ["drain"]
    reason = world.slurm.reasons["n04"] = world.slurm.reasons["n03"]
    world.faulty.clear()
    assert [step(world) for _ in range(5)] == [["recover"], [], ["return"], [], []]
    assert world.slurm.reasons == {"n04": reason}


def test_a_node_is_stable_by_its_reports(tmp_path: Path, clock: Clock) -> None:
    """One report is none of a time; after a gap in them, longer than one counts, the time begins anew."""
    world = World(tmp_path, clock)
    world.faulty = {"n03": "drain"}
    acts = [step(world)]
    world.faulty.clear()
    acts.append(step(world))
    clock.pass_minutes(11)
    acts += [[row.act for row in world.tick()], step(world, 120), step(world, 9), step(world, 2)]
    assert acts == [["drain"], ["recover"], [], ["recover"], [], ["return"]]


@pytest.mark.parametrize("ahead", [-14, 0, 4])
@pytest.mark.parametrize(("return_by", "noticed"), [("person", ["release"]), ("tick", []), ("killed tick", ["return"])])
def test_an_event_after_a_return_drains_and_one_before_does_not(
    tmp_path: Path, clock: Clock, ahead: float, return_by: str, noticed: list[str]
) -> None:
    """Also one of before the tick that notices the return, and by whatever clock the node has."""
    world = World(tmp_path, clock)
    first = event(world, ahead=ahead)
    assert step(world, 2, first, ahead=ahead) == ["drain"]
    clock.pass_minutes(20)
    world.tick()
    kept = [first] if return_by == "person" else []
    if return_by == "person":
        world.slurm.reasons.clear()
    else:
        assert step(world, 5, ahead=ahead, boot_id="another") == ["recover", "return"]
    if return_by == "killed tick":
        path = tmp_path / "control" / "journal.jsonl"
        path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    assert step(world, 20, *kept, ahead=ahead) == noticed
    assert step(world, 1, *kept, ahead=ahead) == []
    assert step(world, 1, event(world, 20, ahead=ahead), ahead=ahead) == ["drain"]


@pytest.mark.parametrize("is_rebooted", [True, False])
def test_an_event_that_is_old_is_not_over(tmp_path: Path, clock: Clock, is_rebooted: bool) -> None:
    """Its check passes since nobody looks that far back: without a boot or a new part it is left to a person."""
    world = World(tmp_path, clock)
    assert step(world, 1, event(world)) == ["drain"]
    clock.pass_minutes(60 * 24)
    world.boots["n03"] += is_rebooted
    acts = [act for _ in range(4) for act in step(world)]
    assert acts == (["recover", "return"] if is_rebooted else ["recover", "escalate"])


@pytest.mark.parametrize("boot_id", ["boot0", "boot1"])
def test_a_device_that_is_gone_has_not_recovered(tmp_path: Path, clock: Clock, boot_id: str) -> None:
    """Its check passes, as no row fails it; until it is back, or the node booted."""
    world = World(tmp_path, clock)
    world.faulty = {"n03": "drain"}
    assert step(world) == ["drain"]
    world.faulty.clear()
    gone = [step(world, hardware={}, boot_id=boot_id) for _ in range(4)]
    assert gone[0] == ([] if boot_id == "boot0" else ["recover", "return"])
    assert (world.ours() == {"n03"}) == (boot_id == "boot0")
