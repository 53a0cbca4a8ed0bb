"""A real slurmctld: what is asked of it, and what it says."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_board import cycle

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


def test_what_a_cluster_says(alpha: Site) -> None:
    """Held tasks and their reason, and the cause of a drain."""
    found = cycle(alpha, times=4)
    assert found["pit_pending_reason_jobs", "alpha", "JobHeldUser"] >= 3
    # A node that was resumed a moment ago does not respond yet: it counts as down.
    assert sum(found.get(("pit_partition_nodes", "alpha", "train", one), 0) for one in ("drained", "down")) >= 1
    assert not [key for key in found if key[0] == "pit_queue_age_seconds"]
    assert {found["pit_collector_success", "alpha", one] for one in ("jobs", "nodes", "topology")} == {1}
