"""Group tests on 16 slurmds of a cluster of its own: ranks that are slow, corrupt, die or hang are found."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pitools.core.errors import ClusterError
from pitools.launch.job import preflight
from pitools.node.bench import run
from pitools.node.bench.bisect import find_bad, max_rounds
from pitools.slurm import job_step

pytestmark = pytest.mark.slurm

NODES = [f"delta{number:02}" for number in range(1, 17)]
# The product's rank, with faults by node.
PROGRAM = """\
import os, signal, time
from pitools.node.bench import collectives, worker

FAULT = {faults}.get(os.environ["SLURMD_NODENAME"], "")

class Faulty(collectives.{kind}):
    def {timed}(self, *buffers):
        if FAULT == "slow" and not (buffers and buffers[0].nbytes <= 4096):
            time.sleep({slow_s})
        return super().{timed}(*buffers)

    def all_reduce(self, buffer):
        if FAULT == "corrupt":
            buffer[7] += 1
        elif FAULT == "die":
            os._exit(9)
        elif FAULT == "hang":
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().all_reduce(buffer)

worker.main(Faulty)
"""
SOCKETS = {"kind": "SocketCollective", "timed": "_sum", "slow_s": 0.5}
TORCH = {"kind": "TorchCollective", "timed": "_synchronize", "slow_s": 3}


@pytest.fixture(scope="module")
def cluster(slurm_installed: None, repo: Path) -> Iterator[Path]:
    """The slurm.conf of a running cluster of NODES."""
    devcluster = str(repo / "scripts" / "devcluster")
    with tempfile.TemporaryDirectory(prefix="dcb", dir="/var/tmp") as root:
        ports = 22000 + os.getpid() % 5 * 400  # above those of other tests' clusters
        argv = [devcluster, "up", "--root", root, "--clusters", "delta", "--nodes", "16", "--base-port", str(ports)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=150, check=False)
        try:
            assert done.returncode == 0, done.stderr
            yield Path(root) / "delta" / "slurm.conf"
        finally:
            subprocess.run([devcluster, "down", "--root", root], capture_output=True, timeout=150, check=True)


@pytest.fixture
def job(cluster: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An allocation of all nodes, in which this process is."""
    monkeypatch.setenv("SLURM_CONF", str(cluster))
    done = subprocess.run(["salloc", "--no-shell", "-N16", "-t10"], capture_output=True, text=True, timeout=60)
    match = re.search(r"job allocation (\d+)", done.stderr)
    assert match, done.stderr
    monkeypatch.setenv("SLURM_JOB_ID", match[1])
    monkeypatch.setenv("SLURM_JOB_NODELIST", "delta[01-16]")
    yield
    subprocess.run(["scancel", match[1]], timeout=60, check=True)


def worker(folder: Path, faults: dict[str, str], **kind: object) -> list[str]:
    """Return the command of a rank, with a fault on some nodes. kind: of the collective, by sockets if not given."""
    path = folder / "rank.py"
    path.write_text(PROGRAM.format(**{**SOCKETS, **kind, "faults": faults}))
    return [sys.executable, str(path), "--sizes=4096,4194304"]  # the latter longer than a wait for a CPU


def bench(
    folder: Path, faults: dict[str, str], timeout_s: float = 60, **kind: object
) -> tuple[dict[str, str], int, list[run.GroupTest]]:
    """Return the verdicts that are not ok, by node or group, the number of rounds, and the tests."""
    tester = run.GroupTester(timeout_s=timeout_s, worker=worker(folder, faults, **kind))
    found = find_bad(job_step.nodes_of_job(), tester.test_round, together=True)
    results = run.to_results(found, NODES, tester.tests, tester.devices)
    return {row.node: row.verdict for row in results if row.verdict != "ok"}, found.rounds, tester.tests


@pytest.mark.parametrize(
    "faults",
    [
        {"delta06": "corrupt"},
        {"delta11": "slow"},
        {"delta03": "slow", "delta04": "corrupt"},
        {"delta02": "die", "delta16": "corrupt"},
    ],
    ids=["corrupt", "slow", "slow and corrupt in one pair", "dies and corrupt"],
)
def test_bad_ranks_of_sixteen_are_found(job: None, tmp_path: Path, faults: dict[str, str]) -> None:
    """With the right cause, no other node, and within the rounds promised; the good ones pass together."""
    bad, rounds, tests = bench(tmp_path, faults)
    names = {"corrupt": "wrong", "slow": "slow", "die": "failed"}
    assert {node: bad.get(node) for node in faults} == {node: names[fault] for node, fault in faults.items()}, tests
    assert not set(bad).intersection(set(NODES) - set(faults)), tests
    assert rounds <= max_rounds(16)
    assert (tests[-1].n_nodes, tests[-1].verdict) == (16 - len(faults), "ok")


