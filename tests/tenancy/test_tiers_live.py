"""Tiers on a real Slurm: an urgent run preempts scavengers, which save and go on later, and nobody else."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from perf.recover.fault_cluster import PIT
from perf.tenancy.tiers_cluster import TIERS, TierRun, Tiers, finish, preempted, wait_until

STEPS = 8

pytestmark = pytest.mark.slurm


class Alpha:
    """The cluster alpha, as `perf.tenancy.tiers_cluster` uses one."""

    name = "alpha"

    def __init__(self, pit: Callable[..., subprocess.CompletedProcess[str]], clusters: Path, work: Path) -> None:
        self.work, self.runs, self._pit = work, clusters / "runs" / f"tiers-{os.getpid()}", pit
        self._env = {**os.environ, "SLURM_CONF": str(clusters / "alpha" / "slurm.conf")}
        (work / "sites").mkdir()
        (work / "sites" / "alpha.toml").write_text(TIERS)

    def run(self, *argv: str, check: bool = True) -> str:
        if argv[0] == PIT:
            done = self._pit(*argv[1:], PIT_SITE_PATH=str(self.work / "sites"), PIT_RUNS=str(self.runs))
        else:
            done = subprocess.run(argv, env=self._env, capture_output=True, text=True, timeout=60, check=False)
        assert not check or done.returncode == 0, done.stderr
        return done.stdout

    def pit(self, *words: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.run(PIT, *words).splitlines()]


@pytest.fixture
def alpha(
    pit: Callable[..., subprocess.CompletedProcess[str]], clusters: Path, as_root: None, tmp_path: Path
) -> Iterator[Alpha]:
    """The cluster alpha with the QOS of the tiers."""
    cluster = Alpha(pit, clusters, tmp_path)
    with Tiers(cluster):
        yield cluster
    shutil.rmtree(cluster.runs, ignore_errors=True)


def undisturbed() -> dict[int, set[float]]:
    """Step → the loss of `light_loop`."""
    losses, loss = {}, 0.5
    for step in range(STEPS):
        loss = 3.7 * loss * (1 - loss)
        losses[step] = {loss}
    return losses


def test_an_urgent_run_preempts_one_scavenger_and_nobody_else(alpha: Alpha) -> None:
    """On a full partition: the one saves within its grace time, and goes on where it stopped; the rest see nothing."""
    earlier = preempted(alpha)
    runs = [
        TierRun(alpha, name, tier, nodes=nodes, steps=STEPS, save_every=STEPS, delay_s=0.1, hold_at=3)
        for name, tier, nodes in (("first", "scavenger", 3), ("second", "scavenger", 3), ("usual", "normal", 2))
    ]
    wait_until(alpha, lambda: all(run.steps() == 3 for run in runs), "all runs wait for us")
    jobs = [run.job_ids()[0] for run in runs]
    urgent = TierRun(alpha, "urgent", "urgent", nodes=3, steps=1)
    wait_until(alpha, lambda: urgent.steps() == 1, "the urgent run")
    (hit,) = preempted(alpha) - earlier
    assert hit in jobs[:2]
    finish([*runs, urgent])
    assert [run.verdict() for run in (*runs, urgent)] == ["succeeded"] * 4
    assert [run.losses() for run in runs] == [undisturbed()] * 3
    assert [run.repeated() for run in runs] == [0] * 3
    assert [run.causes() for run in runs] == [
        ["preempted", "succeeded"] if job == hit else ["succeeded"] for job in jobs
    ]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_way_to_preempt(repo: Path, clusters: Path, as_root: None) -> None:
    """JAX and torch requeued, cancelled and suspended; exempt; two urgent runs; one too big; an array; a ticket."""
    argv = [sys.executable, "-m", "perf.tenancy.bench_preemption"]
    done = subprocess.run(argv, cwd=repo, capture_output=True, text=True, timeout=1700, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
