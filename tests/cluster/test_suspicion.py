"""A node that failed under one run is avoided by others, and one that is drained counts nowhere, on a real Slurm."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pitools.core import hostlist, timestamps
from pitools.node import blames, spool
from pitools.node.types import Finding, NodeReport
from pitools.place.clusters import pools, snapshot
from pitools.site import connect, load
from pitools.slurm.client import Client
from pitools.slurm.records import Node
from pitools.topology import discover
from pitools.topology.acquire import node_filter

pytestmark = pytest.mark.slurm

Pit = Callable[..., subprocess.CompletedProcess[str]]
REQUEST = 'name = "loop"\ncommand = "sleep 300"\nnodes = {nodes}\ntime = "5m"\ntopology = "{by}"\n'


class Site:
    """Cluster alpha, whose site file has a spool."""

    def __init__(self, folder: Path, pit: Pit, root: Path, text: str) -> None:
        self.folder, self.conf, self._pit = folder, root / "alpha" / "slurm.conf", pit
        self.slurm: Client = connect.client(load.load_site("alpha"))
        self.runs, self.sites, self.jobs = root / "runs" / f"suspicion-{os.getpid()}", folder / "sites", list[str]()
        for path in (folder / "spool", self.sites):
            path.mkdir()
        blames.make_folder(folder / "spool")
        (folder / "node.toml").write_text(f'spool = "{folder}/spool"\n')
        (self.sites / "alpha.toml").write_text(f'{text}\n[node]\nconfig = "{folder}/node.toml"\n')

    def pit(self, *words: str, codes: tuple[int, ...] = (0,)) -> str:
        done = self._pit(*words, "--site", "alpha", PIT_SITE_PATH=str(self.sites), PIT_RUNS=str(self.runs))
        assert done.returncode in codes, done.stderr
        return done.stdout

    def update(self, *words: str) -> None:
        subprocess.run(["scontrol", "update", *words], env={**os.environ, "SLURM_CONF": str(self.conf)}, check=True)

    def resume(self) -> None:
        """Wait until all nodes are idle; slurmd itself may bring one back that was down."""
        until(lambda: not [self._try_resume(node) for node in self.slurm.nodes() if node.state != "idle" or node.flags])

    def _try_resume(self, node: Node) -> str:
        if node.state == "down" or "drain" in node.flags:
            with contextlib.suppress(subprocess.CalledProcessError):
                self.update(f"nodename={node.node}", "state=resume")
        return node.node

    def start(self, by: str, nodes: int = 2) -> tuple[Path, list[str]]:
        """Start a run; return its folder and nodes."""
        (self.folder / "loop.toml").write_text(REQUEST.format(by=by, nodes=nodes))
        run = json.loads(self.pit("launch", "run", str(self.folder / "loop.toml")))
        self.jobs.append(run["job_id"])
        (job,) = until(lambda: [job for job in self.slurm.job(run["job_id"]) if job.state == "RUNNING"])
        until(lambda: len(list(Path(run["run_dir"]).glob("attempts/0/ranks/*.json"))) == nodes)
        return Path(run["run_dir"]), hostlist.expand(job.node_list)

    def leaf(self, node: str) -> set[str]:
        return node_filter.nodes_of_leaves([node], discover.query_fabric(self.slurm))

    def chosen(self, nodes: int) -> set[str]:
        return set(hostlist.expand(self.pit("topology", "choose", "--nodes", str(nodes), "-H").strip()))


def until(what: Callable[[], Any], timeout_s: float = 60) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (actual := what()):
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.2)
    return actual


@pytest.fixture
def site(pit: Pit, clusters: Path, dev_sites: Path) -> Iterator[Site]:
    with tempfile.TemporaryDirectory(prefix="dcs", dir="/var/tmp") as name:
        one = Site(Path(name), pit, clusters, (dev_sites / "alpha.toml").read_text())
        runs = one.runs
        yield one
        one.slurm.cancel([job.job_id for job in one.slurm.jobs() if job.name.startswith("loop")] or one.jobs)
        one.resume()
        subprocess.run(["rm", "-rf", str(runs)], check=False)


def test_a_node_that_failed_a_run_is_avoided_by_others(site: Site) -> None:
    """Its recovery records the node; while that is idle again, a choice takes others, and all if it must."""
    run_dir, (_, failed) = site.start("none")
    site.update(f"nodename={failed}", "state=down", "reason=test_suspicion")
    events = run_dir / "events.jsonl"  # 75: the run's own job, which ends, has its lock
    until(lambda: (site.pit("launch", "tick", codes=(0, 75)), "decided" in events.read_text())[1])
    site.pit("launch", "cancel", str(run_dir))
    site.resume()
    (suspected,) = [row for row in map(json.loads, site.pit("node", "list").splitlines()) if row["suspicion"]]
    assert (suspected["node"], suspected["suspicion"][:15]) == (failed, "users: 1; node,")
    assert json.loads(site.pit("node", "show", failed).splitlines()[-1])["source"] == "run"
    assert failed not in site.chosen(2) | site.chosen(3)
    assert failed in site.chosen(8)
    others = {node.node for node in site.slurm.nodes()} - site.leaf(failed)
    site.update(f"nodename={hostlist.fold(sorted(others)[:2])}", "state=drain", "reason=test_suspicion")
    site.runs /= "others"  # another user's, without the exclusions of this one
    _, nodes = site.start("exclude", 3)  # for which only the leaf of the failed node has enough
    assert set(nodes) == site.leaf(failed) - {failed}


def test_a_drained_node_is_no_capacity(site: Site) -> None:
    """Neither idle, nor at the end of the job that still runs there; nor is it chosen."""
    _, (drained, _) = site.start("none")
    site.update(f"nodename={drained}", "state=drain", "reason=test_suspicion")
    seen = snapshot.read_snapshot(load.load_site("alpha"), max_age_s=0)
    (pool, *_) = pools.pool_states(seen, (), load.load_site("alpha"))
    assert (pool.units, pool.free, [units for _, units in pool.running]) == (7, 6, [1])
    site.slurm.cancel(site.jobs)
    until(lambda: {node.state for node in site.slurm.nodes()} == {"idle"})
    assert drained not in site.chosen(7)


def test_a_drain_that_is_held_back_keeps_jobs_away(site: Site) -> None:
    """A node whose report drains it, but that is not drained: a run's jobs exclude it from the first on."""
    now = timestamps.now_rfc3339()
    plain = {"node": "alpha01", "check": "c", "state": "failed", "level": "critical", "action": "drain"}
    found = Finding(**plain, message="m", evidence_at=now)  # type: ignore[arg-type]
    report = NodeReport(node="alpha01", boot_id="b", checked_at=now, findings=(found,))
    spool.write_report(site.folder / "spool", report)
    _, nodes = site.start("none")
    assert "alpha01" not in nodes
    assert site.slurm.job(site.jobs[0])[0].excluded_nodes == "alpha01"
