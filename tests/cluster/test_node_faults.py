"""Faults that are real, each of a node of a real Slurm: `pit node check --report` finds it, and the controller acts.

On a cluster of their own, a node for each of FAULTS: they are checked, drained, mended and returned together.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from pitools.node.control.incidents import Incident, read_incidents
from pitools.node.gather.slurmd import find_slurmd
from tests.cluster.test_node_health import Cluster, running_cluster, wait_until
from tests.node.real_faults import FAULTS, why_not_here, with_fault, write_config

pytestmark = pytest.mark.slurm

NODES = {name: f"eta{number:02}" for number, name in enumerate(FAULTS, 1) if not why_not_here(name)}
HEAD = """\
spool = "{folder}/spool"
state = "{folder}/state"
[control]
stable_for = "0s"
max_share_leaf = 1.0
max_share_partition = 1.0
max_share_hour = 1.0
"""
AHEAD = """\
from datetime import UTC, datetime, timedelta
from pitools.core import timestamps
timestamps.now_rfc3339 = lambda: timestamps.to_rfc3339(datetime.now(UTC) + timedelta(hours=1))
from pitools.cli import main
main()
"""


class Outcome(NamedTuple):
    """What became of a node with a fault. acts: of all ticks. reason: after the first. incident: its record at last."""

    acts: list[tuple[str, bool]]
    reason: str
    state: str
    incident: Incident


class Faulty:
    """The cluster, whose nodes check themselves with the fault that they have, or without."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.config = cluster, ""
        self.slurmd = find_slurmd(node=NODES["stopped slurmd"]) or 0
        assert self.slurmd

    def report(self, name: str, state: str, *python: str) -> None:
        """Report of a node. python: how pitools is run, if not by -m."""
        (folder := self.cluster.folder / NODES[name]).mkdir(exist_ok=True)
        self.config = str(write_config(FAULTS[name], folder, HEAD.format(folder=self.cluster.folder)))
        words = ("node", "check", "--report", "--node", NODES[name], "--config", self.config)
        command = (sys.executable, *(python or ("-m", "pitools")), *words)
        self.cluster.call(*with_fault(FAULTS[name], state, folder, self.slurmd, *command), codes=(state == "bad",))

    def report_all(self, state: str) -> None:
        """Report of all nodes; the stopped slurmd is the last to be found and the first to be mended."""
        with ThreadPoolExecutor(2) as pool:  # some wait
            list(pool.map(lambda name: self.report(name, state), NODES if state == "bad" else reversed(NODES)))

    def tick(self) -> list[tuple[str, str, bool]]:
        """Tick with the limits of the file of any node."""
        return self.cluster.tick("--act", "--config", self.config)


@pytest.fixture(scope="module")
def faulty(slurm_installed: None, as_root: None, repo: Path) -> Iterator[Faulty]:
    with running_cluster(repo, len(FAULTS), 14000) as cluster:
        yield Faulty(cluster)


@pytest.fixture(scope="module")
def outcomes(faulty: Faulty) -> dict[str, Outcome]:
    cluster = faulty.cluster
    try:
        faulty.report_all("bad")
        acts = faulty.tick()
        reasons = {node: cluster.reason(node) for node in NODES.values()}
        faulty.report_all("well")
    finally:
        os.kill(faulty.slurmd, signal.SIGCONT)
    acts += faulty.tick()
    assert wait_until(lambda: {cluster.states()[node] for node in NODES.values()} == {"drained"}), cluster.states()
    acts += faulty.tick()
    states = cluster.states()
    incidents = read_incidents(cluster.folder / "spool" / "control" / "journal.jsonl").incidents
    by_node = {one.node: one for one in incidents.values()}
    return {
        name: Outcome([(act, done) for act, of, done in acts if of == node], reasons[node], states[node], by_node[node])
        for name, node in NODES.items()
    }


@pytest.mark.parametrize("name", FAULTS)
def test_a_real_fault_is_drained_mended_and_returned(outcomes: dict[str, Outcome], name: str) -> None:
    """By the check that is for it, with its action; then it is returned."""
    if reason := why_not_here(name):
        pytest.skip(reason)
    outcome, check = outcomes[name], FAULTS[name].draining
    assert outcome.acts == [("drain", True), ("recover", True), ("return", True)]
    assert re.match(rf"pit node \[{NODES[name]}-\d+\] {check}: ", outcome.reason)
    incident = outcome.incident
    assert (incident.check, incident.action, incident.phase, incident.outcome) == (check, "drain", "over", "returned")
    assert outcome.state == "idle"


def test_a_node_whose_clock_is_ahead_is_told_and_not_drained(faulty: Faulty, outcomes: dict[str, Outcome]) -> None:
    """An hour: what it finds has no time that means anything. (Moving the clock itself would move all of this VM's.)"""
    faulty.report("missing mount", "bad", "-c", AHEAD)
    assert faulty.tick() == []
    rows = faulty.cluster.pit("list", "--config", faulty.config)
    assert {row["node"]: row["finding"] for row in rows if row["finding"]} == {
        NODES["missing mount"]: "its report is of the future, or of no time: a clock is wrong"
    }
