"""The controller on a real Slurm: a fault is drained, mended and returned; nothing that a person drained is touched.

On a cluster of its own, as its nodes are drained. In the last test `scripts/pit-healthcheck` is its HealthCheckProgram.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pitools.node.check.config import load_config

pytestmark = pytest.mark.slurm

NODES = ("eta01", "eta02", "eta03")
CONFIG = """\
python = "{python}"
spool = "{folder}/spool"
state = "{folder}/state"
[control]
stable_for = "0s"
max_share_partition = 0.7
max_share_hour = 1.0
[types.a]
nodes = "eta01"
[types.b]
nodes = "eta02"
[types.c]
nodes = "eta03"
"""
CHECK = """\
[[check]]
name = "scratch-{type}"
types = ["{type}"]
table = "files"
where.path = "{folder}/scratch/{node}"
key = "exists"
equals = true
"""
SITE = 'name = "eta"\n[slurm]\nconf = "{conf}"\n[node]\nconfig = "{config}"\n'
HOOK = "#!/bin/sh\nPIT_NODE_CONFIG={config} exec {script}\n"
# A tick that is killed just before, or just after, Slurm drains a node.
KILLED = """\
import os, sys
from pitools.node.control.tick import Controller
from pitools.node.check.config import load_config
from pitools.site import connect, load
from pathlib import Path
site = load.load_site("eta")
client = connect.client(site)
drain = client.drain_node
def drain_node(node, reason):
    if sys.argv[1] == "after":
        drain(node, reason)
    os._exit(9)
