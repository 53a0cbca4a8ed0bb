"""What the controller tells of acts, limits, nodes that are not heard of, and what it refuses."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import msgspec
import pytest

from pitools.core import locks, timestamps
from pitools.core.errors import ClusterError, ConfigError, TryLater
from pitools.node import blames, spool
from pitools.node.check.config import NodeConfig, load_config
from pitools.node.control import tick
from pitools.node.types import NodeReport
from pitools.slurm.records import Node
from tests.node.control.world import NODES, Clock, World


def test_what_others_did_meanwhile_is_not_said_to_be_done(tmp_path: Path, clock: Clock) -> None:
    """A person drains a node between the poll and the act, or changes the reason before its return."""
    world = World(tmp_path, clock, stable_for="0s")
    look = world.slurm.nodes

    def change_first(names: str = "") -> list[Node]:
        if names:
            world.slurm.reasons[names] = "bob: fans"
        return look(names)

    world.faulty["n03"] = "drain"
    world.report()
    world.slurm.nodes = change_first  # type: ignore[method-assign]
    (row,) = world.tick()
    assert (row.act, row.done, row.error, "bob: fans" in row.why) == ("drain", False, "", True)
    del world.slurm.reasons["n03"]
    world.slurm.nodes = look  # type: ignore[method-assign]
    assert [row.act for row in world.tick()] == ["drain"]
    world.faulty.clear()
    clock.pass_minutes(1)
    world.report()
    world.tick()
    world.slurm.nodes = change_first  # type: ignore[method-assign]
    (row,) = world.tick()
    assert (row.act, row.done, row.error, "bob: fans" in row.why) == ("return", False, "", True)
    assert world.slurm.resumed == []


def test_what_users_wrote_is_removed_after_the_acts(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within the lock, whatever it takes or fails with; a person's return does not wait for it."""
    world, seen = World(tmp_path, clock), list[set[str]]()

    def fail(_: Path) -> None:
        with pytest.raises(TryLater):
            controller.tick(act=True)
        seen.append(world.ours())
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(blames, "make_folder", fail)
    controller = tick.Controller(world.slurm, world.config)  # type: ignore[arg-type]
    world.faulty["n03"] = "drain"
    world.report()
    rows, problems = controller.tick(act=True)
    assert ([row.done for row in rows], seen) == ([True], [{"n03"}])
    assert any("No space" in one or "full" in one for one in problems)
    controller.return_nodes(["n03"])
    assert len(seen) == 1


