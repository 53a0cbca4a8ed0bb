"""`scripts/pit-prolog` as a real Slurm's Prolog and Epilog, on a cluster of its own: its nodes will be drained."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from pitools.core import subprocesses
from pitools.stage.cache import lease
from pitools.stage.sources.find import load_version
from pitools.stage.stage import stage_version
from pitools.store import digest, manifest
from pitools.store.manifest import FileEntry, Manifest

pytestmark = pytest.mark.slurm

NODES = ("delta01", "delta02")
HOOK = """\
#!/bin/sh
PIT_PROLOG_CONFIG={folder}/prolog.toml PATH= exec {script}
"""
CONFIG = """\
python = "{python}"
state = "{folder}/state"
[[roots]]
path = "{folder}/nvme/{{node}}/{{user}}/pit"
disk = "{disk}"
"""
# Why a set would be kept from this job, and from another one on the node.
SEE = """\
import os, sys, pathlib, getpass
from pitools.stage.cache.evict import EvictionCandidate, evict_item
node, version = os.environ["SLURMD_NODENAME"], sys.argv[2]
root = pathlib.Path(sys.argv[1], node, getpass.getuser(), "pit")
entry = EvictionCandidate(version, root / "objects" / version)
own = evict_item(root, entry, grace_s=0, dry_run=True)
del os.environ["SLURM_JOB_ID"]
print(node, own, evict_item(root, entry, grace_s=0, dry_run=True))
"""


class Cluster(NamedTuple):
    """A running cluster of NODES. folder: of the prolog's file, its state and the nodes' disks."""

    conf: Path
    logs: Path
    folder: Path

    def call(self, *argv: str, check: bool = True) -> str:
        env = {"PATH": f"{os.environ['PATH']}:/usr/sbin", "SLURM_CONF": str(self.conf)}
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=90, check=False)
        assert not check or done.returncode == 0, done.stderr
        return done.stdout

    def states(self) -> dict[str, str]:
        return dict(line.split() for line in self.call("sinfo", "-hN", "-p", "train", "-o", "%N %t").splitlines())

    def configure(self, text: str = CONFIG, disk: str = "") -> None:
        filled = text.format(python=sys.executable, folder=self.folder, disk=disk) if text == CONFIG else text
        (self.folder / "prolog.toml").write_text(filled)

    def root(self, node: str) -> Path:
        user = self.call("id", "-un").strip()
        return self.folder / "nvme" / node / user / "pit"


def wait_until(condition: Callable[[], bool], within_s: float = 30.0) -> bool:
    until = time.monotonic() + within_s
    while not condition() and time.monotonic() < until:
        time.sleep(0.2)
    return condition()


@pytest.fixture(scope="module")
def cluster(slurm_installed: None, repo: Path) -> Iterator[Cluster]:
    """Two nodes whose slurm.conf names the script for both ends of a job."""
    with tempfile.TemporaryDirectory(prefix="dcp", dir="/var/tmp") as name:
        folder, root = Path(name), Path(name) / "r"
        hook = folder / "hook"
        hook.write_text(HOOK.format(folder=folder, script=repo / "scripts" / "pit-prolog"))
        hook.chmod(0o755)
        devcluster = str(repo / "scripts" / "devcluster")
        ports = 18000 + os.getpid() % 5 * 400  # below those where stagers of another worker's tests listen
        argv = [devcluster, "up", "--root", str(root), "--clusters", "delta", "--nodes", "2", "--base-port", str(ports)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=150, check=False)
        try:
            assert done.returncode == 0, done.stderr
            created = Cluster(conf=root / "delta" / "slurm.conf", logs=root / "log", folder=folder)
            created.conf.write_text(f"{created.conf.read_text()}Prolog={hook}\nEpilog={hook}\n")
            created.call("scontrol", "reconfigure")
            yield created
        finally:
            subprocess.run([devcluster, "down", "--root", str(root)], capture_output=True, timeout=150, check=True)


@pytest.fixture
def nodes(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster with its configuration as it should be and its nodes idle, before and after."""
    for node in NODES:
        (cluster.folder / "nvme" / node).mkdir(parents=True, exist_ok=True)
    cluster.configure()
    yield cluster
    cluster.configure()
    if set(cluster.states().values()) - {"idle", "comp", "mix", "alloc"}:
        cluster.call("scontrol", "update", f"nodename={','.join(NODES)}", "state=resume")
    assert wait_until(lambda: set(cluster.states().values()) == {"idle"}), cluster.states()


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """A version of one file, at a place that nodes can read."""
    folder = tmp_path / "pick" / "new"
    folder.mkdir(parents=True)
    (folder / "a").write_bytes(os.urandom(1000))
    size, text = digest.digest_file(folder / "a")
    entry = FileEntry(path="a", bytes=size, digest=text)
    data = manifest.encode_manifest(Manifest(name="pick", episodes=1, steps=1, arrays={}, files=(entry,)))
    (folder / manifest.MANIFEST_FILE).write_bytes(data)
    return folder.rename(tmp_path / "pick" / manifest.version_of(data))


