"""Healthy nodes with the noise of real ones: the shipped checks drain none of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from pitools.node.check.config import Control, load_shipped
from pitools.node.types import Row
from tests.node.simulated import POLL_S, Cluster, SimulatedNode, replaced

STEPS_PER_HOUR = round(3600 / POLL_S)


class Weather:
    """What befalls healthy nodes from outside: stalls of the NFS server, restarts of slurmd, reboots, lost polls."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.dice = cluster, cluster.slurm.dice
        self.stalled_until = cluster.now

    def step(self) -> None:
        now, dice = self.cluster.now, self.dice
        if (
            now >= self.stalled_until and dice.random() < 0.02 / STEPS_PER_HOUR
        ):  # for seconds, or a fail-over of minutes
            self.stalled_until = now + timedelta(seconds=POLL_S + dice.choice((20, 120, 900)))
            for node in self.cluster.nodes.values():
                node.say(now + timedelta(seconds=60), "nfs: server nas1 not responding, still trying")
                node.say(self.stalled_until, "nfs: server nas1 OK")
        for node in self.cluster.nodes.values():
            if dice.random() < 0.01 / STEPS_PER_HOUR:
                node.boot(now + timedelta(seconds=dice.uniform(120, 900)))
        self.cluster.step(self.change)

    def change(self, node: SimulatedNode) -> dict[str, list[Row]] | None:
        """Return what a gathering finds that hits one of these moments."""
        now, dice, tables = self.cluster.now, self.dice, {}
        is_booting = now - node.booted_at < timedelta(seconds=POLL_S)
        if now < self.stalled_until or (is_booting and dice.random() < 0.3) or dice.random() < 0.0002:
            tables["mounts"] = replaced(node.tables["mounts"], 3, responds=False, used_share=None)
        if (is_booting and dice.random() < 0.3) or dice.random() < 0.0002:
            tables["slurm"] = replaced(node.tables["slurm"], 0, slurmd_is_running=False)
        if dice.random() < 0.002:  # a controller is restarted; slow answers
            tables["slurm"] = replaced(node.tables["slurm"], 0, controllers_up=None)
        if dice.random() < 0.01:  # writes to a slow file system, and children that nobody waits for
            hung = {"state": "D", "is_blocked": True}
            tables["processes"] = [{**row, **hung} if dice.random() < 0.5 else row for row in node.tables["processes"]]
        return tables


def run(cluster: Cluster, node_hours: float) -> Counter[str]:
    """Let a cluster live, and return how often each check failed."""
    weather = Weather(cluster)
    for _ in range(round(node_hours * STEPS_PER_HOUR / len(cluster.nodes))):
        weather.step()
        cluster.tick()
    return Counter(one.check for one in cluster.findings)


def assert_no_drain(cluster: Cluster, failures: Counter[str]) -> None:
    mild = {check.name for check in cluster.checks if check.action in ("none", "report")}
    assert not set(failures) - mild, {name: count for name, count in failures.items() if name not in mild}
    assert cluster.slurm.drains == []
    assert cluster.incidents() == []


def make(folder: Path, count: int, seed: int) -> Cluster:
    unlimited = Control(max_share_leaf=1.0, max_share_partition=1.0, max_share_hour=1.0)
    return Cluster(folder, load_shipped().check, count, seed=seed, control=unlimited)


def test_healthy_nodes_are_not_drained(tmp_path: Path, tell_time: Callable[[Cluster], None]) -> None:
    """Sixteen nodes for six hours, with the weather of months: what fails is only watched."""
    cluster = make(tmp_path, 16, 1)
    for node in cluster.nodes.values():
        node.noise = 10.0
    tell_time(cluster)
    failures = run(cluster, 96)
    assert_no_drain(cluster, failures)
    assert len(failures) >= 5  # there was noise


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(4))
def test_no_false_drain_in_ten_thousand_node_hours(
    tmp_path: Path, tell_time: Callable[[Cluster], None], seed: int
) -> None:
    """A quarter of them each: 64 nodes for 39 hours."""
    cluster = make(tmp_path, 64, seed)
    tell_time(cluster)
    assert_no_drain(cluster, run(cluster, 2500))
