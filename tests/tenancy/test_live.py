"""Tenancy on the development clusters: who changed what, and what may run, as the real slurmctld has it."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
Pit = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def slurm(clusters: Path) -> Iterator[Callable[..., str]]:
    """Runs a command of Slurm on alpha; in the end the limits and jobs of these tests are gone."""
    env = {**os.environ, "SLURM_CONF": str(clusters / "alpha" / "slurm.conf")}

    def call(*argv: str) -> str:
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=True)
        return done.stdout.strip()

    yield call
    call("scancel", "--name=tenancy")
    call("sacctmgr", "-i", "modify", "qos", "high", "set", "maxtrespu=cpu=-1")
    call("sacctmgr", "-i", "modify", "account", "lab", "set", "grptres=cpu=-1")


def becomes(slurm: Callable[..., str], job: str, *wanted: str) -> bool:
    """Whether a job gets to one of these states, with its reason."""
    deadline = time.monotonic() + 90
    while (state := slurm("squeue", "-h", "-j", job, "-t", "all", "-o", "%T %r")) not in wanted:
        if time.monotonic() > deadline:
            pytest.fail(f"{state} (expected {' or '.join(wanted)})")
        time.sleep(0.5)
    return True


def test_show_says_what_slurmctld_then_does(pit: Pit, slurm: Callable[..., str]) -> None:
    """A job of as many CPUs as it says starts; one of one more pends, for the reason that it says."""
    slurm("sacctmgr", "-i", "modify", "qos", "high", "set", "maxtrespu=cpu=10")
    slurm("sacctmgr", "-i", "modify", "account", "lab", "set", "grptres=cpu=20")
    batch = ("sbatch", "--parsable", "-J", "tenancy", "-A", "lab", "-p", "train", "-t", "10", "-o", "/dev/null")
    first = slurm(*batch, "--qos=high", "-n", "4", "--wrap", "sleep 60")
    assert becomes(slurm, first, "RUNNING None")
    done = pit("tenancy", "show", "root", "--site", "alpha")
    rows = {(row["qos"], row["account"], row["partition"]): row for row in map(json.loads, done.stdout.splitlines())}
    high, normal = rows["high", "lab", "train"], rows["normal", "lab", "train"]
    assert [(row["now"], row["ever"], row["reason"]) for row in (high, normal)] == [
        (6, 10, "QOSMaxCpuPerUserLimit"),
        (16, 20, "AssocGrpCpuLimit"),
    ]
    for row in (high, normal):
        fits, too_large = (
            slurm(*batch, f"--qos={row['qos']}", "-n", str(row["now"] + more), "--wrap", "true") for more in (0, 1)
        )
        assert becomes(slurm, too_large, f"PENDING {row['reason']}")
        assert becomes(slurm, fits, "RUNNING None", "COMPLETING None", "COMPLETED None")


def test_check_names_who_made_it_differ(pit: Pit, slurm: Callable[..., str], tmp_path: Path) -> None:
    """After a change by hand: the object, policy → site, and who; exit 1."""
    policy = tmp_path / "policy.toml"
    policy.write_text(pit("tenancy", "import", "--site", "alpha").stdout)
    slurm("sacctmgr", "-i", "modify", "account", "lab", "set", "grptres=cpu=20")
    done = pit("tenancy", "check", str(policy), "--site", "alpha")
    (drift,) = (row for row in map(json.loads, done.stdout.splitlines()) if row["kind"] == "drift")
    assert (done.returncode, drift["object"]) == (1, "team lab")
    assert drift["message"].startswith("grp_tres cpu=20 (root at ")
    assert drift["changes"][0]["fields"] == ["grp_tres"]
