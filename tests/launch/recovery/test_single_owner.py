"""Never two jobs of a run at once, and never none: whoever was killed where, and whatever Slurm said before."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pitools.core.errors import ClusterError, TryLater, Unreachable
from pitools.launch.job import signals
from pitools.launch.monitor import status, wait
from pitools.launch.plan import load_plan
from pitools.launch.recovery import apply_decision, policy, slurm_query
from pitools.launch.recovery.resume import resume_run
from pitools.launch.recovery.tick import tick_runs
from pitools.launch.submission import exclusions, grant, next_job, submissions
from pitools.run import run_folder
from pitools.run.attempt_records import Cause, Decision
from pitools.site.schema import Recovery, Site
from pitools.slurm.errors import SlurmRefused

Runs = Any
Cluster = Any
SITE = Site(name="s")
LOST = """\
NodeName=n1 Arch=x86_64 NodeAddr=10.0.0.1 State=DOWN+NOT_RESPONDING ThreadsPerCore=1 SlurmdStartTime=2020-01-01T00:00:00
NodeName=n2 Arch=x86_64 NodeAddr=10.0.0.2 State=IDLE ThreadsPerCore=1 SlurmdStartTime=2020-01-01T00:00:00
"""


def follow(run_dir: Path, cluster: Cluster) -> None:
    """The run's first job was ended, and its second is queued."""
    cluster.states["100"] = "NODE_FAIL"
    assert resume_run(run_dir, SITE).action == "resubmit"


@pytest.mark.parametrize("harm", ["as before", "gone", "cut short"])
def test_a_sender_that_was_killed_before_its_last_word(runs: Runs, cluster: Cluster, harm: str) -> None:
    """A job that only its own folder knows is the newest: it is not sent again, nor is its attempt judged."""
    run_dir = runs.make()
    runs.attempt(run_dir)
    data = (run_dir / "job.json").read_bytes()
    follow(run_dir, cluster)
    runs.attempt(run_dir)
    cluster.states["101"] = "RUNNING"
    if harm == "gone":
        (run_dir / "job.json").unlink()
    else:
        (run_dir / "job.json").write_bytes(data if harm == "as before" else data[:20])
    outcome = resume_run(run_dir, SITE)
    assert (outcome.action, outcome.job_id, len(cluster.sent)) == ("untouched", "101", 1)
    assert not (run_dir / "attempts" / "1" / "cause.json").exists()


def test_a_job_that_cannot_be_read_is_looked_for(runs: Runs, cluster: Cluster) -> None:
    """What a loss of power left of its record says nothing; Slurm knows the job by its name."""
    run_dir = runs.make()
    for path in (run_dir / "job.json", submissions.job_dir(run_dir, 0) / "job.json"):
        path.write_text("")
    assert resume_run(run_dir, SITE).action == "submitted"
    assert submissions.latest_job(run_dir).job_id == "100"  # type: ignore[union-attr]


@pytest.mark.parametrize("state", ["PENDING", "RUNNING", "REQUEUE_HOLD"])
def test_what_had_ended_and_was_put_back(runs: Runs, cluster: Cluster, state: str) -> None:
    """A state that was final once is asked for anew before another job is sent."""
    run_dir = runs.make()
    runs.attempt(run_dir)
    cluster.states["100"], cluster.queue["100"] = "FAILED", state
    assert resume_run(run_dir, SITE, state="FAILED").action == "untouched"
    assert (cluster.sent, apply_decision.read_verdict(run_dir)) == ([], None)


