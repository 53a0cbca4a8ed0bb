"""The policy over hours and days: a node that flaps, a storm of one fault on a leaf, a controller that was off."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

import msgspec
import pytest

from pitools.core import timestamps
from pitools.node.check.config import Control, load_shipped
from pitools.node.check.rule import Check
from pitools.node.control.incidents import Incident
from pitools.node.control.policy import ActRow, NodeView, decide
from pitools.node.types import Finding, NodeReport, Row
from tests.node.control.world import Clock, World
from tests.node.simulated import LEAF, POLL_S, Cluster, SimulatedNode, replaced

TellTime = Callable[[Cluster], None]
DOUBLE_BIT = "NVRM: Xid (PCI:0000:12:00): 48, pid=77, DBE (double bit error)"
FALLEN = "NVRM: Xid (PCI:0000:12:00): 79, GPU has fallen off the bus."


@pytest.fixture(scope="module")
def xid_checks() -> list[Check]:
    """The shipped checks of the kernel's log."""
    return [check for check in load_shipped().check if check.table == "kernel_log"]


@pytest.mark.parametrize("seed", range(3))
def test_a_flapping_node_comes_to_rest(tmp_path: Path, tell_time: TellTime, seed: int) -> None:
    """A GPU that comes and goes for a day: drained and returned three times, then it is left to a person."""
    check = Check(name="gpu-count", table="gpus", where={"responds": True}, count=8)
    cluster = Cluster(tmp_path, [check], 4, seed=seed, noise=0)
    tell_time(cluster)
    dice = cluster.slurm.dice
    acts: list[tuple[datetime, ActRow]] = []
    failed_at: list[datetime] = []
    is_lost, until = False, cluster.now

    def flap(node: SimulatedNode) -> dict[str, list[Row]]:
        return {"gpus": replaced(node.tables["gpus"], 2, responds=False)} if is_lost and node.name == "n000" else {}

    for _ in range(288):
        if cluster.now >= until:
            is_lost, until = not is_lost, cluster.now + timedelta(minutes=dice.choice((5, 10, 30, 120)))
        cluster.step(flap)
        failed_at += [cluster.now] if is_lost else []
        acts += [(cluster.now, one) for one in cluster.tick()]
    assert {one.node for _, one in acts} == {"n000"}
    drains, returns = ([at for at, one in acts if one.act == name] for name in ("drain", "return"))
    assert (len(drains), len(returns)) == (4, 3)
    assert len([one for _, one in acts if one.act == "escalate"]) == 1
    for at in returns:
        assert at - max(time for time in failed_at if time < at) > timedelta(minutes=10)
    assert set(cluster.slurm.reasons) == {"n000"}


def test_a_storm_on_a_leaf_drains_no_more_than_the_limits(
    tmp_path: Path, tell_time: TellTime, xid_checks: list[Check]
) -> None:
    """All nodes of a leaf lose a GPU again and again: a few are drained; once they boot, all return without delay."""
    cluster = Cluster(tmp_path, xid_checks, 3 * LEAF, noise=0)
    tell_time(cluster)
    leaf = list(cluster.nodes.values())[:LEAF]
    drained_at: list[datetime] = []
    held: list[ActRow] = []
    for number in range(2 * 12):
        for node in leaf if number % 8 == 0 else ():  # every 40 min; five times in a day would be for repair
            node.say(cluster.now, FALLEN)
        cluster.step()
        rows = cluster.tick()
        drained_at += [cluster.now for one in rows if one.act == "drain"]
        held += [one for one in rows if one.act == "hold"]
        assert {one.act for one in rows} <= {"drain", "hold"}
        assert len(cluster.slurm.reasons) <= 4  # a quarter of the leaf, a tenth of the partition's 48
        assert len([at for at in drained_at if cluster.now - at < timedelta(hours=1)]) <= 2  # a twentieth of all
    assert len(drained_at) == 4
    assert len({one.node for one in held}) == LEAF - 2
    for node in leaf:
        node.boot(cluster.now)
    cluster.step()
    assert sorted(one.act for one in cluster.tick()) == ["recover"] * 4 + ["return"] * 4
    assert not cluster.slurm.reasons
    cluster.step()
    assert cluster.tick() == []


def test_a_storm_that_is_over_drains_nobody_later(tmp_path: Path, tell_time: TellTime, xid_checks: list[Check]) -> None:
    """What the limits held back for as long as evidence counts is not drained when they would allow it."""
    cluster = Cluster(tmp_path, xid_checks, LEAF, noise=0)
    tell_time(cluster)
    for node in cluster.nodes.values():
        node.say(cluster.now, DOUBLE_BIT)
    for _ in range(18):
        cluster.step()
        cluster.tick()
    assert {one.check for one in cluster.findings[-LEAF:]} == {"xid-48"}  # still told
    assert len(cluster.slurm.drains) == 1