client.drain_node = drain_node
Controller(client, load_config(Path(site.node.config))).tick(act=True)
"""


class Cluster:
    """A running cluster of NODES, whose nodes are healthy while they have a file in `scratch`."""

    def __init__(self, root: Path, folder: Path, repo: Path) -> None:
        self.conf, self.folder, self.repo = root / "eta" / "slurm.conf", folder, repo
        for name in ("scratch", "spool", "state", "sites"):
            (folder / name).mkdir()
        self.config = folder / "node.toml"
        shipped = json.dumps([check.name for check in load_config().check])
        text = f"disable = {shipped}\n{CONFIG.format(python=sys.executable, folder=folder)}"
        for kind, node in zip("abc", NODES, strict=True):
            text += CHECK.format(type=kind, folder=folder, node=node)
        self.config.write_text(text)
        (folder / "sites" / "eta.toml").write_text(SITE.format(conf=self.conf, config=self.config))
        hook = folder / "hook"
        hook.write_text(HOOK.format(config=self.config, script=repo / "scripts" / "pit-healthcheck"))
        hook.chmod(0o755)

    def call(self, *argv: str, codes: tuple[int, ...] = (0,)) -> str:
        env = {key: value for key, value in os.environ.items() if not key.startswith(("PIT_", "SLURM_"))}
        env |= {"PIT_SITE_PATH": str(self.folder / "sites"), "PIT_SITE": "eta", "SLURM_CONF": str(self.conf)}
        env |= {"PATH": f"{env['PATH']}:/usr/sbin", "PYTHONPATH": str(self.repo)}
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=90, check=False)
        assert done.returncode in codes, (done.returncode, done.stdout, done.stderr)
        return done.stdout

    def pit(self, *words: str, codes: tuple[int, ...] = (0,)) -> list[dict[str, Any]]:
        text = self.call(sys.executable, "-m", "pitools", "node", *words, codes=codes)
        return [json.loads(line) for line in text.splitlines()]

    def tick(self, *words: str) -> list[tuple[str, str, bool]]:
        return [(row["act"], row["node"], row["done"]) for row in self.pit("drain", *words)]

    def report(self, *nodes: str, config: Path | None = None) -> None:
        for node in nodes or NODES:
            self.pit("check", "--report", "--node", node, "--config", str(config or self.config), codes=(0, 1))

    def update(self, node: str, state: str, reason: str = "") -> None:
        self.call("scontrol", "update", f"nodename={node}", f"state={state}", *([f"reason={reason}"] if reason else []))

    def states(self) -> dict[str, str]:
        lines = self.call("sinfo", "-hN", "-p", "train", "-o", "%N %T").splitlines()
        return {node: state.rstrip("*") for node, state in map(str.split, lines)}  # *: it has not answered yet

    def reason(self, node: str) -> str:
        return self.call("sinfo", "-hN", "-n", node, "-p", "train", "-o", "%E").strip()

    def journal(self) -> list[str]:
        path = self.folder / "spool" / "control" / "journal.jsonl"
        return [f"{entry['node']} {entry['kind']}" for entry in map(json.loads, path.read_text().splitlines())]


def wait_until(condition: Callable[[], bool], within_s: float = 45.0) -> bool:
    until = time.monotonic() + within_s
    while not condition() and time.monotonic() < until:
        time.sleep(0.3)
    return condition()


@contextlib.contextmanager
def running_cluster(repo: Path, nodes: int, ports: int) -> Iterator[Cluster]:
    """Nodes whose slurm.conf does not name the script yet. ports: the first of those that it may use."""
    with tempfile.TemporaryDirectory(prefix="dcn", dir="/var/tmp") as name:
        root, ports = Path(name) / "r", ports + os.getpid() % 5 * 400
        devcluster = [str(repo / "scripts" / "devcluster"), "up", "--root", str(root), "--clusters", "eta"]
        argv = [*devcluster, "--nodes", str(nodes), "--base-port", str(ports)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=150, check=False)
        try:
            assert done.returncode == 0, done.stderr
            yield Cluster(root, Path(name), repo)
        finally:
            down = [devcluster[0], "down", "--root", str(root)]
            subprocess.run(down, capture_output=True, timeout=150, check=True)


@pytest.fixture(scope="module")
def cluster(slurm_installed: None, repo: Path) -> Iterator[Cluster]:
    with running_cluster(repo, len(NODES), 12000) as running:
        yield running


@pytest.fixture
def nodes(cluster: Cluster) -> Cluster:
    """The cluster with healthy, idle nodes and no incident."""
    (cluster.folder / "spool" / "control" / "journal.jsonl").unlink(missing_ok=True)
    for node in NODES:
        (cluster.folder / "scratch" / node).touch()
        if cluster.states()[node] != "idle":
            cluster.update(node, "resume")
    assert wait_until(lambda: set(cluster.states().values()) == {"idle"}), cluster.states()
    cluster.report()
    return cluster


def test_a_fault_is_drained_mended_and_returned(nodes: Cluster) -> None:
    """A dry run first; a job that runs there goes on; the history has the incident."""
    job = nodes.call("sbatch", "--parsable", "-w", "eta02", "-o", "/dev/null", "--wrap", "sleep 300").strip()
    assert wait_until(lambda: nodes.states()["eta02"] in ("mixed", "allocated"))
    (nodes.folder / "scratch" / "eta02").unlink()
    nodes.report()
    assert nodes.tick() == [("drain", "eta02", False)]
    assert set(nodes.states().values()) <= {"idle", "mixed", "allocated"}
    assert nodes.tick("--act") == [("drain", "eta02", True)]
    assert (nodes.states()["eta02"], nodes.tick("--act")) == ("draining", [])
    incident_id, _, text = nodes.reason("eta02").removeprefix("pit node [").partition("] ")
    assert (incident_id.startswith("eta02-"), text.startswith("scratch-b: ")) == (True, True)
    listed = {row["node"]: (row["incident"], row["phase"], row["failed"]) for row in nodes.pit("list")}
    assert listed == {"eta01": ("", "", 0), "eta02": (incident_id, "drained", 1), "eta03": ("", "", 0)}
    (nodes.folder / "scratch" / "eta02").touch()
    nodes.report()
    assert nodes.tick("--act") == [("recover", "eta02", True)]
    assert nodes.tick("--act") == []  # its job still runs
    nodes.call("scancel", job)
    assert wait_until(lambda: nodes.states()["eta02"] == "drained")
    nodes.report()
    assert nodes.tick("--act") == [("return", "eta02", True)]
    assert nodes.states()["eta02"] == "idle"
    history, incident = nodes.pit("show", "eta02")
    assert (history["incidents"], incident["check"]) == (1, "scratch-b")
    assert (incident["phase"], incident["outcome"], history["median_repair_s"] > 0) == ("over", "returned", True)


def test_a_drain_of_a_person_is_never_touched(nodes: Cluster) -> None:
    """Neither drained again, nor returned; nor is one whose reason a person changed, or a down node resumed."""
    for node in ("eta01", "eta02"):
        (nodes.folder / "scratch" / node).unlink()
    nodes.update("eta01", "drain", "bob: new fans")
    nodes.report()
    assert nodes.tick("--act") == [("drain", "eta02", True)]
    nodes.update("eta02", "drain", "bob: mine now")
    assert nodes.tick("--act") == [("release", "eta02", True)]
    for node in ("eta01", "eta02"):
        (nodes.folder / "scratch" / node).touch()
    nodes.report()
    assert nodes.tick("--act") == []
    rows = nodes.pit("return", "eta[01-03]", codes=(1,))
    assert [(row["node"], row["done"]) for row in rows] == [(node, False) for node in NODES]
    assert [nodes.reason(node) for node in ("eta01", "eta02")] == ["bob: new fans", "bob: mine now"]


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_tick_that_is_killed_is_continued(nodes: Cluster, moment: str) -> None:
    """The intent is in the journal: the next tick drains, or finds it done, once."""
    (nodes.folder / "scratch" / "eta03").unlink()
    nodes.report()
    nodes.call(sys.executable, "-c", KILLED, moment, codes=(9,))
    assert nodes.journal() == ["eta03 opened"]
    assert nodes.states()["eta03"] == ("idle" if moment == "before" else "drained")
    assert nodes.tick("--act") == [("drain", "eta03", True)]
    assert nodes.tick("--act") == []
    assert nodes.journal() == ["eta03 opened", "eta03 drained"]
    assert nodes.reason("eta03").partition("] ")[2].startswith("scratch-c: ")


def test_a_person_returns_a_node_that_was_checked_again(nodes: Cluster) -> None:
    """Not while its check fails, nor before it was checked; then at once."""
    (nodes.folder / "scratch" / "eta01").unlink()
    nodes.report("eta01")
    nodes.tick("--act")
    assert [row["done"] for row in nodes.pit("return", "eta01", codes=(1,))] == [False]
    nodes.report("eta01")
    assert "scratch-a" in nodes.pit("return", "eta01", codes=(1,))[0]["why"]
    (nodes.folder / "scratch" / "eta01").touch()
    nodes.report("eta01")
    assert [row["done"] for row in nodes.pit("return", "eta01")] == [True]
    assert nodes.states()["eta01"] == "idle"
    assert nodes.tick("--act") == []


def test_slurm_s_own_checks_write_the_reports(nodes: Cluster) -> None:
    """As HealthCheckProgram the script reports each node under its name; as Prolog it keeps jobs off a broken one."""
    hook = nodes.folder / "hook"
    text = nodes.conf.read_text()
    for path in (nodes.folder / "spool").glob("*.json"):
        path.unlink()
    (nodes.folder / "scratch" / "eta02").unlink()
    try:
        nodes.conf.write_text(f"{text}HealthCheckProgram={hook}\nHealthCheckInterval=2\nProlog={hook}\n")
        nodes.call("scontrol", "reconfigure")
        failed = dict(zip(NODES, (0, 1, 0), strict=True))
        assert wait_until(lambda: {row["node"]: row["failed"] for row in nodes.pit("list")} == failed)
        assert set(nodes.states().values()) == {"idle"}
        assert nodes.call("srun", "-w", "eta01", "echo", "well").strip() == "well"
        job = nodes.call("sbatch", "--parsable", "-w", "eta02", "-o", "/dev/null", "--wrap", "true").strip()
        assert wait_until(lambda: nodes.states()["eta02"] == "drained"), nodes.states()
        assert nodes.reason("eta02") == "Prolog error"
        assert nodes.tick("--act") == []
        nodes.call("scancel", job)
        (nodes.folder / "scratch" / "eta02").touch()
        assert wait_until(lambda: not list((nodes.folder / "state").glob("*.refuse")))
        nodes.update("eta02", "resume")
        assert nodes.call("srun", "-w", "eta02", "echo", "well").strip() == "well"
    finally:
        nodes.conf.write_text(text)
        nodes.call("scontrol", "reconfigure")