def test_a_job_that_begins_again_while_it_is_judged(
    runs: Runs, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps its leave, and none is sent beside it."""
    run_dir = runs.make()
    grant.claim(submissions.job_dir(run_dir, 0), grant.grant_token("100"))
    runs.attempt(run_dir)
    cluster.states["100"] = "PREEMPTED"
    decide = policy.decide

    def late(*args: Any, **more: Any) -> Decision:
        runs.attempt(run_dir)
        return decide(*args, **more)

    monkeypatch.setattr(policy, "decide", late)
    with pytest.raises(TryLater, match=r"job 100 .* attempt 1"):
        resume_run(run_dir, SITE)
    assert (cluster.sent, grant.read_grant(submissions.job_dir(run_dir, 0))) == ([], "run.100")


def test_a_start_that_an_nfs_client_had_not_seen(runs: Runs, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """An attempt that the folder shows only once it is revalidated, after the grant was revoked, keeps its job."""
    run_dir = runs.make()
    runs.attempt(run_dir)
    cluster.states["100"] = "PREEMPTED"
    monkeypatch.setattr(apply_decision, "revalidate_nfs", lambda _: runs.attempt(run_dir))
    with pytest.raises(TryLater):
        resume_run(run_dir, SITE)
    assert (cluster.sent, grant.read_grant(submissions.job_dir(run_dir, 0))) == ([], "run.100")


def test_its_leave_is_gone_before_another_is_sent(runs: Runs, cluster: Cluster) -> None:
    """Else it could begin between the two."""
    run_dir = runs.make()
    grant.claim(submissions.job_dir(run_dir, 0), grant.grant_token("100"))
    runs.attempt(run_dir)
    observed: list[str] = []
    cluster.meanwhile = lambda: observed.append(grant.read_grant(submissions.job_dir(run_dir, 0)))
    follow(run_dir, cluster)
    assert observed == ["revoked"]


def settled(run_dir: Path, attempt: str, kind: str = "node") -> str:
    plan = load_plan(run_dir)
    cause = Cause(attempt=attempt, kind=kind, confidence="certain", reason=kind)  # type: ignore[arg-type]
    decided = policy.decide(plan, SITE, cause, [], in_job=True)
    return apply_decision.apply_from_job(run_dir, plan, SITE, cause, decided).action


def test_a_job_that_was_given_up_and_still_lives(runs: Runs, cluster: Cluster) -> None:
    """It neither sends a job nor tries again, for another goes on; what it has finished counts."""
    run_dir = runs.make()
    runs.attempt(run_dir)
    follow(run_dir, cluster)
    for kind in ("time-limit", "network"):
        assert settled(run_dir, "0", kind) == "defer"
    assert len(cluster.sent) == 1
    assert settled(run_dir, "0", "succeeded") == "done"


def test_two_that_no_lock_keeps_apart(runs: Runs, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both come to the same decision, and send the same job."""
    run_dir = runs.make()
    runs.attempt(run_dir)
    cluster.states["100"] = "NODE_FAIL"
    query_end = slurm_query.query_end

    def meanwhile(*args: Any) -> Any:
        monkeypatch.setattr(slurm_query, "query_end", query_end)
        (run_dir / apply_decision.RUN_LOCK).unlink()  # a lock that does not hold
        assert resume_run(run_dir, SITE).job_id == "101"
        return query_end(*args)

    monkeypatch.setattr(slurm_query, "query_end", meanwhile)
    assert resume_run(run_dir, SITE).job_id == "101"
    assert len(cluster.sent) == 1


def test_cancelled_while_the_next_job_is_sent(runs: Runs, cluster: Cluster) -> None:
    """Who cancelled it did not see that job."""
    run_dir = runs.make()
    runs.attempt(run_dir)
    cluster.meanwhile = lambda: apply_decision.write_verdict(run_dir, "cancelled", "by a person")
    follow(run_dir, cluster)
    assert cluster.cancelled == ["101"]


def test_a_signal_of_which_slurm_kept_no_word(runs: Runs, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancelled or preempted: while accounting is silent nothing is decided, and without any it is not begun again."""
    run_dir = runs.make()
    attempt = runs.attempt(run_dir, code=143)
    signals.append_signal(attempt, signal.SIGTERM, None)
    del cluster.states["100"]
    accounting = cluster.accounting

    def silent(*_: Any, **__: Any) -> None:
        raise Unreachable("slurmdbd: Connection refused")

    monkeypatch.setattr(cluster, "accounting", silent)
    with pytest.raises(TryLater):
        resume_run(run_dir, SITE)
    assert apply_decision.read_verdict(run_dir) is None
    monkeypatch.setattr(cluster, "accounting", accounting)
    assert resume_run(run_dir, SITE).action == "stop"
    assert "--force" in apply_decision.read_verdict(run_dir).reason  # type: ignore[union-attr]
    assert cluster.sent == []


def test_missed_twice_and_seen_in_between(runs: Runs, cluster: Cluster) -> None:
    """Ten minutes of silence are ten minutes without a word."""
    run_dir = runs.make()
    runs.attempt(run_dir)
    for state in ("", "RUNNING", ""):
        cluster.states = {"100": state} if state else {}
        assert resume_run(run_dir, SITE).action == "untouched"
        if mark := next(run_dir.glob(".missed.*"), None):
            os.utime(mark, (time.time() - 500,) * 2)
    os.utime(run_dir / ".missed.100", (time.time() - 601,) * 2)
    assert resume_run(run_dir, SITE).action == "resubmit"


def test_between_two_attempts_the_script_lives(runs: Runs, cluster: Cluster) -> None:
    """A job that Slurm forgets for a moment, just then, is not over for having written down an end."""
    run_dir = runs.make()
    attempt = runs.attempt(run_dir, code=1)
    decision = Decision(attempt="0", action="retry", kind="network", reason="")
    run_folder.write_record(attempt / "decision.json", decision)
    del cluster.states["100"]
    assert resume_run(run_dir, SITE).action == "untouched"


def test_a_node_that_is_none(runs: Runs, cluster: Cluster) -> None:
    """sbatch refuses a name that it does not know: one such keeps no run from going on, nor does n8, of partition q."""
    run_dir = runs.make()
    runs.attempt(run_dir)
    bad = Cause(attempt="0", kind="gpu", confidence="certain", reason="Xid 79")
    site = Site(name="s")
    exclusions.exclude_nodes(run_dir.parent, site, ["n7", "n8", "n99"], bad, "other")
    follow(run_dir, cluster)
    assert cluster.sent == [("--exclude=n7",)]


def test_a_refusal_that_is_not_about_nodes(runs: Runs, cluster: Cluster) -> None:
    """It is raised, and the job is not submitted once more with fewer nodes excluded."""
    run_dir = runs.make()
    bad = Cause(attempt="0", kind="gpu", confidence="certain", reason="Xid 79")
    exclusions.exclude_nodes(run_dir.parent, SITE, ["n7"], bad, "other")
    cluster.refuses = SlurmRefused("Invalid qos specification")
    with pytest.raises(SlurmRefused):
        next_job.submit_next_job(run_dir, load_plan(run_dir), SITE)
    assert len(cluster.patience) == 1


def test_jobs_that_never_begin_come_to_an_end(runs: Runs, cluster: Cluster) -> None:
    """Also after a run was told to go on; what was spent before that is forgiven."""
    run_dir = runs.make()
    runs.attempt(run_dir, error="ValueError: boom", code=1)
    cluster.states["100"] = "FAILED"
    assert resume_run(run_dir, SITE).action == "stop"
    for _ in range(3):
        outcome = resume_run(run_dir, SITE, force=True)
        assert outcome.action == "resubmit"
        for _ in range(9):
            cluster.states[outcome.job_id] = "BOOT_FAIL"
            outcome = resume_run(run_dir, SITE)
            if outcome.action == "stop":
                break
        assert (outcome.action, outcome.cause) == ("stop", "node")
    assert len(cluster.sent) == 3 * 6


def put_back(runs: Runs, cluster: Cluster, reason: str = "BeginTime", ended: str = "NODE_FAIL") -> Path:
    """A run whose job Slurm has put back in the queue, and holds there."""
    run_dir: Path = runs.make()
    grant.claim(submissions.job_dir(run_dir, 0), grant.grant_token("100"))
    runs.attempt(run_dir)
    cluster.states["100"], cluster.ended["100"] = "PENDING", ended
    cluster.waits["100"] = (reason, 1)
    return run_dir


def test_a_job_that_slurm_holds_back_is_not_waited_for(runs: Runs, cluster: Cluster) -> None:
    """After a node's failure a fresh job has the run, without that node; the held one is withdrawn."""
    run_dir = put_back(runs, cluster)
    cluster.nodes_text = LOST
    (output,) = tick_runs(run_dir.parent, SITE, lambda *_: None)
    assert (output.action, output.cause, output.exclude) == ("resubmit", "node", ("n1",))
    assert cluster.sent == [("--exclude=n1",)]
    assert cluster.cancelled == ["100"]
    assert grant.claim(submissions.job_dir(run_dir, 0), grant.grant_token("100")) == grant.REVOKED
    assert list(tick_runs(run_dir.parent, SITE, lambda *_: None)) == []
    assert len(cluster.sent) == 1


@pytest.mark.parametrize(
    ("reason", "ended", "chain"),
    [
        ("Priority", "NODE_FAIL", "fresh"),
        ("BeginTime", "PREEMPTED", "fresh"),
        ("JobHeldUser", "NODE_FAIL", "fresh"),
        ("BeginTime", "NODE_FAIL", "requeue"),
        ("BeginTime", "NODE_FAIL", "none"),
    ],
)
def test_what_waits_for_another_reason_is_left(
    runs: Runs, cluster: Cluster, reason: str, ended: str, chain: Any
) -> None:
    """Its turn, a person, or the site's own way: nothing is sent, and nothing judged."""
    run_dir = put_back(runs, cluster, reason, ended)
    site = Site(name="s", recovery=Recovery(chain=chain))
    assert resume_run(run_dir, site).action == "untouched"
    assert (cluster.sent, cluster.cancelled, grant.read_grant(submissions.job_dir(run_dir, 0))) == ([], [], "run.100")
    assert not (run_dir / "attempts" / "0" / "cause.json").exists()


@pytest.mark.parametrize(("reason", "ended"), [("Priority", "NODE_FAIL"), ("BeginTime", "PREEMPTED")])
def test_a_turn_is_not_asked_after_twice(runs: Runs, cluster: Cluster, reason: str, ended: str) -> None:
    """A job that has its place in the queue, or that no node's failure put back, costs no question of its own."""
    run_dir = put_back(runs, cluster, reason, ended)
    looked_at = msgspec.structs.replace(status.run_status(run_dir, SITE), state="PENDING")
    assert wait.may_be_delayed(looked_at, SITE)
    assert resume_run(run_dir, SITE).action == "untouched"
    requested = len(cluster.shown)
    assert list(tick_runs(run_dir.parent, SITE, lambda *_: None)) == []
    assert (requested, len(cluster.shown)) == (1, 1)
    assert not wait.may_be_delayed(looked_at, SITE)


def test_held_back_and_no_other_is_taken(runs: Runs, cluster: Cluster) -> None:
    """Where Slurm refuses a second job, the held one keeps its leave, and goes on when its time comes."""
    run_dir = put_back(runs, cluster)
    cluster.refuses = ClusterError("Job violates accounting/QOS policy")
    outcome = resume_run(run_dir, SITE)
    assert (outcome.action, "policy" in outcome.reason) == ("untouched", True)
    assert (grant.read_grant(submissions.job_dir(run_dir, 0)), cluster.cancelled) == ("run.100", [])
    requested = len(cluster.shown)
    assert list(tick_runs(run_dir.parent, SITE, lambda *_: None)) == []
    assert len(cluster.shown) == requested


def test_held_back_and_slurm_is_busy(runs: Runs, cluster: Cluster) -> None:
    """The held job is without leave no longer than one try takes: its time may come meanwhile."""
    run_dir = put_back(runs, cluster)
    cluster.refuses = TryLater("slurmctld is busy")
    with pytest.raises(TryLater):
        resume_run(run_dir, SITE)
    assert (grant.read_grant(submissions.job_dir(run_dir, 0)), cluster.patience) == ("run.100", [0.0])


def test_an_end_of_an_earlier_start_says_nothing(runs: Runs, cluster: Cluster) -> None:
    """Accounting that lags behind has the end before the last: it is asked again, and nothing is judged by that."""
    run_dir = put_back(runs, cluster)
    cluster.ended_at = "2026-01-01T00:00:00.000Z"
    assert resume_run(run_dir, SITE).action == "untouched"
    cluster.ended_at = ""
    assert resume_run(run_dir, SITE).action == "resubmit"
