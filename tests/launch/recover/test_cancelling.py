"""A cancelled run that is asked to go on all the same."""

from __future__ import annotations

from typing import Any

import pytest

from pitools.core.errors import TryLater
from pitools.launch.recover import cancelling, settling
from pitools.launch.recover.resume import resume
from pitools.run import cancel_request, folder
from pitools.site.model import Site

Runs = Any
Cluster = Any
SITE = Site(name="s")


def test_force_does_not_pass_over_a_job_that_still_ends(runs: Runs, cluster: Cluster) -> None:
    """After a verdict, while Slurm still has the job: it says to come again, and does it once the job is gone."""
    run_dir = runs.make()
    runs.attempt(run_dir)
    settling.conclude(run_dir, "stopped", "cancelled", settling.CANCELLED)
    for state in ("COMPLETING", "RUNNING"):
        cluster.states["100"] = state
        with pytest.raises(TryLater):
            resume(run_dir, SITE, force=True)
    assert settling.verdict(run_dir) is not None
    cluster.states["100"] = "CANCELLED"
    assert resume(run_dir, SITE, force=True).action == "resubmit"


def test_force_takes_back_a_cancel_that_slurm_has_not_taken(runs: Runs, cluster: Cluster) -> None:
    """The last that was asked for counts: the run goes on, and nothing is cancelled."""
    run_dir = runs.make()
    folder.write(run_dir / "cancel.json", cancel_request.Cancel(t="2026-01-01T00:00:00Z"))
    assert resume(run_dir, SITE, force=True).action == "left"
    assert cancel_request.read(run_dir) is None
    assert cluster.cancelled == []


def test_what_has_finished_is_not_called_cancelled(
    runs: Runs, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked for while it ran, and its last attempt ended well before Slurm took it: the verdict is that."""
    run_dir = runs.make()
    monkeypatch.setattr(cancelling, "client", lambda site: cluster)
    folder.write(run_dir / "cancel.json", cancel_request.Cancel(t="2026-01-01T00:00:00Z"))
    runs.attempt(run_dir, code=0)
    cluster.states["100"] = "COMPLETED"
    assert resume(run_dir, SITE).action == "done"
    given = settling.verdict(run_dir)
    assert given is not None
    assert given.state == "finished"
    assert cancel_request.read(run_dir) is None
