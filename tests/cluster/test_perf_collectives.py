"""Collectives between four slurmds under two leaf switches: measured, kept, compared, and a corrupting rank found."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pitools.perf.collectives.run import choose_placements, run_placement
from pitools.perf.regression.store import add_points, read_series
from pitools.slurm.client import Client
from pitools.topology.discover import query_fabric

pytestmark = pytest.mark.slurm

NODES = "gamma[01-04]"
# A rank whose memory fails on one node: what it sends has a wrong element.
FAULTY = """\
import os
from pitools.perf.collectives import worker

class Faulty(worker.TorchOperations):
    def call(self, operation, position, source, target):
        if os.environ["SLURMD_NODENAME"] == "gamma03":
            source[7] += 1
        super().call(operation, position, source, target)

worker.main({"torch": Faulty})
"""


@pytest.fixture(scope="module")
def cluster(slurm_installed: None, repo: Path) -> Iterator[Path]:
    """The slurm.conf of a running cluster of NODES."""
    devcluster = str(repo / "scripts" / "devcluster")
    with tempfile.TemporaryDirectory(prefix="dcc", dir="/var/tmp") as root:
        ports = 26000 + os.getpid() % 5 * 400  # above those of other tests' clusters
        argv = [devcluster, "up", "--root", root, "--clusters", "gamma", "--nodes", "4", "--base-port", str(ports)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=150, check=False)
        try:
            assert done.returncode == 0, done.stderr
            yield Path(root) / "gamma" / "slurm.conf"
        finally:
            subprocess.run([devcluster, "down", "--root", root], capture_output=True, timeout=150, check=True)


@pytest.fixture
def job(cluster: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """The variables of an allocation of all nodes, in which this process is."""
    monkeypatch.setenv("SLURM_CONF", str(cluster))
    done = subprocess.run(["salloc", "--no-shell", "-N4", "-t10"], capture_output=True, text=True, timeout=60)
    match = re.search(r"job allocation (\d+)", done.stderr)
    assert match, done.stderr
    job = {"SLURM_JOB_ID": match[1], "SLURM_JOB_NODELIST": NODES, "SLURM_JOB_PARTITION": "train"}
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    yield {"SLURM_CONF": str(cluster), **job}
    subprocess.run(["scancel", match[1]], timeout=60, check=True)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_measured_kept_and_compared(
    job: dict[str, str], pit: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, framework: str
) -> None:
    """Under a leaf switch and across both; a store whose bandwidths were far higher makes each result slow."""
    pytest.importorskip(framework)
    store = tmp_path / "perf.sqlite"

    def measure(*words: str) -> tuple[int, list[dict[str, Any]], str]:
        argv = ["--framework", framework, "--operations", "all_reduce,all_to_all", "--sizes", "4KiB,16KiB,64KiB"]
        done = pit("perf", "collectives", *argv, *words, **job, JAX_PLATFORMS="cpu")
        return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr

    code, records, stderr = measure("--add", str(store))
    assert code == 0, stderr
    rows = [each for each in records if each["schema"] == "pit.perf-collective/1"]
    places = [("leaf", 2, 1), ("leaves", 2, 2), ("leaves", 4, 2)]
    assert [(each["placement"], each["n_nodes"], each["leaves"]) for each in rows[::6]] == places
    assert {(each["verdict"], each["wrong"], each["device"]) for each in rows} == {("ok", 0, "cpu")}
    assert [each["bytes"] for each in rows] == [4096, 16384, 65536] * 6
    assert len([each for each in records if each["schema"] == "pit.perf-collective-fit/1"]) == 6
    series = read_series(store)
    assert (len(series), {each.key[:3] for each in series}) == (18, {("local", "train", "cpu")})
    points = [msgspec.structs.replace(each.points[0], value=1e15, t=f"{day}") for each in series for day in range(9)]
    add_points(store, [point for point in points if "/leaf-2x1-1/" in point.measure])
    code, records, stderr = measure("--compare", str(store), "--add", str(store))
    rows = [each for each in records if each["schema"] == "pit.perf-collective/1"]
    assert (code, [each["verdict"] for each in rows]) == (1, ["slow"] * 6 + ["ok"] * 12), stderr
    assert stderr.count("pit: measures leaf: gamma[01,03]") == 4
    assert "12 of 18 results were not compared" in stderr
    assert len([point for each in read_series(store) for point in each.points if point.value < 1e15]) == 18 + 12


@pytest.mark.timeout(600)
def test_a_rank_of_four_that_corrupts_is_found(job: dict[str, str], tmp_path: Path) -> None:
    """Where its leaf switch is measured, and where all nodes are; by name."""
    pytest.importorskip("torch")
    path = tmp_path / "rank.py"
    path.write_text(FAULTY)
    leaf_of = {node: leaf.path[-1] for leaf in query_fabric(Client()).leaves for node in leaf.nodes}
    verdicts = {}
    for place in choose_placements([f"gamma0{number}" for number in range(1, 5)], leaf_of, 1):
        rows = run_placement(
            place,
            "torch",
            ["--operations=all_gather,all_to_all", "--sizes=16384"],
            ranks_per_node=1,
            timeout_s=200,
            worker=[sys.executable, str(path)],
        )
        verdicts[place.nodes] = {(row.verdict, row.problem.rpartition(" ")[2]) for row in rows}
    assert verdicts == {
        ("gamma01", "gamma03"): {("wrong", "gamma03")},
        ("gamma01", "gamma02"): {("ok", "")},
        ("gamma01", "gamma02", "gamma03", "gamma04"): {("wrong", "gamma03")},
    }


def test_a_job_is_needed(pit: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """Without one, the error has a command that makes one."""
    done = pit("perf", "collectives")
    assert done.returncode == 2
    assert "salloc" in done.stderr
