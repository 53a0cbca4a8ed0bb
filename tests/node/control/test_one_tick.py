"""What one tick makes of what it finds: limits, begun drains and returns, nodes that are down, boots."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from pitools.node.check.config import Control
from pitools.node.control import policy, tick
from pitools.node.control.incidents import Incident, Phase
from pitools.node.types import Finding, NodeReport
from pitools.slurm.records import Node
from tests.node.control.world import Clock, Killed, World

NOW, BEFORE = "2026-11-01T12:00:00.000Z", "2026-11-01T11:00:00.000Z"
VIEW = policy.NodeView("n1", is_drained=False, is_down=False, has_jobs=False, reason="", groups=("leaf:s1",))


def report(node: str = "n1", failed: str = "", passed: str = "", boot_id: str = "b1") -> NodeReport:
    finding = Finding(node=node, check=failed, state="failed", level="critical", action="drain", evidence_at=NOW)
    findings = (finding,) if failed else ()
    return NodeReport(node=node, boot_id=boot_id, checked_at=NOW, findings=findings, passed=(passed,) if passed else ())


def incident(phase: Phase, boot_id: str = "b1") -> Incident:
    times = dict.fromkeys(("opened_at", "evidence_at", "drained_at"), BEFORE)
    fields = {"incident": "n1-1", "node": "n1", "check": "disk", "action": "drain", "message": "full", "phase": phase}
    return Incident(**fields, **times, boot_id=boot_id)  # type: ignore[arg-type]


def acts(
    views: list[policy.NodeView], reports: list[NodeReport], incidents: list[Incident], **limits: float
) -> list[tuple[str, str, str]]:
    by_node = {one.node: one for one in views}
    control = Control(**limits)  # type: ignore[arg-type]
    rows = policy.decide(
        NOW, by_node, {one.node: one for one in reports}, incidents, control, {"n1": policy.Sight(NOW, NOW, NOW)}
    )
    return [(one.act, one.node, one.check) for one in rows]


def test_a_node_that_was_taken_over_counts_for_no_limit_at_once() -> None:
    """Its leaf has room for another one in the same tick; not while it is ours."""
    limits = {"max_share_leaf": 0.5, "max_share_hour": 1.0}
    other, failing = VIEW._replace(node="n2"), report("n2", failed="disk")
    ours = VIEW._replace(is_drained=True, reason=incident("drained").reason)
    expected = {
        "bob: fans": [("release", "n1", "disk"), ("drain", "n2", "disk")],
        ours.reason: [("hold", "n2", "disk")],
    }
    for reason, rows in expected.items():
        assert acts([ours._replace(reason=reason), other], [failing], [incident("drained")], **limits) == rows


@pytest.mark.parametrize("change", [{"action": "repair"}, {"evidence_at": BEFORE}])
def test_where_a_limit_leaves_one_the_severest_is_drained_then_the_oldest(change: dict[str, str]) -> None:
    """Whatever the nodes' names and order."""
    first, second = report("n1", failed="disk"), report("n2", failed="gpu")
    second = msgspec.structs.replace(second, findings=(msgspec.structs.replace(second.findings[0], **change),))
    limits = {"max_share_leaf": 0.5, "max_share_hour": 1.0, "max_share_partition": 1.0}
    rows = acts([VIEW, VIEW._replace(node="n2")], [first, second], [], **limits)
    assert rows == [("drain", "n2", "gpu"), ("hold", "n1", "disk")]


@pytest.mark.parametrize(("failed", "act"), [("disk", "drain"), ("gpu", "release")])
def test_a_begun_drain_is_made_for_its_own_check_alone(failed: str, act: str) -> None:
    """A drain for another check is an incident of its own, with a reason that says so."""
    assert acts([VIEW], [report(failed=failed)], [incident("opening")]) == [(act, "n1", "disk")]


@pytest.mark.parametrize(("reason", "expected"), [("", [("drain", "n1", "disk")]), ("bob: psu", [])])
def test_a_node_that_is_down_without_a_reason_is_drained(reason: str, expected: list[tuple[str, str, str]]) -> None:
    """Slurm would take it back as soon as its slurmd answers; the reason of a person would be lost."""
    assert acts([VIEW._replace(is_down=True, reason=reason)], [report(failed="disk")], []) == expected


@pytest.mark.parametrize(("before", "after", "act"), [("b1", "b2", "return"), ("b1", "", ""), ("", "b2", "")])
def test_a_boot_that_is_unknown_is_no_reboot(before: str, after: str, act: str) -> None:
    """A node that booted again returns at once; another one when its checks have passed for a while."""
    drained = VIEW._replace(is_drained=True, reason=incident("drained").reason)
    recovered = msgspec.structs.replace(incident("recovered", before), recovered_at=NOW)
    rows = acts([drained], [report(passed="disk", boot_id=after)], [recovered])
    assert rows == ([(act, "n1", "disk")] if act else [])
    asked = msgspec.structs.replace(recovered, action="reboot", recovered_at=BEFORE)
    assert acts([drained], [report(passed="disk", boot_id=after)], [asked]) == [(act or "escalate", "n1", "disk")]


def test_a_return_that_was_made_by_a_tick_that_was_killed_is_one(tmp_path: Path, clock: Clock) -> None:
    """The next tick finds its intent, and a node that is not drained: nobody took it over."""
    world = World(tmp_path, clock, stable_for="0s")
    world.faulty["n03"] = "drain"
    world.report()
    world.tick()
    world.faulty.clear()
    clock.pass_minutes(1)
    world.report()
    world.tick()
    resume = world.slurm.resume_node

    def resume_and_die(node: str) -> None:
        resume(node)
        raise Killed

    world.slurm.resume_node = resume_and_die  # type: ignore[method-assign]
    assert world.tick() == []
    assert not world.slurm.reasons
    assert [(row.act, row.node, row.done) for row in world.tick()] == [("return", "n03", True)]
    assert [entry.kind for entry in world.entries()][-2:] == ["returning", "returned"]


def test_a_reason_has_no_sign_that_slurm_or_a_shell_reads() -> None:
    """What a node's devices and users name themselves is in it."""
    reason = msgspec.structs.replace(incident("drained"), message="""disk "a\nb" is 'c' \\ d [e@f] [0]""").reason
    assert reason == "pit node [n1-1] disk: disk  a b  is  c    d  e@f] [0]"


@pytest.mark.parametrize("state", ["draining", "drained", "failing", "fail"])
def test_a_node_that_slurm_keeps_jobs_off_is_drained(state: str) -> None:
    """Also by `scontrol update state=fail`, which a drain of ours would replace."""
    assert tick.node_views([Node(node="n1", state=state)], ())["n1"].is_drained
