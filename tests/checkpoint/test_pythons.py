"""What one Python saved another restores, bit by bit: all of which scripts/venv has made an environment here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import platform
import sys
from pathlib import Path
from pitools.checkpoint.checkpointer import Checkpointer
from tests.checkpoint.adapters import rank_process

what, framework, *folders = sys.argv[1:]
if framework == "jax":
    from pitools.checkpoint.adapters.orbax_adapter import OrbaxAdapter as Adapter
    state, check = rank_process.jax_state, rank_process.check_jax
else:
    from pitools.checkpoint.adapters.dcp_adapter import DcpAdapter as Adapter
    state, check = rank_process.torch_state, rank_process.check_torch
for folder in folders:
    with Checkpointer(Path(folder), Adapter(), run="r") as checkpointer:
        if what == "save":
            checkpointer.save(7, state(7), {"position": 7}, {"python": platform.python_version()})
            continue
        found = checkpointer.restore(state(0))
        assert (found.step, found.loader_state) == (7, {"position": 7})
        check(found.state, 7)
        print(platform.python_version(), "restored", found.custom_metadata["python"])
"""


def run(python: Path, repo: Path, *argv: object) -> list[str]:
    """What the script said, in this interpreter."""
    words = [str(text) for text in (python, "-c", SCRIPT, *argv)]
    done = subprocess.run(words, cwd=repo, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_each_python_restores_what_each_saved(framework: str, repo: Path, tmp_path: Path) -> None:
    """Enums, paths and modules are pickled otherwise by some of them; nothing that is read may depend on it."""
    pythons = {}
    # scripts/venv leaves this file only where it has installed everything.
    others = [stamp.parent / "bin/python" for stamp in sorted(repo.glob(".venv-3.*[0-9]/pitools-*"))]
    for python in [Path(sys.executable), *others]:
        code = f"import {framework}, platform; print(platform.python_version())"
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=300, check=False)
        if done.returncode == 0:
            pythons.setdefault(done.stdout.strip(), python)
    if len(pythons) < 2:
        pytest.skip(f"{framework} is in one Python alone (PYTHON=/path/to/another scripts/venv data,jax,test,torch)")
    for version, python in pythons.items():
        run(python, repo, "save", framework, tmp_path / version)
    for version, python in pythons.items():
        result = run(python, repo, "restore", framework, *(tmp_path / other for other in pythons))
        assert result == [f"{version} restored {other}" for other in pythons]
