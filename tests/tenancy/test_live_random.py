"""Random policies on a real slurmdbd of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slurm
@pytest.mark.slow
def test_random_policies_on_a_real_database(slurm_installed: None, as_root: None, repo: Path, tmp_path: Path) -> None:
    """20 random policies, on a database of their own."""
    root, devcluster = f"/var/tmp/pit-tenancy-{os.getpid()}", repo / "scripts" / "devcluster"
    options = ["--root", root, "--clusters", "alpha", "--nodes", "1", "--base-port", "21700"]
    try:
        subprocess.run([devcluster, "up", *options], check=True, capture_output=True)
        env = {**os.environ, "PIT_SITE_PATH": f"{root}/sites"}
        bench = [sys.executable, "-m", "perf.tenancy.bench_policies", "--quick"]
        done = subprocess.run(bench, cwd=repo, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    finally:
        subprocess.run([devcluster, "down", "--root", root], check=True, capture_output=True)
