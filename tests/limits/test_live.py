"""The judgement against a slurmctld that runs now."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slurm
@pytest.mark.slow
def test_a_slurmctld_decides_the_same_now(clusters: Path, repo: Path, as_root: None) -> None:
    """30 random pairs of policy and job, on a slurmctld of their own."""
    argv = [sys.executable, "-m", "perf.tenancy.bench_limits", "--quick"]
    done = subprocess.run(argv, cwd=repo, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["ratio"] >= 0.99