def test_no_tick_acts_without_the_lock(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two machines would drain at once: where flock(2) holds within each alone, and where there are no locks at all."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    world = World(tmp_path, clock)
    world.faulty["n03"] = "drain"
    world.report()
    controller = tick.Controller(world.slurm, world.config)  # type: ignore[arg-type]
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    (tmp_path / "control").mkdir()
    with locks.lock(tmp_path / "control" / "lock", "journal", is_required=True), pytest.raises(TryLater):
        controller.tick(act=True)
    monkeypatch.setattr(locks, "lock_bytes", refuse)
    with pytest.raises(ClusterError):
        controller.tick(act=True)
    assert world.slurm.reasons == {}
    assert [row.act for row in controller.tick(act=False).rows] == ["drain"]


def test_a_check_that_is_no_more_leaves_its_node_to_a_person(tmp_path: Path, clock: Clock) -> None:
    """Deleted from the file, it can neither pass nor fail: said once."""
    world = World(tmp_path, clock)
    world.faulty["n03"] = "drain"
    world.report()
    world.tick()
    acts = []
    for _ in range(3):
        clock.pass_minutes(5)
        report = NodeReport(node="n03", boot_id="boot0", checked_at=timestamps.now_rfc3339(), passed=("other",))
        spool.write_report(tmp_path, report)
        acts += [(row.act, "gpu-count" in row.why) for row in world.tick()]
    assert acts == [("escalate", True)]
    assert world.ours() == {"n03"}


def test_a_hold_names_all_limits(tmp_path: Path, clock: Clock) -> None:
    """Also in a dry run; the hour counts nodes, so that one that flaps does not use it up."""
    world = World(
        tmp_path, clock, max_share_leaf=0.25, max_share_partition=0.125, max_share_hour=0.125, stable_for="0s"
    )
    for name in NODES[8:12]:
        world.faulty[name] = "drain"
    world.report()
    rows = world.tick(act=False)
    assert [(row.act, row.node, row.done) for row in rows[:2]] == [("drain", name, False) for name in NODES[8:10]]
    for row in rows[2:]:
        assert (row.act, row.incident) == ("hold", "")
        for limit in ("max_share_leaf = 0.25", "max_share_partition = 0.125", "max_share_hour = 0.125"):
            assert limit in row.why
    world.faulty = {}
    acts = []
    for minute in range(15):
        clock.pass_minutes(1)
        failing = ["n11", "n12", "n13"] if minute == 9 else ["n11"]
        world.faulty = dict.fromkeys(failing, "drain") if minute % 3 == 0 else {}
        world.report()
        acts += [(row.act, row.node) for row in world.tick() if row.act != "recover"]
    flap = [("drain", "n11"), ("return", "n11")]
    of_two = [(act, node) for act in ("drain", "return") for node in ("n11", "n12")]
    assert acts == [*flap * 3, *of_two[:2], ("hold", "n13"), *of_two[2:], *flap]


def test_what_is_held_back_is_listed_and_told_once(tmp_path: Path, clock: Clock) -> None:
    """A line for the nodes that one limit holds back, again when that changes; the list says it of each."""
    world = World(tmp_path, clock, max_share_leaf=0.125, max_share_partition=1.0)

    def lines(*faulty: str, act: bool = True) -> list[str]:
        clock.pass_minutes(1)
        world.faulty = dict.fromkeys(faulty, "drain")
        world.report()
        return tick.Controller(world.slurm, world.config).tick(act=act).problems  # type: ignore[arg-type]

    (line,) = lines("n01", "n02", "n03")
    assert line.startswith("n[02-03]: ")
    assert "max_share_leaf = 0.125, with 1 of 8 nodes of s1" in line
    assert lines("n01", "n02", "n03") == []
    assert lines("n01", "n02", "n03", act=False) == [line]
    findings = {row.node: row.finding for row in tick.Controller(world.slurm, world.config).node_rows()[0]}  # type: ignore[arg-type]
    assert ["max_share_leaf = 0.125" in findings[name] for name in NODES[:4]] == [False, False, True, True]
    assert [one.partition(":")[0] for one in lines("n01", "n02")] == ["n02"]


def test_nodes_that_are_not_heard_of_are_told_once(tmp_path: Path, clock: Clock) -> None:
    """Without a report, with an old one, or of a wrong clock; a node that is down need not report."""
    world = World(tmp_path, clock)
    world.report()
    clock.pass_minutes(20)
    for name in NODES[3:]:
        world.report(only=name)
    (tmp_path / "n04.json").unlink()
    report = msgspec.json.decode((tmp_path / "n05.json").read_bytes(), type=NodeReport)
    spool.write_report(tmp_path, msgspec.structs.replace(report, checked_at="2027-01-01T00:00:00.000Z"))
    listed = world.slurm.nodes
    world.slurm.nodes = lambda names="": [  # type: ignore[method-assign]
        msgspec.structs.replace(one, state="down") if one.node == "n02" else one for one in listed(names)
    ]
    controller = tick.Controller(world.slurm, world.config)  # type: ignore[arg-type]
    told = controller.tick(act=True).problems
    assert sorted(line.partition(":")[0] for line in told) == ["n04", "n05", "n[00-01]"]
    assert controller.tick(act=True).problems == []
    dry_runs = tick.Controller(world.slurm, world.config)  # type: ignore[arg-type]
    assert [dry_runs.tick(act=False).problems for _ in range(2)] == [told, []]
    world.report(only="n05")
    (tmp_path / "n03.json").unlink()
    assert [line.partition(":")[0] for line in controller.tick(act=True).problems] == ["n[03-04]"]
    findings = {row.node: row.finding for row in controller.node_rows()[0]}
    assert [bool(findings[name]) for name in NODES[:6]] == [True] * 5 + [False]


@pytest.mark.parametrize("key", ["spool", "state"])
def test_a_relative_folder_is_refused(tmp_path: Path, key: str) -> None:
    """It would be another one in each current folder."""
    (tmp_path / "node.toml").write_text(f'{key} = "node/{key}"\n')
    with pytest.raises(ConfigError, match=key):
        load_config(tmp_path / "node.toml")


@pytest.mark.parametrize(
    "limits", [{"max_share_leaf": 25.0}, {"max_share_hour": float("nan")}, {"max_report_age": "0s"}]
)
def test_limits_that_are_none_are_refused(tmp_path: Path, limits: dict[str, object]) -> None:
    """A share is of 1, and a duration more than 0: else one slip drains a cluster."""
    (name, value), path = limits.popitem(), tmp_path / "node.toml"
    path.write_text(f"[control]\n{name} = {msgspec.json.encode(value).decode() if isinstance(value, str) else value}\n")
    with pytest.raises(ConfigError, match=name):
        load_config(path)


def test_hostile_reports_are_told_and_hide_no_other(tmp_path: Path, clock: Clock) -> None:
    """Half-written, of another node, a link, a pipe, huge, no node: each is a problem, and the good one counts."""
    world = World(tmp_path, clock)
    world.faulty = {"n03": "drain"}
    world.report()
    (tmp_path / "n04.json").write_bytes((tmp_path / "n03.json").read_bytes())
    (tmp_path / "n05.json").write_bytes((tmp_path / "n05.json").read_bytes()[:40])
    for name in ("n06.json", "n07.json"):
        (tmp_path / name).unlink()
    (tmp_path / "n06.json").symlink_to(tmp_path / "n03.json")
    os.mkfifo(tmp_path / "n07.json")
    (tmp_path / "n08.json").write_bytes(b" " * (2 << 20))
    (tmp_path / "nowhere.json").write_bytes(b"{}")
    os.chown(tmp_path / "n09.json", 65534, 65534)
    (tmp_path / "n10.json").chmod(0o666)
    (tmp_path / "n11.json").chmod(0o664)
    result = tick.Controller(world.slurm, world.config).tick(act=True)  # type: ignore[arg-type]
    assert world.ours() == {"n03"}
    text = " ".join(result.problems)
    assert ("n06.json: not a report: a link" in text, "root or root" in text) == (True, False)
    assert sorted(
        {name for name in [*NODES, "nowhere"] if any(f"{name}.json" in text for text in result.problems)}
    ) == [
        "n04",
        "n05",
        "n06",
        "n07",
        "n08",
        "n09",
        "n10",
        "n11",
        "nowhere",
    ]


@pytest.mark.parametrize("part", ["", "control", "control/journal.jsonl"])
@pytest.mark.parametrize("is_foreign", [True, False])
def test_a_journal_that_others_can_change_is_refused(tmp_path: Path, clock: Clock, part: str, is_foreign: bool) -> None:
    """As a spool is: its drains, and its nodes for a person, would be theirs; also to read, and before any act."""
    world = World(tmp_path, clock)
    world.faulty = {"n03": "drain"}
    world.report()
    world.tick()
    path = tmp_path / part
    if is_foreign:
        os.chown(path, 65534, 65534)
    else:
        path.chmod(0o777)
    calls, controller = world.slurm.calls, tick.Controller(world.slurm, world.config)  # type: ignore[arg-type]
    for call in (lambda: controller.tick(act=True), lambda: controller.return_nodes([]), controller.incidents):
        with pytest.raises(ConfigError) as caught:
            call()
        assert (caught.value.where, str(path) in caught.value.hint) == (str(path), True)
    assert world.slurm.calls == calls


@pytest.mark.parametrize(("flags", "problem"), [(0, "user root"), (os.ST_RDONLY, "read-only")])
def test_who_cannot_write_is_told_how_to_look(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, flags: int, problem: str
) -> None:
    """Before a folder is made, or the lock asked for; where no user can, this is no question of the user."""
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((0,) * 8 + (flags, 255)))
    monkeypatch.setattr(tick, "user_name", lambda _: "root")
    with pytest.raises(ClusterError, match=problem) as caught:
        tick.Controller(World(tmp_path, clock).slurm, NodeConfig(spool=str(tmp_path))).tick(act=True)  # type: ignore[arg-type]
    assert "pit node list" in caught.value.hint
    assert list(tmp_path.iterdir()) == []


