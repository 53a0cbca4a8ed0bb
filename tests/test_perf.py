"""The benchmarks start on a fresh checkout: what they import is installed before it is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# Imports each benchmark as its interpreter does at its start. argv: names of the packages that are not installed there.
IMPORTS = """
import importlib, pathlib, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
pattern, *absent = sys.argv[1:]
sys.meta_path.insert(0, Absent())
for bench in sorted(pathlib.Path("perf").glob(pattern)):
    try:
        importlib.import_module(".".join(bench.with_suffix("").parts))
    except SystemExit as ended:
        if "scripts/devcluster up" not in str(ended):
            raise
    print(bench)
"""
# Stands for the interpreter of a new .venv-peers: tells what it is asked to do, and that it has no package yet.
PYTHON = """#!/bin/sh
echo "$@" >> "$0.log"
case "$1" in -I) shift 3; echo "$@" ;; esac
"""
ENTER = """
import pathlib, sys
from perf.loader import loader_peers
loader_peers.PEERS = pathlib.Path(sys.argv[1])
loader_peers.enter_peer_venv()
"""


def started(repo: Path, pattern: str, *absent: str) -> list[str]:
    argv = [sys.executable, "-c", IMPORTS, pattern, *absent]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=repo)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_each_starts_with_what_is_installed(repo: Path) -> None:
    """Of all extras that perf/run installs; peers are imported later, after they have been installed."""
    peers = ("torchx", "icechunk", "dvc", "s3fs", "boto3", "zarrs", "grain", "array_record", "streaming", "lerobot")
    benches = sorted(str(path.relative_to(repo)) for path in repo.glob("perf/*/bench_*.py"))
    assert started(repo, "*/bench_*.py", *peers) == benches


def test_those_of_the_loader_start_among_their_peers(repo: Path) -> None:
    """In .venv-peers there are the peers, and of ours what reading data needs."""
    absent = ("jax", "orbax", "av", "pyarrow", "matplotlib", "obstore", "hypothesis", "pytest")
    assert "perf/loader/bench_hot.py" in started(repo, "loader/bench_*.py", *absent)


def test_peers_are_installed_before_their_interpreter_is_entered(repo: Path, tmp_path: Path) -> None:
    """A benchmark's own first lines import them there, so that none of its functions could install them any more."""
    python = tmp_path / "peers" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON)
    python.chmod(0o755)
    (bench := tmp_path / "bench_x.py").write_text(ENTER)
    argv = [str(bench), str(tmp_path / "peers"), "--quick"]
    subprocess.run([sys.executable, *argv], check=True, env={**os.environ, "PYTHONPATH": str(repo)})
    requested, installed, entered = python.with_name("python.log").read_text().splitlines()
    assert requested.endswith("psutil pitools")
    assert installed.startswith("-m pip install")
    assert {"zarrs", "tensorstore", f"--editable={repo}[data]"} <= set(installed.split())
    assert entered.split() == argv


def test_a_benchmark_that_is_not_there_is_refused(repo: Path) -> None:
    """Before anything is installed; those that are there are named."""
    done = subprocess.run([str(repo / "perf" / "run"), "loader_hat"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "loader_hot" in done.stderr
