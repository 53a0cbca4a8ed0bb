"""The main job, end to end, as a user types it: ingest, stage, and train on one machine and on a real Slurm."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pitools.run import steps

Pit = Callable[..., subprocess.CompletedProcess[str]]
STEPS = 30


def records(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def losses(run_dir: str, rank: int = 0) -> list[float]:
    return [step.loss for step in steps.read(Path(run_dir) / "attempts" / "0" / "steps" / f"{rank}.jsonl")]


@pytest.fixture(scope="module")
def dataset(bridge: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The real recording, ingested."""
    root = tmp_path_factory.mktemp("datasets")
    argv = [str(Path(sys.executable).with_name("pit")), "dataset", "ingest", str(bridge), "--to", str(root)]
    done = subprocess.run([*argv, "--name", "bridge"], capture_output=True, text=True, check=False)
    return str(records(done)[-1]["path"])


@pytest.fixture
def request_file(repo: Path, tmp_path: Path) -> Callable[..., str]:
    """One of the example requests with fewer steps, and single keys changed."""

    def make(framework: str, **changed: Any) -> str:
        text = (repo / "scripts" / "examples" / f"bc_{framework}.toml").read_text()
        text = re.sub(r"(?m)^steps = \d+$", f"steps = {STEPS}", text)
        lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in changed.items())
        path = tmp_path / f"{framework}.toml"
        path.write_text(lines + "\n".join(line for line in text.splitlines() if line.split(" ")[0] not in changed))
        return str(path)

    return make


