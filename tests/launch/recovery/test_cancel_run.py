"""A cancelled run that is asked to go on all the same."""

from __future__ import annotations

import os
import shutil
from types import SimpleNamespace
from typing import Any

import pytest

from pitools.core.errors import ClusterError, TryLater
from pitools.launch.recovery import apply_decision, cancel_run
from pitools.launch.recovery.resume import resume_run
from pitools.launch.submission import exactly_once, submissions
from pitools.run import cancel_request, run_folder
from pitools.site.schema import Connection, Site
from pitools.slurm.records import SlurmJob

Runs = Any
Cluster = Any
SITE = Site(name="s")


def test_force_does_not_pass_over_a_job_that_still_ends(runs: Runs, cluster: Cluster) -> None:
    """After a verdict, while Slurm still has the job: it says to come again, and does it once the job is gone."""
    run_dir = runs.make()
    runs.attempt(run_dir)
    apply_decision.write_verdict(run_dir, "cancelled")
    for state in ("COMPLETING", "RUNNING"):
        cluster.states["100"] = state
        with pytest.raises(TryLater):
            resume_run(run_dir, SITE, force=True)
    assert apply_decision.read_verdict(run_dir) is not None
    cluster.states["100"] = "CANCELLED"
    assert resume_run(run_dir, SITE, force=True).action == "resubmit"


def test_a_run_that_was_never_submitted_can_be_cancelled(runs: Runs, cluster: Cluster) -> None:
    """No tick submits it then, and a forced resume does."""
    run_dir = runs.make()
    shutil.rmtree(run_dir / "jobs" / "0")
    (run_dir / "job.json").unlink()
    assert cancel_run.cancel_run(run_dir, SITE) is None
    assert apply_decision.read_verdict(run_dir).kind == "cancelled"  # type: ignore[union-attr]
    assert resume_run(run_dir, SITE).action == "already_ended"
    assert resume_run(run_dir, SITE, force=True).action == "submitted"
    assert (apply_decision.read_verdict(run_dir), len(cluster.sent)) == (None, 1)


def test_force_takes_back_a_cancel_that_slurm_has_not_taken(runs: Runs, cluster: Cluster) -> None:
    """The last that was asked for counts: the run goes on, and nothing is cancelled."""
    run_dir = runs.make()
    run_folder.write_record(run_dir / "cancel.json", cancel_request.CancelRequest(t="2026-01-01T00:00:00Z"))
    assert resume_run(run_dir, SITE, force=True).action == "untouched"
    assert cancel_request.pending_cancel(run_dir) is None
    assert cluster.cancelled == []


def test_what_has_finished_is_not_called_cancelled(
    runs: Runs, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked for while it ran, and its last attempt ended well before Slurm took it: the verdict is that."""
    run_dir = runs.make()
    monkeypatch.setattr(cancel_run, "client", lambda site: cluster)
    run_folder.write_record(run_dir / "cancel.json", cancel_request.CancelRequest(t="2026-01-01T00:00:00Z"))
    runs.attempt(run_dir, code=0)
    cluster.states["100"] = "COMPLETED"
    assert resume_run(run_dir, SITE).action == "done"
    verdict = apply_decision.read_verdict(run_dir)
    assert verdict is not None
    assert verdict.state == "succeeded"
    assert cancel_request.pending_cancel(run_dir) is None


def test_a_cancel_that_never_succeeds_can_be_taken_back(
    runs: Runs, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of scancel that is no refusal is tried again; the command in its hint takes the cancel back."""

    def fails(ids: list[str], *, user: str) -> None:
        raise ClusterError("Kill job error: Some such thing", where="scancel")

    run_dir = runs.make()
    monkeypatch.setattr(cancel_run, "client", lambda site: SimpleNamespace(cancel=fails))
    with pytest.raises(TryLater) as caught:
        cancel_run.cancel_run(run_dir, SITE)
    assert "pit launch resume t-1 --force" in caught.value.hint
    assert cancel_request.pending_cancel(run_dir)
    assert resume_run(run_dir, SITE, force=True).action == "untouched"
    assert cancel_request.pending_cancel(run_dir) is None


@pytest.mark.usefixtures("as_root")
def test_a_run_that_only_its_owner_can_cancel(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the owner, and no other destination."""
    run_dir = runs.make()
    os.chown(run_dir, 12345, -1)

    def denied(*_: Any, **__: Any) -> None:
        raise ClusterError("cannot write: Permission denied", hint="choose a destination you can write to")

    monkeypatch.setattr(cancel_run.run_folder, "write_record", denied)
    with pytest.raises(ClusterError, match="is 12345's") as caught:
        cancel_run.cancel_run(run_dir, SITE)
    assert "only that user" in caught.value.hint


@pytest.mark.usefixtures("as_root")
def test_of_another_user_s_run_what_is_theirs_alone_is_ended(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever an ssh site names is whose jobs are there; a job of which no id is known is not looked for."""
    run_dir = runs.make()
    for path in (run_dir / "job.json", submissions.job_dir(run_dir, 0) / "job.json"):
        run_folder.write_record(path, run_folder.JobRef(job_id="100_[1-3]", site="s", submitted="2026-01-01T00:00:00Z"))
    submissions.record_intent(run_dir, 1, SITE, ())
    os.chown(run_dir, 12345, 12345)
    requested: list[Any] = []

    def known(ids: list[str], *, all_states: bool) -> list[SlurmJob]:
        requested.append((ids, all_states))
        return [SlurmJob(job_id=item, raw_id=item, state="RUNNING", user="team") for item in ids]

    slurm = SimpleNamespace(jobs=known, cancel=lambda ids, user: requested.append((ids, user)))
    monkeypatch.setattr(cancel_run, "client", lambda site: slurm)
    monkeypatch.setattr(exactly_once, "find_submitted", lambda *_: pytest.fail("looked for"))
    with pytest.raises(ClusterError, match="expected 12345, got team") as caught:
        cancel_run.cancel_run(run_dir, SITE)
    assert caught.value.hint == "scancel --user=12345 --name=t-1"
    assert cancel_run.cancel_run(run_dir, Site(name="s", connection=Connection(kind="ssh", host="team@login"))) is None
    assert requested == [(["100"], True), (["100"], True), (["100_[1-3]"], "team")]
