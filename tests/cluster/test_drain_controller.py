"""The controller over a real Slurm of sixteen nodes: half of them fail at once, it is killed anywhere, a day of polls.

On a cluster of its own, as its nodes are drained. The reports are written here, as the nodes of one machine are alike.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from pitools.core import timestamps
from pitools.core.errors import Unreachable
from pitools.core.journal import read_journal
from pitools.node import spool
from pitools.node.check.config import load_shipped
from pitools.node.control import incidents
from pitools.node.control.incidents import EntryKind
from pitools.node.types import BENCH_CHECK, Finding, NodeReport
from pitools.slurm.client import Client
from pitools.slurm.records import Node
from pitools.slurm.transport import Transport
from tests.node.simulated import Cluster, SimulatedNode
from tests.node.test_false_drains import Weather, assert_no_drain

pytestmark = pytest.mark.slurm

NODES = [f"theta{number:02}" for number in range(1, 17)]
LEAVES = (set(NODES[::2]), set(NODES[1::2]))  # as devcluster makes them
CONTROL = """\
[control]
act = true
stable_for = "0s"
bench_before_return = true
max_share_leaf = 0.25
max_share_partition = 0.2
max_share_hour = 1.0
max_returns = 1000
"""
SITE = 'name = "theta"\n[slurm]\nconf = "{conf}"\n[node]\nconfig = "{config}"\n'


class PolledSlurm(Client):
    """A client of the real Slurm, which does not answer now and then."""

    def __init__(self, conf: Path, dice: random.Random, failing: float = 0.0) -> None:
        super().__init__(Transport(env={"SLURM_CONF": str(conf)}))
        self.dice, self.failing = dice, failing
        self.polls = 0
        self.drains: list[tuple[str, str]] = []

    def nodes(self, names: str = "") -> list[Node]:
        if self.dice.random() < self.failing:
            raise Unreachable("connection refused")
        self.polls += not names
        return super().nodes(names)

    def drain_node(self, node: str, reason: str) -> None:
        self.drains.append((node, reason))
        super().drain_node(node, reason)


class World:
    """The cluster, whose nodes fail where `faulty` says so, and the command of the controller."""

    def __init__(self, conf: Path, folder: Path) -> None:
        self.conf, self.folder, self.spool = conf, folder, folder / "spool"
        self.spool.mkdir()
        self.faulty: set[str] = set()
        (folder / "node.toml").write_text(f'spool = "{self.spool}"\n{CONTROL}')
        (folder / "theta.toml").write_text(SITE.format(conf=conf, config=folder / "node.toml"))
        self.slurm = PolledSlurm(conf, random.Random(0))

    def report(self) -> None:
        for name in NODES:
            now = timestamps.now_rfc3339()
            finding = Finding(
                node=name, check="gpus", state="failed", level="critical", action="drain", message="7", evidence_at=now
            )
            passed = ["gpus"] * (name not in self.faulty) + [BENCH_CHECK] * spool.is_bench_requested(self.spool, name)
            findings = (finding,) if name in self.faulty else ()
            report = NodeReport(node=name, boot_id="", checked_at=now, findings=findings, passed=tuple(passed))
            spool.write_report(self.spool, report)

    def start(self) -> subprocess.Popen[str]:
        env = {key: value for key, value in os.environ.items() if not key.startswith(("PIT_", "SLURM_"))}
        env |= {"PIT_SITE_PATH": str(self.folder), "PIT_SITE": "theta", "PIT_FORMAT": "jsonl"}
        argv = [sys.executable, "-m", "pitools", "node", "drain"]
        return subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def tick(self) -> list[dict[str, Any]]:
        output, errors = (process := self.start()).communicate(timeout=90)
        assert process.returncode == 0, errors
        return [json.loads(line) for line in output.splitlines()]

    def reasons(self) -> dict[str, str]:
        return {node.node: node.reason for node in self.slurm.nodes() if "drain" in node.flags}

    def ours(self) -> set[str]:
        return {node for node, reason in self.reasons().items() if incidents.incident_of_reason(reason)[0]}

    def assert_caps(self) -> None:
        assert all(len(self.ours() & leaf) <= 2 for leaf in LEAVES)
        assert len(self.ours()) <= 3  # a fifth of the partition

    def entries(self) -> list[incidents.IncidentEntry]:
        return read_journal(self.spool / "control" / "journal.jsonl", incidents.IncidentEntry)

    def heal(self) -> None:
        """Let all checks pass, and tick until all nodes of ours are back."""
        self.faulty.clear()
        for _ in range(4):  # drained, where a killed tick did so and did not note it; recovered, benched, returned
            self.report()
            self.tick()
        assert not self.ours()
        assert not list(self.spool.glob("bench-requests/*"))
        assert {one.phase for one in incidents.fold(self.entries()).values()} == {"over"}


@pytest.fixture(scope="module")
def conf(slurm_installed: None, repo: Path) -> Iterator[Path]:
    """The slurm.conf of a cluster that runs."""
    with tempfile.TemporaryDirectory(prefix="dcc", dir="/var/tmp") as name:
        root, devcluster = Path(name) / "r", str(repo / "scripts" / "devcluster")
        ports = 26000 + os.getpid() % 5 * 400
        argv = [devcluster, "up", "--root", str(root), "--clusters", "theta", "--nodes", "16"]
        done = subprocess.run(
            [*argv, "--base-port", str(ports)], capture_output=True, text=True, timeout=150, check=False
        )
        try:
            assert done.returncode == 0, done.stderr
            yield root / "theta" / "slurm.conf"
        finally:
            subprocess.run([devcluster, "down", "--root", str(root)], capture_output=True, timeout=150, check=True)


@pytest.fixture
def world(conf: Path) -> Iterator[World]:
    with tempfile.TemporaryDirectory(prefix="dcw", dir="/var/tmp") as folder:
        world = World(conf, Path(folder))
        resume(world.slurm, list(world.reasons()))
        yield world
        resume(world.slurm, list(world.reasons()))


def resume(slurm: Client, nodes: Sequence[str]) -> None:
    for node in nodes:
        slurm.resume_node(node)


def test_half_of_the_nodes_fail_at_once(world: World) -> None:
    """Drained up to the limits, which hold back the others, and no return."""
    world.slurm.drain_node(NODES[4], "bob: fans")
    world.faulty = set(NODES[:8])
    world.report()
    acts = Counter(row["act"] for row in world.tick())
    assert acts == {"drain": 3, "hold": 4}  # and bob's
    for _ in range(3):
        world.report()
        assert Counter(row["act"] for row in world.tick()) == {"hold": 4}
        world.assert_caps()
    world.heal()
    assert world.reasons() == {NODES[4]: "bob: fans"}


@pytest.mark.parametrize("kills", [6, pytest.param(60, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_a_controller_killed_anywhere_repeats_and_loses_nothing(world: World, kills: int) -> None:
    """kill -9 at random moments of ticks with drains, benches and returns, while a person drains and resumes."""
    dice = random.Random(kills)
    people: dict[str, str] = {}
    killed = 0
    world.faulty = set(NODES[:2])
    world.report()
    assert {row["act"] for row in world.tick()} == {"drain"}
    wall_s = 1.0  # of a tick, learnt from those that end before they are killed
    while killed < kills:
        node = dice.choice(NODES)
        world.faulty ^= set(dice.sample(NODES, 3))
        if node in people:
            resume(world.slurm, [node])
            del people[node]
        elif node not in world.reasons():
            people[node] = "bob: fans"
            world.slurm.drain_node(node, people[node])
        world.report()
        begin, process = time.monotonic(), world.start()
        try:
            process.communicate(timeout=dice.uniform(0.3, 1.0) * wall_s)
            wall_s = time.monotonic() - begin
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            killed += 1
            wall_s *= 1.05
        assert {name: world.reasons().get(name) for name in people} == people
        world.assert_caps()
    world.heal()
    assert world.reasons() == people
    opened = [entry.incident for entry in world.entries() if entry.kind is EntryKind.OPENED]
    assert len(set(opened)) == len(opened) > 0


@pytest.mark.parametrize("polls", [12, pytest.param(288, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_a_day_of_polls_drains_no_healthy_node(
    conf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, polls: int
) -> None:
    """Every five minutes, compressed, with the noise and the weather of healthy nodes, and polls that fail."""
    cluster = Cluster(tmp_path, load_shipped().check, 0, seed=polls)
    cluster.nodes = {name: SimulatedNode(name, number % 4, polls) for number, name in enumerate(NODES)}
    slurm = PolledSlurm(conf, random.Random(polls), 0.02)
    cluster.slurm = slurm  # type: ignore[assignment]
    monkeypatch.setattr(timestamps, "now_rfc3339", lambda: timestamps.to_rfc3339(cluster.now))
    weather = Weather(cluster)
    for _ in range(polls):
        weather.step()
        assert [row.act for row in cluster.tick()] == []
    assert_no_drain(cluster, Counter(one.check for one in cluster.findings))
    assert slurm.polls > polls // 2
    assert {node.node for node in slurm.nodes() if "drain" in node.flags} == set()
