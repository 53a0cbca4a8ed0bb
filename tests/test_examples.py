"""The requests of scripts/examples/frameworks, with their frameworks: a rank is killed, and the run goes on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pitools.run import run_folder
from pitools.site.load import load_site

pytestmark = [pytest.mark.slow, pytest.mark.slurm, pytest.mark.timeout(1500)]

Pit = Callable[..., subprocess.CompletedProcess[str]]
# LeRobot asks for an older torch than this repository pins, and cannot be imported beside a newer transformers.
_LEROBOT = (
    "einops",
    "diffusers<0.36",
    "torchvision",
    "datasets",
    "jsonlines",
    "termcolor",
    "gymnasium",
    "deepdiff",
    "av",
)
PACKAGES = {
    ".venv-examples": ["flax", "optax", "lightning", "transformers", "accelerate", "wandb", "tensorboard"],
    ".venv-lerobot": [
        "draccus==0.10.0",
        "accelerate",
        *_LEROBOT,
        "imageio",
        "opencv-python-headless",
        "pyserial",
        "huggingface_hub",
    ],
}
# Request → steps, what shows in attempt 1's output or step log that it continued, and its environment.
EXAMPLES = {
    "flax": (400, "", ".venv-examples"),
    "hf_trainer": (400, "checkpoint model loaded", ".venv-examples"),
    "lightning": (400, "Restor(ed|ing) ", ".venv-examples"),
    "lerobot_act": (40, "", ".venv-lerobot"),
}


def python_of(repo: Path, name: str) -> Path:
    """The interpreter of an environment with pitools and the packages of some examples; made at its first use."""
    python = repo / name / "bin" / "python"
    if not (repo / name / "ready").exists():
        pip: list[str | Path] = [python, "-m", "pip", "install", "--quiet"]
        subprocess.run([sys.executable, "-m", "venv", repo / name], check=True)
        pinned: list[str | Path] = ["--constraint", repo / "scripts" / "locks" / "pinned.txt"]
        subprocess.run([*pip, *pinned, "torch", "-e", f"{repo}[data,jax,torch]"], check=True)
        subprocess.run([*pip, *PACKAGES[name]], check=True)
        if name == ".venv-lerobot":
            subprocess.run([*pip, "--no-deps", "lerobot"], check=True)
        (repo / name / "ready").touch()
    return python


@pytest.fixture(scope="module")
def dataset(repo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    make: list[str | Path] = [
        sys.executable,
        repo / "scripts" / "examples" / "make_recording.py",
        folder / "reach.hdf5",
    ]
    subprocess.run([*make, "--episodes", "10"], check=True)
    ingest: list[str | Path] = [sys.executable, "-m", "pitools", "dataset", "ingest", folder / "reach.hdf5"]
    subprocess.run([*ingest, "--to", folder / "datasets", "--name", "reach"], check=True)
    return folder / "datasets" / "reach"


def launch(pit: Pit, repo: Path, name: str, venv: str, *words: str) -> Path:
    request = repo / "scripts" / "examples" / "frameworks" / f"{name}.toml"
    python = python_of(repo, venv)
    done = pit("launch", "run", str(request), "--site", "alpha", "--set", f"python={python}", *words, "--format", "tsv")
    assert done.returncode == 0, done.stderr
    return Path(load_site("alpha").paths.runs) / done.stdout.splitlines()[-1].split("\t")[0]


def has_saved(run_dir: Path) -> bool:
    """Whether the program has a checkpoint of its own, or of pitools."""
    return (run_dir / "progress").exists() or any((run_dir / "checkpoints").glob("step_*"))


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_continues_after_a_killed_rank(
    name: str, pit: Pit, repo: Path, dataset: Path, clusters: Path
) -> None:
    """Rank 1 is killed after the first checkpoint; the next attempt begins with it, and the run ends well."""
    steps, sign, venv = EXAMPLES[name]
    data = [] if name == "hf_trainer" else ["--data", f"demo={dataset}"]
    run_dir = launch(pit, repo, name, venv, "--set", f"steps={steps}", *data)
    deadline = time.monotonic() + 600
    while not has_saved(run_dir):
        assert time.monotonic() < deadline
        assert not (run_dir / "verdict.json").exists(), pit("launch", "why", str(run_dir)).stdout
        time.sleep(0.1)
    rank = run_folder.read_record(run_dir / "attempts" / "0" / "ranks" / "1.json", run_folder.RankRecord)
    assert rank is not None
    os.kill(rank.pid, signal.SIGKILL)
    done = pit("launch", "watch", str(run_dir))
    assert done.returncode == 0, done.stderr
    (run,) = run_folder.attempt_dirs(run_dir)[1:]
    if sign:
        assert re.search(sign, (run / "logs" / "0.out").read_text())
    else:
        first = (run / "steps" / "0.jsonl").read_text().splitlines()[0]
        assert '"step":0,' not in first


def test_one_tracker_s_run_over_all_attempts(pit: Pit, repo: Path, clusters: Path) -> None:
    """W&B, offline, has the id of the run in both attempts; TensorBoard has one log folder."""
    run_dir = launch(pit, repo, "wandb_tensorboard", ".venv-examples", "--wait")
    assert [path.name for path in run_folder.attempt_dirs(run_dir)] == ["0", "1"]
    offline = sorted(path.name for path in (run_dir / "wandb").glob("offline-run-*"))
    assert len(offline) == 2
    assert all(name.endswith(run_dir.name) for name in offline)
    assert len(list((run_dir / "tensorboard").glob("events.*"))) == 2
