"""The main job, end to end, as a user types it: ingest, stage, and train on one machine and on a real Slurm."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pitools.run import steps
from tests.test_recipes import follow

Pit = Callable[..., subprocess.CompletedProcess[str]]
PIT = str(Path(sys.executable).with_name("pit"))
STEPS = 30


def records(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def losses(run_dir: str, rank: int = 0) -> list[float]:
    return [step.loss for step in steps.read_step_log(Path(run_dir) / "attempts" / "0" / "steps" / f"{rank}.jsonl")]


def example(repo: Path, framework: str, **changed: Any) -> str:
    """An example request with fewer steps, and single keys changed."""
    text = (repo / "scripts" / "examples" / f"bc_{framework}.toml").read_text()
    text = re.sub(r"(?m)^steps = \d+$", f"steps = {STEPS}", text)
    lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in changed.items())
    return lines + "\n".join(line for line in text.splitlines() if line.split(" ")[0] not in changed)


@pytest.fixture(scope="module")
def recording(bridge: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real recording, alone in a folder."""
    path = tmp_path_factory.mktemp("recordings") / "bridge.hdf5"
    path.symlink_to(bridge)
    return path


@pytest.fixture(scope="module")
def dataset(recording: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The recording, ingested: the same version as the README's pipelines make of it."""
    root = tmp_path_factory.mktemp("datasets")
    argv = [PIT, "dataset", "ingest", str(recording), "--to", str(root)]
    done = subprocess.run([*argv, "--name", "demo"], capture_output=True, text=True, check=False)
    return str(records(done)[-1]["path"])


@pytest.fixture(scope="module")
def alone(repo: Path, dataset: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """Losses of each framework's loop in one process, without any launcher, with the example's arguments."""
    loops = {}
    for framework in ("jax", "torch"):
        attempt = tmp_path_factory.mktemp(framework)
        args = tomllib.loads((repo / "scripts" / "examples" / f"bc_{framework}.toml").read_text())["args"]
        code = f"from pitools.train.{framework}_bc import main; main(**{ {**args, 'steps': STEPS} })"
        env = {**os.environ, "PIT_DATA_DEMO": dataset, "PIT_ATTEMPT_DIR": str(attempt)}
        argv = [sys.executable, "-c", code]
        loops[framework] = attempt, subprocess.Popen(argv, env=env, stdout=subprocess.DEVNULL)
    assert {framework: loop.wait(200) for framework, (_, loop) in loops.items()} == {"jax": 0, "torch": 0}
    return {
        framework: [step.loss for step in steps.read_step_log(attempt / "steps" / "0.jsonl")]
        for framework, (attempt, _) in loops.items()
    }


# Runs that mostly wait, for Slurm or for their own sleep: name and site → what they are.
SMALL = {
    ("uneven", "alpha"): 'command = "test $PIT_RANK = 1 || sleep 8"\nnodes = 2\ntime = "5m"\n',
    ("bad", "alpha"): 'command = "exit 3"\ntime = "2m"\n',
    ("bad", "beta"): 'command = "exit 3"\ntime = "2m"\n',
}


class Small:
    """Runs of SMALL, begun together and waited for one by one. runs: where their folders are."""

    def __init__(self, folder: Path) -> None:
        self.runs = folder / "runs"
        self.begun: dict[tuple[str, str], subprocess.Popen[str]] = {}
        for (name, site), text in SMALL.items():
            path = folder / f"{name}.toml"
            path.write_text(f'name = "{name}"\n{text}')
            argv = [PIT, "launch", "run", str(path), "--site", site, "--wait"]
            env = {**os.environ, "PIT_RUNS": str(self.runs)}
            pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            self.begun[name, site] = subprocess.Popen(argv, cwd=folder, env=env, **pipes)

    def ended(self, name: str, site: str) -> subprocess.CompletedProcess[str]:
        process = self.begun[name, site]
        output = process.communicate(timeout=120)
        return subprocess.CompletedProcess(process.args, process.returncode, *output)


@pytest.fixture(scope="module")
def small(clusters: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Small]:
    """The small runs, which go on beside what takes time; their jobs have ended with the module."""
    created = Small(tmp_path_factory.mktemp("small"))
    yield created
    for process in created.begun.values():
        if process.stdout and not process.stdout.closed:
            process.communicate(timeout=120)


class Pipelines(NamedTuple):
    """What the README's pipelines printed, and their runs; torch: the one on beta, and the same request on alpha."""

    said: str
    jax: dict[str, Any]
    torch: list[dict[str, Any]]


@pytest.fixture(scope="module")
def pipelines(small: Small, recording: Path, repo: Path, tmp_path_factory: pytest.TempPathFactory) -> Pipelines:
    """The README's own pipelines, in a checkout with one real recording; while the second runs, so does its request
    on the other cluster."""
    folder = tmp_path_factory.mktemp("pipelines")
    (folder / "scripts" / "examples").mkdir(parents=True)
    for path in (repo / "scripts").iterdir():
        if path.name != "examples":
            (folder / "scripts" / path.name).symlink_to(path)
    # Odd nodes are under leaf1 and even ones under leaf2: the order is the tree's, not the names'.
    (folder / "scripts/examples/bc_jax.toml").write_text(example(repo, "jax", nodelist="alpha[01-04]"))
    (folder / "scripts/examples/bc_torch.toml").write_text(example(repo, "torch", nodes=2))
    (folder / "recordings").symlink_to(recording.parent)
    # The submitter's own default site must not reach the job: its order is of the fabric that it runs on.
    env = {"PIT_RUNS": str(folder / "runs"), "PIT_SITE": "beta", "XDG_STATE_HOME": str(folder / "state")}
    lines = follow(repo, folder, "README.md", 0, **env)
    jax = [json.loads(line) for line in lines.splitlines() if '"run_dir"' in line][-1]
    argv = [PIT, "launch", "run", "scripts/examples/bc_torch.toml", "--site", "alpha", "--data", "demo=datasets/demo"]
    with subprocess.Popen(
        [*argv, "--wait"], cwd=folder, env={**os.environ, **env}, stdout=subprocess.PIPE, text=True
    ) as process:
        lines += follow(repo, folder, "README.md", 1, 2, **env)
        target = process.communicate(timeout=240)[0]
    torch = [json.loads(text.splitlines()[-1]) for text in ((folder / "run.jsonl").read_text(), target)]
    return Pipelines(lines, jax, torch)


def test_two_processes_here_train_as_one(
    pit: Pit, repo: Path, dataset: str, alone: dict[str, list[float]], tmp_path: Path
) -> None:
    """On the site `local` the loss falls, and every step's loss is that of one process to 1e-5."""
    (tmp_path / "jax.toml").write_text(example(repo, "jax", nodes=2))
    run = records(pit("launch", "run", "jax.toml", "--site", "local", "--data", f"demo={dataset}", "--wait"))[-1]
    assert (run["state"], run["exit_code"]) == ("COMPLETED", 0)
    assert losses(run["run_dir"]) == pytest.approx(alone["jax"], abs=1e-5)
    assert losses(run["run_dir"], 1) == losses(run["run_dir"])
    assert losses(run["run_dir"])[-1] < 0.8 * losses(run["run_dir"])[0]
    summary = records(pit("launch", "show", run["run_dir"], "--steps"))[-1]
    assert (summary["ranks"], summary["steps"]) == (2, STEPS)
    assert "step 0 loss" in pit("launch", "logs", run["run_dir"], "--rank", "0").stdout


@pytest.mark.slurm
def test_the_three_pipelines(pipelines: Pipelines) -> None:
    """The README's own pipelines, as they are written."""
    assert '"site":"alpha","job_id"' in pipelines.said
    assert "LAST LOSS" in pipelines.said
    assert pipelines.said.splitlines()[-1].endswith("job.sh")


@pytest.mark.slurm
def test_four_nodes_of_two_leaves(clusters: Path, pipelines: Pipelines, alone: dict[str, list[float]]) -> None:
    """On alpha: ranks follow the leaves, each node reads its own verified copy, and the losses are one process's."""
    run = pipelines.jax
    attempt = Path(run["run_dir"]) / "attempts" / "0"
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
def test_torch_on_both_clusters_by_site_alone(pipelines: Pipelines, alone: dict[str, list[float]]) -> None:
    """The same request runs on alpha and on beta, with the same losses as one process."""
    for site, run in zip(("beta", "alpha"), pipelines.torch, strict=True):
        assert (run["site"], run["state"], run["nodes"]) == (site, "COMPLETED", 2)
        assert losses(run["run_dir"]) == pytest.approx(alone["torch"], abs=1e-5)


@pytest.mark.slurm
def test_a_rendered_script_runs_by_hand(clusters: Path, pit: Pit, tmp_path: Path) -> None:
    """What `script render` prints, given to sbatch, starts ranks that know their place and each other."""
    words = ["echo $PIT_RANK/$PIT_WORLD_SIZE $MASTER_ADDR:$MASTER_PORT"]
    result = pit(
        "script",
        "render",
        "train",
        "--site",
        "beta",
        "--nodes",
        "2",
        "--tasks-per-node",
        "2",
        "--time",
        "2m",
        "--framework",
        "torch",
        "--",
        "bash",
        "-c",
        *words,
    )
    (tmp_path / "job.sh").write_text(result.stdout)
    done = pit("psbatch", "--site", "beta", "--parsable", "--wait", "job.sh", PIT_PYTHON=sys.executable)
    assert done.returncode == 0, done.stderr
    attempt = tmp_path / "runs" / done.stdout.strip() / "attempts" / "0"
    output = [(attempt / "logs" / f"{rank}.out").read_text().split() for rank in range(4)]
    assert [line[0] for line in output] == ["0/4", "1/4", "2/4", "3/4"]
    assert len({line[1] for line in output}) == 1


@pytest.mark.slurm
@pytest.mark.parametrize("site", ["local", "alpha"])
def test_cancel_ends_a_run(clusters: Path, pit: Pit, tmp_path: Path, site: str) -> None:
    """A cancelled run is CANCELLED, cancelling again is no error, and its ranks are gone."""
    (tmp_path / "long.toml").write_text('name = "long"\ncommand = "exec sleep 287"\nnodes = 2\ntime = "10m"\n')
    run = records(pit("launch", "run", "long.toml", "--site", site, PIT_RUNS=str(tmp_path / "runs")))[-1]
    assert run["state"] in ("PENDING", "RUNNING", "UNKNOWN")
    pids = ranks_of(run["run_dir"], 2)
    for _ in range(2):
        records(pit("launch", "cancel", run["run_dir"]))
    deadline = time.monotonic() + 60
    while records(pit("launch", "show", run["run_dir"]))[-1]["state"] != "CANCELLED":
        assert time.monotonic() < deadline
        time.sleep(1)
    while site == "alpha" and time.monotonic() < deadline and any(Path(f"/proc/{pid}").exists() for pid in pids):
        time.sleep(0.1)  # Slurm calls a job CANCELLED as soon as its end has begun
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.mark.slurm
@pytest.mark.parametrize("site", ["local", "alpha"])
def test_under_a_lax_umask_logs_are_their_owner_s(clusters: Path, pit: Pit, tmp_path: Path, site: str) -> None:
    """Nobody else may change what we, Slurm or the job's shell write; what the program writes has the user's umask."""
    command = "umask; echo $SLURM_UMASK; touch $PIT_RUN_DIR/checkpoints/mine; exit 3"
    (tmp_path / "lax.toml").write_text(f'name = "lax"\ncommand = "{command}"\ntime = "2m"\n')
    done = pit("launch", "run", "lax.toml", "--site", site, "--wait", PIT_RUNS=str(tmp_path / "runs"), umask=0o002)
    assert done.returncode == 1, done.stderr
    run_dir = Path(json.loads(done.stdout.splitlines()[-1])["run_dir"])
    (log,) = (run_dir / "attempts" / "0" / "logs").glob("0.out")
    assert log.read_text().split("\n").count("0002") == (1 if site == "local" else 2)
    paths = [path for path in run_dir.rglob("*") if not path.is_symlink() and path.stat().st_mode & 0o022]
    assert [str(path.relative_to(run_dir)) for path in paths] == ["checkpoints/mine"]


def ranks_of(run_dir: str, count: int) -> list[int]:
    """Process ids of the run's ranks, once all have started."""
    folder = Path(run_dir) / "attempts" / "0" / "ranks"
    deadline = time.monotonic() + 60
    while len(list(folder.glob("*.json"))) < count:
        assert time.monotonic() < deadline, "the ranks did not start"
        time.sleep(0.3)
    return [json.loads(path.read_text())["pid"] for path in folder.glob("*.json")]


@pytest.mark.slurm
def test_ranks_may_end_at_different_times(small: Small) -> None:
    """A rank that is done first waits for the others; the site's own limit (srun --wait) does not end them."""
    run = records(small.ended("uneven", "alpha"))[-1]
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
def test_list_is_of_one_site_and_asks_once(small: Small, pit: Pit, tmp_path: Path) -> None:
    """Runs of another site in the same folder are not listed, a failed run says so, a broken folder hides nothing."""
    (tmp_path / "runs").mkdir()
    for site in ("alpha", "beta"):
        end = small.ended("bad", site)
        assert end.returncode == 1
        run_dir = Path(json.loads(end.stdout.splitlines()[-1])["run_dir"])
        (tmp_path / "runs" / run_dir.name).symlink_to(run_dir)
    (tmp_path / "runs" / "broken").mkdir()
    (tmp_path / "runs" / "broken" / "plan.json").write_text("{}")
    done = pit("launch", "list", "--site", "alpha", PIT_RUNS=str(tmp_path / "runs"))
    assert done.returncode == 5
    (row,) = [json.loads(line) for line in done.stdout.splitlines()]
    assert (row["site"], row["state"], row["exit_code"]) == ("alpha", "FAILED", 3)


@pytest.mark.slurm
@pytest.mark.slow
def test_colliding_jobs_stay_apart(clusters: Path, repo: Path) -> None:
    """A sample of the campaign in perf/: two jobs that JAX's own rule sends to one port both end right."""
    argv = [sys.executable, "-m", "perf.launch.bench_collisions", "--pairs", "1"]
    done = subprocess.run(argv, cwd=repo, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["case"].startswith("1 of 1 colliding pairs right")