@pytest.fixture(scope="module")
def alone(repo: Path, dataset: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """Losses of each framework's loop in one process, without any launcher, with the example's arguments."""
    found = {}
    for framework in ("jax", "torch"):
        attempt = tmp_path_factory.mktemp(framework)
        args = tomllib.loads((repo / "scripts" / "examples" / f"bc_{framework}.toml").read_text())["args"]
        code = f"from pitools.train.{framework}_bc import main; main(**{ {**args, 'steps': STEPS} })"
        env = {**os.environ, "PIT_DATA_DEMO": dataset, "PIT_ATTEMPT_DIR": str(attempt)}
        subprocess.run([sys.executable, "-c", code], env=env, check=True, stdout=subprocess.DEVNULL, timeout=200)
        found[framework] = [step.loss for step in steps.read(attempt / "steps" / "0.jsonl")]
    return found


def test_two_processes_here_train_as_one(
    pit: Pit, dataset: str, request_file: Callable[..., str], alone: dict[str, list[float]]
) -> None:
    """On the site `local` the loss falls, and every step's loss is that of one process to 1e-5."""
    wanted = request_file("jax", nodes=2)
    run = records(pit("launch", "run", wanted, "--site", "local", "--data", f"demo={dataset}", "--wait"))[-1]
    assert (run["state"], run["exit_code"]) == ("COMPLETED", 0)
    assert losses(run["run_dir"]) == pytest.approx(alone["jax"], abs=1e-5)
    assert losses(run["run_dir"], 1) == losses(run["run_dir"])
    assert losses(run["run_dir"])[-1] < 0.8 * losses(run["run_dir"])[0]
    summary = records(pit("launch", "show", run["run_dir"], "--steps"))[-1]
    assert (summary["ranks"], summary["steps"]) == (2, STEPS)
    assert "step 0 loss" in pit("launch", "logs", run["run_dir"], "--rank", "0").stdout


@pytest.mark.slurm
def test_four_nodes_of_two_leaves(
    clusters: Path, pit: Pit, dataset: str, request_file: Callable[..., str], alone: dict[str, list[float]]
) -> None:
    """On alpha: ranks follow the leaves, each node reads its own verified copy, and the losses are one process's."""
    wanted = request_file("jax", nodelist="alpha[01-04]")
    # The submitter's own default site must not reach the job: its order is of the fabric that it runs on.
    words = ("launch", "run", wanted, "--site", "alpha", "--data", f"demo={dataset}", "--wait")
    run = records(pit(*words, PIT_SITE="beta"))[-1]
    attempt = Path(run["run_dir"]) / "attempts" / "0"
    # Odd nodes are under leaf1 and even ones under leaf2: the order is the tree's, not the names'.
    assert (attempt / "hostfile").read_text().split() == ["alpha01", "alpha03", "alpha02", "alpha04"]
    ranks = [json.loads((attempt / "ranks" / f"{rank}.json").read_text()) for rank in range(4)]
    assert [rank["node"] for rank in ranks] == ["alpha01", "alpha03", "alpha02", "alpha04"]
    for rank in ranks:
        nvme = clusters / "alpha" / "nvme" / rank["node"] / "objects"
        assert Path(rank["data"]["demo"]).parent == nvme
        receipt = json.loads((attempt / "nodes" / rank["node"] / "demo.json").read_text())
        assert receipt["path"] == rank["data"]["demo"]
        assert receipt["state"] in ("staged", "present")
    assert losses(run["run_dir"]) == pytest.approx(alone["jax"], abs=1e-5)


@pytest.mark.slurm
def test_torch_on_both_clusters_by_site_alone(
    clusters: Path, pit: Pit, dataset: str, request_file: Callable[..., str], alone: dict[str, list[float]]
) -> None:
    """The same request runs on alpha and on beta, with the same losses as one process."""
    wanted = request_file("torch")
    for site in ("alpha", "beta"):
        run = records(pit("launch", "run", wanted, "--site", site, "--data", f"demo={dataset}", "--wait"))[-1]
        assert (run["site"], run["state"], run["nodes"]) == (site, "COMPLETED", 4)
        assert losses(run["run_dir"]) == pytest.approx(alone["torch"], abs=1e-5)


@pytest.mark.slurm
def test_a_rendered_script_runs_by_hand(clusters: Path, pit: Pit, tmp_path: Path) -> None:
    """What `script render` prints, given to sbatch, starts ranks that know their place and each other."""
    words = ["echo $PIT_RANK/$PIT_WORLD_SIZE $MASTER_ADDR:$MASTER_PORT"]
    made = pit("script", "render", "train", "--site", "beta", "--nodes", "2", "--tasks-per-node", "2", "--time", "2m",
               "--framework", "torch", "--", "bash", "-c", *words)  # fmt: skip
    (tmp_path / "job.sh").write_text(made.stdout)
    done = pit("psbatch", "--site", "beta", "--parsable", "--wait", "job.sh", PIT_PYTHON=sys.executable)
    assert done.returncode == 0, done.stderr
    attempt = tmp_path / "runs" / done.stdout.strip() / "attempts" / "0"
    said = [(attempt / "logs" / f"{rank}.out").read_text().split() for rank in range(4)]
    assert [line[0] for line in said] == ["0/4", "1/4", "2/4", "3/4"]
    assert len({line[1] for line in said}) == 1


@pytest.mark.slurm
@pytest.mark.parametrize("site", ["local", "alpha"])
def test_cancel_ends_a_run(clusters: Path, pit: Pit, tmp_path: Path, site: str) -> None:
    """A cancelled run is CANCELLED, cancelling again is no error, and its ranks are gone."""
    (tmp_path / "long.toml").write_text('name = "long"\ncommand = "exec sleep 287"\nnodes = 2\ntime = "10m"\n')
    run = records(pit("launch", "run", "long.toml", "--site", site))[-1]
    assert run["state"] in ("PENDING", "RUNNING", "UNKNOWN")
    pids = ranks_of(run["run_dir"], 2)
    for _ in range(2):
        records(pit("launch", "cancel", run["run_dir"]))
    deadline = time.monotonic() + 60
    while records(pit("launch", "show", run["run_dir"]))[-1]["state"] != "CANCELLED":
        assert time.monotonic() < deadline
        time.sleep(1)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def ranks_of(run_dir: str, count: int) -> list[int]:
    """Process ids of the run's ranks, once all have started."""
    folder = Path(run_dir) / "attempts" / "0" / "ranks"
    deadline = time.monotonic() + 60
    while len(list(folder.glob("*.json"))) < count:
        assert time.monotonic() < deadline, "the ranks did not start"
        time.sleep(0.3)
    return [json.loads(path.read_text())["pid"] for path in folder.glob("*.json")]


@pytest.mark.slurm
def test_ranks_may_end_at_different_times(clusters: Path, pit: Pit, tmp_path: Path) -> None:
    """A rank that is done first waits for the others; the site's own limit (srun --wait) does not end them."""
    text = 'name = "uneven"\ncommand = "test $PIT_RANK = 1 || sleep 8"\nnodes = 2\ntime = "5m"\n'
    (tmp_path / "uneven.toml").write_text(text)
    run = records(pit("launch", "run", "uneven.toml", "--site", "alpha", "--wait"))[-1]
    assert (run["state"], run["exit_code"]) == ("COMPLETED", 0)
    assert " --wait=0 " in (Path(run["run_dir"]) / "script.sbatch").read_text()


def test_the_rank_that_failed_is_the_one_shown(pit: Pit, tmp_path: Path) -> None:
    """After a failure, the message names the rank, and `logs` without a rank is its log."""
    text = 'name = "crash"\ncommand = "test $PIT_RANK = 0 && sleep 60; echo boom of $PIT_RANK; exit 9"\nnodes = 2\n'
    (tmp_path / "crash.toml").write_text(text)
    done = pit("launch", "run", "crash.toml", "--site", "local", "--wait")
    assert done.returncode == 1
    assert "rank 1 on" in done.stderr
    assert "ended first, with 9" in done.stderr
    assert "boom of 1" in pit("launch", "logs", json.loads(done.stdout)["run_dir"]).stdout


@pytest.mark.slurm
def test_list_is_of_one_site_and_asks_once(clusters: Path, pit: Pit, tmp_path: Path) -> None:
    """Runs of another site in the same folder are not listed, a failed run says so, a broken folder hides nothing."""
    runs = {"PIT_RUNS": str(tmp_path / "runs")}
    (tmp_path / "bad.toml").write_text('name = "bad"\ncommand = "exit 3"\ntime = "2m"\n')
    for site in ("alpha", "beta"):
        assert pit("launch", "run", "bad.toml", "--site", site, "--wait", **runs).returncode == 1
    (tmp_path / "runs" / "broken").mkdir()
    (tmp_path / "runs" / "broken" / "plan.json").write_text("{}")
    done = pit("launch", "list", "--site", "alpha", **runs)
    assert done.returncode == 5
    (row,) = [json.loads(line) for line in done.stdout.splitlines()]
    assert (row["site"], row["state"], row["exit_code"]) == ("alpha", "FAILED", 3)


@pytest.mark.slurm
def test_colliding_jobs_stay_apart(clusters: Path, repo: Path) -> None:
    """A sample of the campaign in perf/: two jobs that JAX's own rule sends to one port both end right."""
    bench = repo / "perf" / "bench_launch_collisions.py"
    done = subprocess.run([sys.executable, str(bench), "--pairs", "1"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["case"].startswith("1 of 1 colliding pairs right")
