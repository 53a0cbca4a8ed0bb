"""The recipes of pitools/train/README.md run as they are written."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest


def test_the_recipes_run(repo: Path, tmp_path: Path) -> None:
    """By hand, launched, and as a copy: each trains to its last step."""
    pytest.importorskip("jax")
    pytest.importorskip("torch")
    blocks = re.findall(r"```sh\n(.*?)```", (repo / "pitools/train/README.md").read_text(), re.DOTALL)
    retained = {key: value for key, value in os.environ.items() if not key.startswith(("PIT_", "SLURM_"))}
    path = f"{Path(sys.executable).parent}{os.pathsep}{retained['PATH']}"
    env = {
        **retained,
        "PATH": path,
        "EXAMPLES": str(repo / "scripts/examples"),
        "PIT_RUNS": str(tmp_path / "runs"),
        "HOME": str(tmp_path),
        "JAX_PLATFORMS": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }

    def run(block: str) -> str:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, f"{block}\n{done.stdout}{done.stderr}"
        return done.stdout

    with ThreadPoolExecutor(2) as pool:  # all need the first one's dataset, and none another's end
        output = [run(blocks[0]), *pool.map(run, blocks[1:])]
    assert "step 199 loss" in output[0]
    last = json.loads(output[1])
    assert (last["schema"], last["step"], last["rank_samples"]) == ("pit.step/1", 99, 32)
    assert "step 199 loss" in output[2]
