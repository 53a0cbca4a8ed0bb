"""A policy on a real slurmdbd: imported, changed, killed, undone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CHANGE = """
[sites.alpha.tiers.pitprobe]
grace_time = "00:05:00"
preempt_mode = "REQUEUE"
flags = ["denyonlimit"]
[sites.alpha.tiers.pitprobe2]
preempts = ["pitprobe"]
[sites.alpha.tiers.pitprobe3]
preempts = ["pitprobe", "pitprobe2"]
[sites.alpha.teams.pitprobe]
description = "A Probe"
tiers = ["normal", "pitprobe"]
default_tier = "pitprobe"
users = ["pitprobe1", "pitprobe2"]
[sites.alpha.teams.pitprobe.members.pitprobe1.partitions.train]
max_jobs = 3
"""


@pytest.mark.slurm
def test_policy_on_a_real_database(clusters: Path, as_root: None, tmp_path: Path) -> None:
    """The import asks for no change; a killed run is finished by the next; undone, sacctmgr prints what it did.

    Lists of preempted tiers become shorter, of which one is emptied.
    """
    conf = {"SLURM_CONF": str(clusters / "alpha" / "slurm.conf")}
    env = {**os.environ, **conf, "XDG_STATE_HOME": str(tmp_path / "state")}
    argv = [sys.executable, "-m", "pitools", "tenancy"]

    def tenancy(*words: str, code: int = 0) -> list[dict[str, Any]]:
        done = subprocess.run([*argv, *words], env=env, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()] if "import" not in words else [{"": done.stdout}]

    def shown() -> set[str]:
        texts = [
            subprocess.run(
                ["sacctmgr", "-P", "show", *what], env=env, capture_output=True, text=True, check=True
            ).stdout
            for what in (["qos"], ["assoc"], ["account", "withcoord"], ["user", "withassoc"])
        ]
        return set("".join(texts).splitlines())

    before = shown()
    policy, changed = tmp_path / "policy.toml", tmp_path / "changed.toml"
    policy.write_text(tenancy("import", "--site", "alpha")[0][""])
    assert tenancy("plan", str(policy)) == []
    changed.write_text(policy.read_text() + CHANGE)
    planned = tenancy("plan", str(changed))
    with subprocess.Popen([*argv, "run", str(changed)], env=env, stdout=subprocess.PIPE) as run:
        assert run.stdout
        first = json.loads(run.stdout.readline())
        run.send_signal(signal.SIGKILL)
    finished = tenancy("run", str(changed))
    assert {row["change"] for row in planned} == {row["change"] for row in [first, *tenancy("history")]}
    assert tenancy("plan", str(changed)) == []
    changed.write_text(changed.read_text().replace('["pitprobe"]', "[]").replace('"pitprobe", ', ""))
    shortened = tenancy("run", str(changed))
    assert {row["key"][1] for row in shortened} == {"pitprobe2", "pitprobe3"}
    for run_id in dict.fromkeys(row["run"] for row in [*shortened, *finished, first]):
        tenancy("run", "--undo", run_id)
    assert shown() == before
