"""Submissions to a real controller through a proxy that loses what it carries, and by processes that are killed."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pitools.core.errors import Unreachable
from pitools.launch.submission import exactly_once, find_job, submissions
from pitools.run import run_folder
from pitools.run.run_folder import JobRef
from pitools.slurm.client import Client

pytestmark = pytest.mark.slurm


@pytest.fixture
def ways(clusters: Path, repo: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """perf/launch/submit_variants.py."""
    monkeypatch.syspath_prepend(str(repo))
    from perf.launch import submit_variants

    return submit_variants


def test_every_fault_makes_one_job(ways: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample of `perf/run launch_submit_once`: each fault once, four killed senders, one job each, that ran once."""
    from perf.launch import slurm_proxy

    # This cluster's own word would be 20 s; the proxy keeps a request for 4.
    monkeypatch.setattr(find_job, "_slurmctld_delay_s", lambda _: 6.0)
    faults = list(slurm_proxy.FAULTS)
    runs = tmp_path / secrets.token_hex(4)  # the jobs' names are made of it: accounting remembers those of another day
    reported, proxy = ways.submit_many(
        runs,
        len(faults) + 4,
        ways.ours,
        lambda number: (faults + [""] * 99)[number],
        deaths=range(4),
        at_once=12,
    )
    assert all(proxy.struck[fault] >= 1 for fault in faults)
    assert ways.count_outcomes(runs, reported) == {
        "right": len(reported),
        "jobs": len(reported),
        "lost": 0,
        "double": 0,
        "ran twice": 0,
        "unknown": 0,
    }


def test_a_controller_that_is_away(ways: Any, tmp_path: Path) -> None:
    """Nobody listens: without patience that is an error, and nothing is left of the attempt; later there is one job."""
    from perf.launch import slurm_proxy

    run_dir = ways.make(tmp_path / f"back-{secrets.token_hex(4)}")
    with slurm_proxy.SlurmProxy(ways.PORT, lambda _: "") as proxy:
        site = ways.site(proxy.conf(ways.REAL, tmp_path / "slurm.conf", MessageTimeout=1))
        with slurm_proxy.SlurmProxy(ways.PORT, lambda _: "") as other:
            away = ways.site(other.conf(ways.REAL, tmp_path / "away.conf", MessageTimeout=1))
        with pytest.raises(Unreachable, match="connect failure"):
            exactly_once.submit_once(run_dir, away, args=ways.FLAGS, retry_for_s=0)
        assert submissions.job_numbers(run_dir) == []
        ref = exactly_once.submit_once(run_dir, site, args=ways.FLAGS)
    assert (ref.cluster, ref.job_number) == ("alpha", 0)
    assert exactly_once.submit_once(run_dir, away, job_number=0) == ref, "what is known needs no controller"


def test_launch_run_finds_its_job(ways: Any, alpha: Client, pit: Callable[..., Any], tmp_path: Path) -> None:
    """`pit launch run` whose sbatch got no answer looks itself: there is one job, and the run knows it."""
    from perf.launch import slurm_proxy

    (tmp_path / "request.toml").write_text('name = "found"\ncommand = "true"\nnodes = 1\ntime = "2m"\n')
    with slurm_proxy.SlurmProxy(ways.PORT, lambda number: "" if number else "drop") as proxy:
        conf = proxy.conf(ways.REAL, tmp_path / "slurm.conf", MessageTimeout=2)
        env = {"PIT_SITE_PATH": str(tmp_path), "PIT_RUNS": str(tmp_path / "runs")}
        (tmp_path / "alpha.toml").write_text(f'[slurm]\nconf = "{conf}"\n')
        done = pit("launch", "run", "request.toml", "--site", "alpha", **env)
        assert done.returncode == 0, done.stderr
        assert "job found-" in done.stderr
        (run_dir,) = (tmp_path / "runs").glob("found-*")
        ref = run_folder.read_record(run_dir / "job.json", JobRef)
        assert ref
        assert [job.raw_id for job in alpha.jobs(name=run_dir.name, all_states=True)] == [ref.job_id]
        assert f"pitools.launch.rank.main plan {run_dir}/plan.json" in (run_dir / "script.sbatch").read_text()
        assert not (run_dir / "submitit").exists(), "no callable, no pickle"
    alpha.cancel([ref.job_id])
