"""Faults that are real, of this machine: `pit node check` finds each, and nothing without it.

What the controller makes of them on a real Slurm is in tests/cluster/test_node_faults.py.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.node.real_faults import FAULTS, why_not_here, with_fault, write_config


@pytest.mark.parametrize("name", FAULTS)
def test_pit_node_check_finds_a_real_fault(tmp_path: Path, as_root: None, name: str) -> None:
    """As a user types it: nothing while the machine is well; else exit 1, and the checks that are for it."""
    if reason := why_not_here(name):
        pytest.skip(reason)
    fault = FAULTS[name]
    config = write_config(fault, tmp_path, "")
    shutil.copy(shutil.which("sleep") or "", tmp_path / "slurmd")
    check = [sys.executable, "-m", "pitools", "node", "check", "--node", "n000", "--config", str(config)]
    with subprocess.Popen([tmp_path / "slurmd", "600"]) as slurmd:
        try:
            for state in ("well", "bad"):
                argv = with_fault(fault, state, tmp_path, slurmd.pid, *check)
                done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
                assert done.returncode == (state == "bad"), (done.stdout, done.stderr)
                findings = map(json.loads, done.stdout.splitlines())
                actions = {one["check"]: one["action"] for one in findings if one["state"] == "failed"}
                assert actions == (fault.actions if state == "bad" else {})
        finally:
            slurmd.kill()
