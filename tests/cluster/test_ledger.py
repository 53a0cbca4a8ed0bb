"""Ledgers of real jobs: a run of which a rank is killed, and a job of another program."""

from __future__ import annotations

import base64
import gzip
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from perf.monitor import faulty_steps
from pitools.run import run_folder

pytestmark = pytest.mark.slurm

Pit = Callable[..., subprocess.CompletedProcess[str]]
REQUEST = """\
name = "faulty"
entry = "faulty_steps:main"
nodes = 2
time = "5m"
[args]
steps = 45
save_every = 20
save_s = 0.2
slow_s = 0.05
"""


def until(what: Callable[[], Any], timeout_s: float = 120) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (actual := what()):
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.1)
    return actual


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def sacct(clusters: Path, job_id: str, fields: str) -> list[list[str]]:
    argv = ["sacct", "-X", "-D", "-P", "-n", "-j", job_id, "-o", fields]
    env = {**os.environ, "SLURM_CONF": str(clusters / "alpha" / "slurm.conf")}
    out = subprocess.run(argv, env=env, capture_output=True, text=True, check=True).stdout
    return [line.split("|") for line in out.splitlines()]


def test_a_run_of_which_a_rank_is_killed(pit: Pit, clusters: Path, tmp_path: Path) -> None:
    """The states sum to what sacct says; steps made again, saves and a slow rank are those that the loop recorded.

    `pit monitor usage` has the same goodput, and as useful hours the productive ones.
    """
    runs = clusters / "runs" / f"ledger-{os.getpid()}"
    shutil.copy(faulty_steps.__file__, tmp_path)
    (tmp_path / "faulty.toml").write_text(REQUEST)
    try:
        run = json.loads(pit("launch", "run", "faulty.toml", "--site", "alpha", PIT_RUNS=str(runs)).stdout)
        run_dir = Path(run["run_dir"])
        first, second = (run_dir / "attempts" / name for name in "01")
        until(lambda: len(read(first / "truth" / "0.jsonl")) > 30)
        os.kill(json.loads((first / "ranks" / "1.json").read_text())["pid"], signal.SIGKILL)
        until(lambda: (run_dir / "verdict.json").exists())
        until(lambda: run_folder.last_exit(run_dir) and sacct(clusters, run["job_id"], "End") != [["Unknown"]])
        ledger = json.loads(pit("monitor", "goodput", str(run_dir)).stdout)
        elapsed = sum(int(a) * int(b) for a, b in sacct(clusters, run["job_id"], "ElapsedRaw,NNodes"))
        line = pit("launch", "show", str(run_dir)).stderr
        words = ("monitor", "usage", "--site", "alpha", "--store", "u.sqlite", "--since", "1h", "--by", "tag")
        rows = map(json.loads, pit(*words, "--format", "jsonl", PIT_RUNS=str(runs)).stdout.splitlines())
        (usage,) = (row for row in rows if row["group"] == run_dir.name.rsplit("-", 3)[0])
        truth = [(read(first / "truth" / f"{rank}.jsonl"), read(second / "truth" / f"{rank}.jsonl")) for rank in (0, 1)]
    finally:
        until(lambda: not subprocess.run(["rm", "-rf", str(runs)]).returncode)
    seconds = ledger["seconds"]
    assert sum(seconds.values()) == pytest.approx(ledger["allocated_s"]) == pytest.approx(elapsed)
    assert usage["efficiency"] == pytest.approx(ledger["goodput"])
    assert usage["useful_hours"] * 3600 == pytest.approx(seconds["productive"])
    again = truth[0][1][0]["step"]
    assert again == 20
    lost = [step for first, _ in truth for step in first if step["step"] >= again]
    kept = [step for first, second in truth for step in (*first[:again], *second)]
    assert seconds["lost"] == pytest.approx(sum(step["end"] - step["begin"] for step in lost), rel=0.02)
    assert seconds["recovery"] == pytest.approx(sum(b[0]["begin"] - a[-1]["end"] for a, b in truth), rel=0.02)
    assert seconds["checkpoint"] == pytest.approx(sum(step.get("save", 0) for step in kept), rel=0.02)
    assert seconds["straggler"] >= 0.9 * sum(step.get("slow", 0) for step in kept)
    assert "; greatest loss: " in line


@pytest.mark.usefixtures("as_root")
def test_a_job_of_another_program(pit: Pit, clusters: Path, tmp_path: Path) -> None:
    """By its number: sacct's times, and of a requeued one each start; the record of jobstats is read from sacct."""
    env = {**os.environ, "SLURM_CONF": str(clusters / "alpha" / "slurm.conf")}

    def slurm(*argv: str) -> str:
        return subprocess.run(argv, env=env, capture_output=True, text=True, check=True).stdout.strip()

    job_id = slurm("sbatch", "--parsable", "-o/dev/null", "--requeue", "--wrap", "sleep 2")
    until(lambda: slurm("squeue", "-h", "-j", job_id, "-o", "%T") == "RUNNING")
    slurm("scontrol", "requeue", job_id)
    until(lambda: len(sacct(clusters, job_id, "State")) == 2)
    slurm("scontrol", "update", f"jobid={job_id}", "starttime=now")
    until(lambda: sacct(clusters, job_id, "State")[-1] == ["COMPLETED"], timeout_s=240)  # other tests' jobs hold nodes
    packed = gzip.compress(json.dumps({"nodes": {"n": {"gpu_utilization": {}}}}).encode())
    comment = f"AdminComment=JS1:{base64.b64encode(packed).decode()}"
    slurm("sacctmgr", "-i", "modify", "job", "where", f"jobid={job_id}", "set", comment)
    ledger = json.loads(pit("monitor", "goodput", job_id, "--site", "alpha").stdout)
    rows = sacct(clusters, job_id, "ElapsedRaw")
    assert (ledger["source"], ledger["allocations"], ledger["goodput"]) == ("sacct", 2, None)
    assert ledger["seconds"]["unaccounted"] == ledger["allocated_s"] == sum(int(row[0]) for row in rows)
    missing = pit("monitor", "goodput", "99999999", "--site", "alpha")
    assert (missing.returncode, "no job 99999999" in missing.stderr) == (2, True)
