"""A slow node of a run on Slurm is named, suspected and left out on trial; a regression of the cluster is confirmed."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from pitools.core import hostlist
from pitools.core.timestamps import now_rfc3339, to_rfc3339
from pitools.launch.plan import load_plan
from pitools.node import blames, spool
from pitools.node.types import NodeReport
from pitools.perf.regression.sources import point_of_run
from pitools.perf.regression.store import add_points

pytestmark = pytest.mark.slurm

Pit = Callable[..., subprocess.CompletedProcess[str]]

# Ranks that end each step together, as by a collective: by the machine's clock, from when all are there. `slow` names a
# node that needs longer.
LOOP = """
import os, time
from pathlib import Path
from pitools.run.steps import StepLog

attempt, rank = Path(os.environ["PIT_ATTEMPT_DIR"]), int(os.environ["PIT_RANK"])
nodes = (attempt / "hostfile").read_text().split()
own = [0.04 if node == Path("{slow}").read_text() else 0.02 for node in nodes]
(attempt / f"ready.{{rank}}").touch()
while len(ready := list(attempt.glob("ready.*"))) < len(nodes):
    time.sleep(0.01)
end = max(path.stat().st_mtime for path in ready) + 0.5
time.sleep(end - time.time())
log = StepLog(attempt / "steps", rank)
for step in range({steps}):
    began, end = end, end + max(own) + 0.002
    time.sleep(max(0, end - time.time()))
    log.write(step=step, loss=1, wall_s=end - began, input_s=0, compute_s=own[rank], comm_s=end - began - own[rank],
              rank_samples=1)
log.close()
"""
REQUEST = 'name = "waits"\ncommand = "python loop.py"\nnodes = 2\ntime = "5m"\n'


class Alpha:
    """Cluster alpha, with a folder that its nodes share and a spool; alpha02 is slow."""

    def __init__(self, folder: Path, pit: Pit, site_text: str) -> None:
        self.folder, self.runs, self._pit = folder, folder / "runs", pit
        for path in (folder / "spool", folder / "sites", folder / "code"):
            path.mkdir()
        blames.make_folder(folder / "spool")
        (folder / "node.toml").write_text(f'spool = "{folder}/spool"\n')
        (folder / "sites" / "alpha.toml").write_text(f'{site_text}\n[node]\nconfig = "{folder}/node.toml"\n')
        (folder / "slow").write_text("alpha02")
        (folder / "code" / "loop.py").write_text(LOOP.format(slow=folder / "slow", steps=60))
        (folder / "code" / "loop.toml").write_text(REQUEST)

    def call(self, *words: str, code: int = 0) -> tuple[list[dict[str, Any]], str]:
        sites, runs = str(self.folder / "sites"), str(self.runs)
        done = self._pit(*words, "--site", "alpha", PIT_SITE_PATH=sites, PIT_RUNS=runs)
        assert done.returncode == code, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()], done.stderr

    def run(self, *words: str) -> str:
        request = str(self.folder / "code" / "loop.toml")
        run_id: str = self.call("launch", "run", request, "--wait", *words)[0][0]["run_id"]
        return run_id

    def nodes(self, runs: Sequence[str]) -> list[set[str]]:
        return [set((self.runs / run / "attempts/0/hostfile").read_text().split()) for run in runs]


@pytest.fixture
def alpha(clusters: Path, dev_sites: Path, pit: Pit) -> Iterator[Alpha]:
    with tempfile.TemporaryDirectory(prefix="dca", dir="/var/tmp") as name:
        yield Alpha(Path(name), pit, (dev_sites / "alpha.toml").read_text())
        env = {**os.environ, "SLURM_CONF": str(clusters / "alpha" / "slurm.conf")}
        deadline = time.monotonic() + 60
        while "waits" in subprocess.check_output(["squeue", "-h", "-o", "%j"], env=env, text=True):
            assert time.monotonic() < deadline, "a repeated run goes on"
            time.sleep(0.5)


def test_a_slow_node_is_left_out_on_trial(alpha: Alpha) -> None:
    """The run's verdict is the slow node; `why` names it, the site suspects it, and runs without it are faster; each
    run of the trial gets its nodes, and ends."""
    spool.write_report(alpha.folder / "spool", NodeReport(node="alpha02", boot_id="b", checked_at=now_rfc3339()))
    run = alpha.run("--set", "nodelist=alpha[01-02]")
    assert "rank 1 on alpha02 is slow: its compute takes" in alpha.call("launch", "why", run)[1]
    (found,), said = alpha.call("perf", "stragglers", run, code=1)
    assert (found["node"], "alpha02: noted as suspected" in said) == ("alpha02", True), said
    (suspected,) = [each for each in alpha.call("node", "list")[0] if each.get("suspicion")]
    assert (suspected["node"], "slow-compute" in suspected["suspicion"]) == ("alpha02", True)
    (proposal, *_), _ = alpha.call("perf", "advise", run)
    assert (proposal["cause"], proposal["node"]) == ("straggler", "alpha02")
    assert proposal["changes"] == {"exclude": "alpha02", "nodelist": ""}
    (trial,), said = alpha.call("perf", "advise", run, "--verify", "--steps", "20")
    assert trial["verdict"] in ("as-predicted", "less", "more"), said
    assert trial["gain_low"] > 0.2
    assert alpha.nodes(trial["a_runs"]) == [{"alpha01", "alpha02"}] * len(trial["a_runs"])
    assert not any("alpha02" in nodes for nodes in alpha.nodes(trial["b_runs"]))


def test_a_regression_that_goes_on_is_confirmed(alpha: Alpha) -> None:
    """On the nodes of the first run after the step, against the points before it; exit 1."""
    store, run = alpha.folder / "perf.sqlite", alpha.run()
    point = point_of_run(alpha.runs / run)
    now = datetime.now(UTC)
    noise = 0.01 * np.random.default_rng(3).standard_normal(30)
    add_points(
        store,
        [
            msgspec.structs.replace(
                point,
                t=to_rfc3339(now - timedelta(days=8, hours=22 - night)),
                source=run if night == 22 else f"gone-{night}",
                value=(point.value if night >= 22 else point.value / 2) * (1 + noise[night]),
            )
            for night in range(30)
        ],
    )
    (verdict,), said = alpha.call("perf", "watch", str(store), "--confirm", code=1)
    assert (verdict["verdict"], verdict["changed"], verdict["rerun_low"] > 0.5) == ("regression", "cluster", True), said
    again = sorted(path.name for path in alpha.runs.glob("waits-again-after-*"))
    assert alpha.nodes(again) == alpha.nodes([run]) * len(again)
    assert {load_plan(alpha.runs / name).job.nodelist for name in again} == {hostlist.fold(alpha.nodes([run])[0])}
