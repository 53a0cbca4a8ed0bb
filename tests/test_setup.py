"""scripts/venv installs what was asked for, for the interpreter that was named, and nothing else is used."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

# Stands for an interpreter: makes "environments" of itself, and notes what each is asked to do.
PYTHON = """#!/bin/sh
case "$*" in
  "-m venv --clear "*) mkdir -p "$4/bin" && cp "$0" "$4/bin/python" ;;
  *python_version*) echo 3.99.0 ;;
  *) echo "$@" >> "$0.log" ;;
esac
"""


@pytest.fixture
def checkout(repo: Path, tmp_path: Path) -> Path:
    for name in ("setup.cfg", "pyproject.toml", "pitools/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(repo / name, tmp_path / name)
    shutil.copytree(repo / "scripts", tmp_path / "scripts")
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    return tmp_path


def run(checkout: Path, python: Path | str, *argv: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": "/usr/bin:/bin", "HOME": str(checkout), "PYTHON": str(python), "PIP_NO_INDEX": "1"}
    return subprocess.run(argv, cwd=checkout, env=env, capture_output=True, text=True, check=False)


def test_a_named_interpreter_that_will_not_do_is_refused(checkout: Path) -> None:
    """No other takes its place, for whoever names one wants to know about that one."""
    done = run(checkout, "/nonexistent/python3.13", "scripts/venv", "data")
    assert (done.returncode, done.stdout) == (4, "")
    assert "/nonexistent/python3.13" in done.stderr


def test_quickstart_runs_in_the_environment_of_the_named_interpreter(checkout: Path) -> None:
    """Made of the lock, what builds packages too; and nothing is installed the second time."""
    for _ in range(2):
        assert run(checkout, checkout / "python", "scripts/quickstart").returncode == 0
    log = (checkout / ".venv-3.99.0" / "bin" / "python.log").read_text().splitlines()
    lock = "-m pip install --quiet --constraint scripts/locks/pinned.txt"
    job = "scripts/examples/main_job.py"
    build, install, *jobs = [line for line in log if line != "-m pip --version"]
    assert (build, jobs) == (f"{lock} setuptools", [job, job])
    assert install == f"{lock} --no-build-isolation --editable .[data,jax]"