@pytest.mark.parametrize("fault", ["", "slow", "corrupt"])
def test_the_preflight_of_a_job_by_the_same_tests(job: None, tmp_path: Path, fault: str) -> None:
    """It names the node, and nothing of nodes that are well; a job that is signalled starts no test."""
    nodes, argv = NODES[:6], worker(tmp_path, {"delta03": fault})
    found = preflight.find_bad_nodes(nodes, worker=argv, timeout_s=60)
    expected = [("delta03", preflight.ALL_REDUCE)] if fault else []
    assert [(failure.node, failure.check) for failure in found.failures] == expected
    if fault == "corrupt":
        found = preflight.find_bad_nodes(nodes[2:4], worker=argv, timeout_s=60)
        assert {(failure.node, failure.check) for failure in found.failures} == {
            (node, preflight.WRONG_PAIR) for node in nodes[2:4]
        }
    assert not preflight.find_bad_nodes(nodes, worker=argv, is_stopped=lambda: True).failures


def test_a_rank_that_hangs_fails_its_group_and_no_other(job: None, tmp_path: Path) -> None:
    """Its partner's time-out ends the step, even though the rank is stopped and cannot end itself."""
    tester = run.GroupTester(timeout_s=20, worker=worker(tmp_path, {"delta09": "hang"}))
    assert tester.test_round([("delta08", "delta09"), ("delta10", "delta11")]) == [False, True]
    assert [test.verdict for test in tester.tests] == ["failed", "ok"]


def test_a_program_that_runs_nowhere_is_no_fault_of_nodes(job: None) -> None:
    """As without pitools on the nodes: the error has the program's last words, after one round."""
    tester = run.GroupTester(timeout_s=60, worker=[sys.executable, "-c", "import nosuch"])
    with pytest.raises(ClusterError) as raised:
        find_bad(NODES[:4], tester.test_round, together=True)
    assert "nosuch" in raised.value.message


@pytest.mark.parametrize("mode", ["--single", "--bisect"])
def test_a_kill_leaves_no_step(job: None, mode: str, tmp_path: Path) -> None:
    """Nor does an interrupt, then: the ranks' stdin ends with the command."""
    argv = [sys.executable, "-m", "pitools", "node", "bench", mode]
    bench = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=tmp_path)
    try:
        wait_for_steps(some=True)
        bench.kill()
        wait_for_steps(some=False)
    finally:
        bench.kill()
        bench.communicate()


def wait_for_steps(*, some: bool) -> None:
    """Wait until the job has steps, or none; the test's time-out is the limit."""
    argv = ["squeue", "-h", "-s", "-j", os.environ["SLURM_JOB_ID"], "-o", "%i"]
    while bool(subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True).stdout.split()) != some:
        time.sleep(0.2)


def test_one_pair_without_a_program_is_no_fault_of_nodes(job: None) -> None:
    """As without pitools on the nodes: two nodes are not blamed for it; a rank that dies at work is of a node."""
    tester = run.GroupTester(timeout_s=60, worker=[sys.executable, "-c", "import nosuch"])
    with pytest.raises(ClusterError):
        tester.test_round([("delta01", "delta02")])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_bad_ranks_of_sixteen_with_a_framework(job: None, tmp_path: Path) -> None:
    """A rank that is slow and one that corrupts, by torch.distributed."""
    pytest.importorskip("torch")
    bad, rounds, tests = bench(tmp_path, {"delta05": "slow", "delta12": "corrupt"}, 200, **TORCH)
    assert (bad["delta05"], bad["delta12"]) == ("slow", "wrong"), tests
    assert not set(bad).intersection(set(NODES) - {"delta05", "delta12"}), tests
    assert rounds <= max_rounds(16)


def test_pairs_by_the_command(job: None, pit: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    """With the shipped ranks; results go to the spool, and later runs are compared with them."""
    spool = tmp_path / "spool"
    spool.mkdir(mode=0o700)
    config = tmp_path / "node.toml"
    config.write_text(f'spool = "{spool}"\n')
    here = {name: os.environ[name] for name in ("SLURM_CONF", "SLURM_JOB_ID")}
    done = pit("node", "bench", "--pairs", "--config", str(config), **here, SLURM_JOB_NODELIST="delta[03-04]")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(row["node"], row["measure"], row["verdict"]) for row in rows] == [
        (node, "all_reduce_bytes_per_s", "ok") for node in ("delta03", "delta04")
    ]
    assert all(row["value"] > 0 for row in rows)
    assert (spool / "bench" / "delta03.jsonl").read_text() == done.stdout.splitlines(keepends=True)[0]


def test_nodes_alone_by_the_command(
    job: None, pit: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """Each node of the job has its rows; a disk that cannot be written fails, and nothing else."""
    here = {name: os.environ[name] for name in ("SLURM_CONF", "SLURM_JOB_ID")}
    words = ["--folder", str(tmp_path / "missing")]
    done = pit("node", "bench", *words, **here, SLURM_JOB_NODELIST="delta[03-04]")
    assert done.returncode == 1, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    verdicts = {(row["node"], row["measure"]): row["verdict"] for row in rows}
    for node in ("delta03", "delta04"):
        assert verdicts[node, "cpu_bytes_per_s"] == verdicts[node, "memory_bytes_per_s"] == "ok"
        assert verdicts[node, "disk_write_bytes_per_s"] == "failed"


def test_what_cannot_be_measured_is_refused_at_once(pit: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """Groups without a job, with a command that makes one; and a folder that is not there."""
    for words, hint in ((["--pairs"], "salloc"), (["--folder", "/nope"], "/var/tmp")):
        done = pit("node", "bench", *words)
        assert (done.returncode, done.stdout) == (2, "")
        assert hint in done.stderr