def test_a_controller_needs_a_spool(clock: Clock) -> None:
    """The key is named; nothing is looked for in the current folder; one that is missing is named with its mkdir."""
    with pytest.raises(ConfigError, match="spool"):
        tick.Controller(None, NodeConfig())  # type: ignore[arg-type]
    controller = tick.Controller(None, NodeConfig(spool="/nowhere/spool"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as caught:
        controller.tick(act=True)
    assert caught.value.hint == "mkdir -p -m 755 /nowhere/spool"


def test_a_list_has_every_node(tmp_path: Path, clock: Clock) -> None:
    """With or without a report, of a clock that is right or not, and its incident."""
    world = World(tmp_path, clock)
    world.faulty["n03"] = "drain"
    world.report()
    world.tick()
    report = msgspec.json.decode((tmp_path / "n03.json").read_bytes(), type=NodeReport)
    mild = [
        world.finding("n03", "a", "report"),
        msgspec.structs.replace(world.finding("n03", "b", "repair"), is_shadow=True),
    ]
    spool.write_report(tmp_path, msgspec.structs.replace(report, findings=(*mild, *report.findings)))
    clock.pass_minutes(2)
    for name, checked_at in (("n05", "yesterday"), ("n06", "2027-01-01T00:00:00.000Z"), ("n07", "2026-11-01T00:00:00")):
        path = tmp_path / f"{name}.json"
        report = msgspec.json.decode(path.read_bytes(), type=NodeReport)
        spool.write_report(tmp_path, msgspec.structs.replace(report, checked_at=checked_at))
    (tmp_path / "n08.json").unlink()
    rows, problems = tick.Controller(world.slurm, world.config).node_rows()  # type: ignore[arg-type]
    ages = {row.node: row.report_age_s for row in rows}
    assert (len(rows), problems) == (len(NODES), [])
    assert [ages[f"n0{number}"] for number in range(3, 9)] == [120.0, 120.0, None, None, None, None]
    assert [(row.state, row.incident, row.failed) for row in rows[2:5]] == [
        ("idle", "", 0),
        ("idle+drain", "n03-20261101000000", 3),
        ("idle", "", 0),
    ]
    assert rows[3].finding == "gpu-count: gpus: 7 (expected exactly 8)"  # the severest that counts


def test_who_needs_a_person_is_told_once_and_listed(tmp_path: Path, clock: Clock) -> None:
    """On stderr, for cron to mail, in one line for nodes of one reason; also where the journal was lost."""
    world = World(tmp_path, clock, max_share_leaf=1.0, max_share_partition=1.0)
    controller = tick.Controller(world.slurm, world.config)  # type: ignore[arg-type]
    told = []
    for faulty in ({"n03": "reboot", "n04": "reboot"}, {}, {}, {}):
        clock.pass_minutes(11)
        world.faulty = faulty  # type: ignore[assignment]
        world.report()
        told += [line for line in controller.tick(act=True).problems if "for a person" in line]
    (line,) = told
    assert line.startswith("n[03-04]: for a person: it was not rebooted: ")
    assert "pit node return" in line
    rows = {row.node: row for row in controller.node_rows()[0]}
    assert rows["n03"].finding.startswith("for a person: it was not rebooted")
    (tmp_path / "control" / "journal.jsonl").unlink()
    (line,) = controller.tick(act=True).problems
    assert line.startswith("n[03-04]: for a person: in the journal its incident is not there")


@pytest.mark.parametrize(
    ("state", "finding"), [("unknown", "gpu-count is unknown: no mount"), ("", "gpu-count passes")]
)
def test_of_a_drained_node_its_own_check_is_listed(tmp_path: Path, clock: Clock, state: str, finding: str) -> None:
    """Not a warning that fails on all nodes."""
    world = World(tmp_path, clock)
    world.faulty["n03"] = "drain"
    world.report()
    world.tick()
    clock.pass_minutes(1)
    own = msgspec.structs.replace(world.finding("n03", "gpu-count", "drain"), state=state, message="no mount")
    warning = world.finding("n03", "clock-ok", "report")
    report = NodeReport(
        node="n03",
        boot_id="boot0",
        checked_at=timestamps.now_rfc3339(),
        hardware={"gpus 0000:01:00.0 serial": "serial0"},
        findings=(warning, own) if state else (warning,),
        passed=() if state else ("gpu-count",),
    )
    spool.write_report(tmp_path, report)
    rows, _ = tick.Controller(world.slurm, world.config).node_rows()  # type: ignore[arg-type]
    assert rows[3].finding == finding


def test_a_check_that_stays_unknown_is_told(tmp_path: Path, clock: Clock) -> None:
    """Nothing returns the node, and nothing leaves it to a person: once it lasts, and not in each tick."""
    world = World(tmp_path, clock)
    controller = tick.Controller(world.slurm, world.config)  # type: ignore[arg-type]
    world.faulty["n03"] = "drain"
    world.report()
    world.tick()
    told = []
    for _ in range(4):
        clock.pass_minutes(10)
        world.report()
        report = spool.read_report(tmp_path, "n03")
        assert report
        unknown = tuple(msgspec.structs.replace(one, state="unknown", message="no driver") for one in report.findings)
        spool.write_report(tmp_path, msgspec.structs.replace(report, findings=unknown))
        told.append(controller.tick(act=True).problems)
    line = "n03: not returned while gpu-count is unknown: no driver; by a person: pit node return NODE"
    assert told == [[], [line], [], []]


def test_holds_of_many_limits_are_a_line(tmp_path: Path, clock: Clock) -> None:
    """Where a fault is on many leaves, or each node's evidence has its own age."""
    world = World(tmp_path, clock)
    for name in NODES[:6]:
        clock.pass_minutes(1)
        world.faulty = {name: "drain"}
        world.report(only=name)
    evidence = {name: (tmp_path / f"{name}.json").read_bytes() for name in NODES[:6]}
    clock.pass_minutes(70)
    for data in evidence.values():
        report = msgspec.json.decode(data, type=NodeReport)
        spool.write_report(tmp_path, msgspec.structs.replace(report, checked_at=timestamps.now_rfc3339()))
    told = [one for one in tick.Controller(world.slurm, world.config).tick(act=True).problems if "held" in one]  # type: ignore[arg-type]
    assert told == ["6 nodes are not drained: held back by [control] max_evidence_age = 1h (6); see: pit node list"]
