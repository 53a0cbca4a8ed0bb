"""A real slurmctld: what is asked of it, and what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from run_maker import add_attempt, make_run
from test_board import cycle

from pitools.monitor.export import runs
from pitools.monitor.export.state import RunMark, WorkerState
from pitools.monitor.rules.generate import rules_text
from pitools.monitor.rules.schema import load_slos
from pitools.site.load import load_site
from pitools.site.schema import Site

pytestmark = pytest.mark.slurm


@pytest.fixture
def alpha(clusters: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """The site alpha, with an array of held tasks, and its node alpha02 drained by `pit node drain`."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("SLURM_CONF", str(clusters / "alpha" / "slurm.conf"))
    tmp_path.chmod(0o700)
    argv = ["sbatch", "--parsable", "--hold", "-A", "lab", "--array=0-2", "-o", "/dev/null", "--wrap=true"]
    job_id = run(*argv).strip()
    reason = "pit node [alpha02-20261127000000] mounts: /data is not mounted"
    run("scontrol", "update", "nodename=alpha02", "state=drain", f"reason={reason}")
    yield load_site("alpha")
    run("scontrol", "update", "nodename=alpha02", "state=resume")
    run("scancel", job_id)


def run(*argv: str) -> str:
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout


def requests() -> Counter[str]:
    """The requests that slurmctld has answered, by type, without those for this."""
    text = run("sdiag").partition("by message type")[2].partition("by user")[0]
    counts = re.findall(r"(REQUEST_\w+_INFO\w*)\s+\(.*?\) count:(\d+)", text)
    return Counter({name: int(count) for name, count in counts if name != "REQUEST_STATS_INFO"})


def test_a_cycle_makes_at_most_two_requests(alpha: Site) -> None:
    """Jobs, nodes, the fabric, and all again: by slurmctld's own count."""
    made = []
    for _ in range(5):
        before = requests()
        cycle(alpha)
        made.append(requests() - before)
    assert all(sum(one.values()) <= 2 for one in made), made
    assert sum(made, Counter())["REQUEST_JOB_INFO"] >= 2


def test_a_look_at_runs_asks_accounting_alone(alpha: Site, tmp_path: Path) -> None:
    """The allocation of a job is sacct's, whatever its run's folder says, and slurmctld sees no request for it."""
    job_id = run("sbatch", "--parsable", "-A", "lab", "-o", "/dev/null", "--wrap=sleep 1").strip()
    site = msgspec.structs.replace(alpha, paths=msgspec.structs.replace(alpha.paths, runs=str(tmp_path / "runs")))
    run_dir = make_run(tmp_path / "runs", nodes=100_000, job_id=job_id)
    add_attempt(run_dir, 100, None, job_id=job_id, nodes=100_000)
    before, allocated_s, looks = requests(), 0.0, 0
    while allocated_s < 1 and looks < 100:  # slurmdbd hears of it when slurmctld has time
        time.sleep(0.2)
        _, state = runs.query_runs(site, WorkerState(), None)
        allocated_s, looks = state.runs.get(run_dir.name, RunMark()).allocated_s, looks + 1
    assert requests() == before
    assert 1 <= allocated_s < 1000


def test_what_a_cluster_says(alpha: Site) -> None:
    """Held tasks and their reason, and the cause of a drain."""
    found = cycle(alpha, times=4)
    assert found["pit_pending_reason_jobs", "alpha", "JobHeldUser"] >= 3
    # A node that was resumed a moment ago does not respond yet: it counts as down.
    assert sum(found.get(("pit_partition_nodes", "alpha", "train", one), 0) for one in ("drained", "down")) >= 1
    assert not [key for key in found if key[0] == "pit_queue_age_seconds"]
    assert {found["pit_collector_success", "alpha", one] for one in ("jobs", "nodes", "topology")} == {1}


def test_each_runbook_works_beside_a_service(alpha: Site, repo: Path, tmp_path: Path) -> None:
    """As it is pasted into a shell, while an exporter has the site: it ends well, or with a finding (1)."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "pit").write_text(f'#!/bin/sh\nPYTHONPATH={repo} exec {sys.executable} -m pitools "$@"\n')
    (tmp_path / "pit").chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    runbooks = set(re.findall("runbook: (.*)", rules_text(load_slos())))
    argv = ["pit", "monitor", "export", "--site", "alpha", "--listen", "127.0.0.1:0"]
    codes = {}
    with subprocess.Popen(argv, env=env, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as service:
        try:
            assert service.stderr
            assert "serving metrics" in service.stderr.readline()
            for runbook in [*runbooks, second := "pit monitor export --site alpha --textfile x.prom"]:
                command = ["sh", "-c", runbook.replace("{{ $labels.cluster }}", "alpha")]
                codes[runbook] = subprocess.run(command, env=env, cwd=tmp_path, check=False).returncode
        finally:
            service.terminate()
    assert (codes.pop(second), (tmp_path / "x.prom").exists()) == (75, False)
    assert set(codes.values()) <= {0, 1}, codes
    assert len(codes) >= 4