def test_a_controller_that_was_off_for_days_replays_nothing(
    tmp_path: Path, tell_time: TellTime, xid_checks: list[Check]
) -> None:
    """Old evidence, repaired nodes and drains of people are left alone; what is broken now is drained."""
    unlimited = Control(max_share_leaf=1.0, max_share_partition=1.0, max_share_hour=1.0)
    cluster = Cluster(tmp_path, xid_checks, 8, noise=0, control=unlimited)
    tell_time(cluster)
    nodes, slurm = list(cluster.nodes.values()), cluster.slurm
    for node in nodes[:2]:
        node.say(cluster.now, DOUBLE_BIT)
    cluster.step()
    assert [(one.act, one.node) for one in cluster.tick()] == [("drain", "n000"), ("drain", "n001")]

    cluster.now += timedelta(days=3)  # in which it is off
    nodes[0].boot(cluster.now - timedelta(days=1))
    slurm.reasons.pop("n000")  # by a person, after the repair
    nodes[1].boot(cluster.now - timedelta(days=1))
    for node, hours in zip(nodes[2:], (50, 20, 1.5, 0.5, 0), strict=False):
        node.say(cluster.now - timedelta(hours=hours), DOUBLE_BIT)
    nodes[7].say(cluster.now, DOUBLE_BIT)
    slurm.reasons["n007"] = "bob: fan"
    acts = []
    for _ in range(24):
        cluster.step()
        acts += [(one.act, one.node) for one in cluster.tick()]
    assert {node for act, node in acts if act == "hold"} == {"n003", "n004"}  # n002: older than its check counts
    assert [one for one in acts if one[0] != "hold"] == [
        ("release", "n000"),
        ("recover", "n001"),
        ("return", "n001"),
        ("drain", "n005"),
        ("drain", "n006"),
    ]
    assert set(slurm.reasons) == {"n005", "n006", "n007"}
    assert slurm.reasons["n007"] == "bob: fan"


def test_a_person_s_return_ends_the_matter(tmp_path: Path, tell_time: TellTime, xid_checks: list[Check]) -> None:
    """The line that drained a node is still in its log, and recent, when a person resumes it: it stays resumed."""
    cluster = Cluster(tmp_path, xid_checks, 4, noise=0)
    tell_time(cluster)
    node = cluster.nodes["n000"]
    node.say(cluster.now, DOUBLE_BIT)
    cluster.step()
    cluster.tick()
    del cluster.slurm.reasons["n000"]
    acts = []
    for _ in range(20):
        cluster.step()
        acts += [one.act for one in cluster.tick()]
    assert acts == ["release"]
    node.say(cluster.now, DOUBLE_BIT)  # another one
    cluster.step()
    assert [one.act for one in cluster.tick()] == ["drain"]
    assert timestamps.to_rfc3339(cluster.now - timedelta(seconds=POLL_S)) == cluster.incidents()[-1].evidence_at


def test_evidence_of_the_moment_in_which_an_incident_ended_was_dealt_with() -> None:
    """What is of a millisecond later is new."""
    ended, later, now = (f"2026-11-01T{time}Z" for time in ("12:00:00.000", "12:00:00.001", "12:10:00.000"))
    incident = Incident(
        incident="n1-1",
        node="n1",
        check="a",
        action="drain",
        opened_at="",
        evidence_at="",
        message="",
        phase="over",
        drained_at=ended,
        over_at=ended,
    )
    view = NodeView("n1", is_drained=False, is_down=False, has_jobs=False, reason="")
    for evidence_at, acts in ((ended, []), (later, ["drain"])):
        finding = Finding(
            node="n1", check="a", state="failed", level="critical", action="drain", evidence_at=evidence_at
        )
        report = NodeReport(node="n1", boot_id="", checked_at=now, findings=(finding,))
        rows = decide(now, {"n1": view}, {"n1": report}, [incident], Control(), {})
        assert [one.act for one in rows] == acts


def test_a_node_returns_when_its_last_job_has_ended(tmp_path: Path, clock: Clock) -> None:
    """It is not resumed under a job, which the fault may still concern."""
    world = World(tmp_path, clock, stable_for="0s")
    listed, state = world.slurm.nodes, "allocated"
    world.slurm.nodes = lambda names="": [msgspec.structs.replace(one, state=state) for one in listed(names)]  # type: ignore[method-assign]
    acts = []
    for faulty in ("n03", "", "", ""):
        clock.pass_minutes(1)
        world.faulty = {faulty: "drain"} if faulty else {}
        world.report()
        acts += [row.act for row in world.tick()]
    assert acts == ["drain", "recover"]
    state = "idle"
    assert [row.act for row in world.tick()] == ["return"]