def test_a_job_finds_its_set_leased_and_leaves_it_free(nodes: Cluster, dataset: Path):
    """From before its first step until its end, on every node, only the job can evict what its user has staged."""
    for node in NODES:
        stage_version(load_version(dataset), nodes.root(node))
    out = nodes.call("srun", "-N2", sys.executable, "-c", SEE, f"{nodes.folder}/nvme", dataset.name)
    assert sorted(out.splitlines()) == [f"{node} None kept-for-job" for node in NODES]
    assert wait_until(lambda: not any(lease.is_leased(nodes.root(node), dataset.name) for node in NODES))


def test_a_cancelled_job_leaves_it_free(nodes: Cluster, dataset: Path):
    """The epilog runs whatever ended the job."""
    stage_version(load_version(dataset), nodes.root("delta01"))
    job = nodes.call("sbatch", "--parsable", "-w", "delta01", "-o", "/dev/null", "--wrap", "sleep 60").strip()
    assert wait_until(lambda: lease.is_leased(nodes.root("delta01"), dataset.name))
    time.sleep(1)
    assert lease.is_leased(nodes.root("delta01"), dataset.name)
    nodes.call("scancel", job)
    assert wait_until(lambda: not lease.is_leased(nodes.root("delta01"), dataset.name))


def test_the_first_step_stages_what_is_missing(nodes: Cluster, dataset: Path):
    """One line in a job: a node that has the set says so, one that lost it has it again, under the prolog's leases."""
    stage_version(load_version(dataset), nodes.root("delta01"))
    shutil.rmtree(nodes.root("delta02"), ignore_errors=True)
    program = [sys.executable, "-c", "from pitools.cli import stage; stage()"]
    to = f"{nodes.folder}/nvme/{{node}}/{{user}}/pit"
    words = [*program, "run", str(dataset), "--to", to, "--format", "jsonl"]
    out = nodes.call("srun", "-N2", "--ntasks-per-node=1", *words)
    actual = {record["node"]: record["state"] for record in map(json.loads, out.splitlines())}
    assert actual == {"delta01": "present", "delta02": "staged"}


@pytest.mark.parametrize(
    "config",
    ['[[roots]\npath = "/x"', 'rots = 1\n[[roots]]\npath = "/tmp/{user}"', 'python = "/nowhere"\ntimeout_s = 3\n', ""],
    ids=["not-toml", "unknown-key", "no-python", "empty"],
)
def test_a_broken_configuration_drains_no_node(nodes: Cluster, config: str):
    """The job runs, and every node is there for the next one."""
    nodes.configure(config)
    assert sorted(nodes.call("srun", "-N2", "sh", "-c", "echo $SLURMD_NODENAME").split()) == list(NODES)
    assert wait_until(lambda: set(nodes.states().values()) == {"idle"}), nodes.states()


@pytest.mark.usefixtures("as_root")
def test_a_read_only_disk_drains_the_node_and_says_why(nodes: Cluster):
    """Only the node whose disk it is; its log has the reason, and when it is mended jobs run there again."""
    disk = nodes.folder / "nvme" / "delta02"
    mounted = subprocesses.run(["mount", "-t", "tmpfs", "-o", "ro,size=1m", "tmpfs", str(disk)], timeout_s=10)
    if mounted.code:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.strip()}")
    try:
        nodes.configure(disk=f"{nodes.folder}/nvme/delta02")
        job = nodes.call("sbatch", "--parsable", "-w", "delta02", "-o", "/dev/null", "--wrap", "true").strip()
        assert wait_until(lambda: nodes.states()["delta02"].startswith("dr")), nodes.states()
        assert nodes.states()["delta01"] == "idle"
        assert "Prolog error" in nodes.call("sinfo", "-hR", "-o", "%E")
        assert f"{disk} is read-only" in (nodes.logs / "slurmd-delta02.log").read_text()
        nodes.call("scancel", job)
        assert subprocesses.run(["mount", "-o", "remount,rw", str(disk)], timeout_s=10).code == 0
        nodes.call("scontrol", "update", "nodename=delta02", "state=resume")
        assert nodes.call("srun", "-w", "delta02", "echo", "well").strip() == "well"
    finally:
        subprocesses.run(["umount", "-l", str(disk)], timeout_s=10)
