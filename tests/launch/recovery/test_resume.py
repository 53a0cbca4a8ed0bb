"""A run goes on from outside its jobs: once, for a reason, and never behind anybody's back."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pitools.core.errors import ClusterError, ConfigError, DataError, PitError, TryLater, Unreachable, UsageError
from pitools.core.locks import lock
from pitools.launch.plan import load_plan
from pitools.launch.recovery import apply_decision, policy, slurm_query, tick
from pitools.launch.recovery.resume import ResumeResult, query_ends, resume_run, settle_run
from pitools.launch.submission import exclusions, grant, submissions
from pitools.run import run_folder
from pitools.run.attempt_records import Cause
from pitools.site.schema import Recovery, Site
from pitools.slurm.records import AccountingRow

Runs = Any
Cluster = Any
SITE = Site(name="s")


def ended(run_dir: Path) -> list[str]:
    return [json.loads(line)["event"] for line in (run_dir / "events.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("state", ["PENDING", "RUNNING", "COMPLETING", "REQUEUE_HOLD", "UNKNOWN"])
def test_a_job_that_waits_or_runs_is_not_touched(runs: Runs, cluster: Cluster, state: str) -> None:
    """Nor one of which Slurm has no word: nothing is submitted, and nothing judged."""
    run_dir = runs.make()
    runs.attempt(run_dir)
    cluster.states["100"] = state
    assert resume_run(run_dir, SITE).action == "untouched"
    assert (cluster.sent, apply_decision.read_verdict(run_dir)) == ([], None)
    assert not (run_dir / "attempts" / "0" / "cause.json").exists()


@pytest.mark.parametrize("state", ["PREEMPTED", "NODE_FAIL", "TIMEOUT"])
def test_a_job_that_was_ended_is_followed_by_one(runs: Runs, cluster: Cluster, state: str) -> None:
    """And by one only: the next look finds it in the queue."""
    run_dir = runs.make()
    runs.attempt(run_dir)
    cluster.states["100"] = state
    assert resume_run(run_dir, SITE).action == "resubmit"
    assert resume_run(run_dir, SITE).action == "untouched"
    assert len(cluster.sent) == 1
    assert run_folder.read_record(run_dir / "job.json", run_folder.JobRef).job_number == 1  # type: ignore[union-attr]


def test_callables_are_not_submitted_again(runs: Runs, cluster: Cluster) -> None:
    """What was not submitted job by job ends with its job, also where a person asks that it goes on."""
    run_dir = runs.make()
    runs.attempt(run_dir)
    shutil.rmtree(run_dir / "jobs")
    cluster.states["100"] = "NODE_FAIL"
    assert resume_run(run_dir, SITE).action == "stop"
    assert resume_run(run_dir, SITE, force=True).action == "stop"
    assert (cluster.sent, apply_decision.read_verdict(run_dir).kind) == ([], "node")  # type: ignore[union-attr]


def test_settle_records_an_end_and_submits_nothing(runs: Runs, cluster: Cluster) -> None:
    """A failed run gets its verdict; one that another job is to continue stays open, as does one that runs."""
    outcomes = {}
    for state, error in (("FAILED", "ValueError: boom"), ("PREEMPTED", ""), ("RUNNING", "")):
        run_dir = runs.make(f"t-{state.lower()}")
        runs.attempt(run_dir, error=error, code=1 if error else None)
        cluster.states["100"] = state
        settle_run(run_dir, SITE)
        verdict = apply_decision.read_verdict(run_dir)
        outcomes[state] = (verdict.kind if verdict else "", (run_dir / "attempts" / "0" / "cause.json").exists())
    assert outcomes == {"FAILED": ("program", True), "PREEMPTED": ("", True), "RUNNING": ("", False)}
    assert cluster.sent == []


def test_many_runs_are_settled_by_one_answer(runs: Runs, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of slurmctld and of accounting; each run by its own job's end."""
    run_dirs = [runs.make(f"t-{number}") for number in range(3)]
    for number, run_dir in enumerate(run_dirs):
        runs.attempt(run_dir, error="ValueError: boom", code=1)
        run_folder.write_record(
            run_dir / "jobs" / "0" / "job.json", run_folder.JobRef(job_id=str(100 + number), site="s", submitted="")
        )
    cluster.states |= {"100": "FAILED", "101": "RUNNING"}
    calls: list[object] = []
    for name in ("jobs", "accounting"):
        real = getattr(cluster, name)
        monkeypatch.setattr(cluster, name, lambda *args, real=real, **kw: calls.append(args) or real(*args, **kw))
    ends = query_ends(run_dirs, SITE)
    assert {job_id: (state, bool(row)) for job_id, (state, row) in ends.items()} == {
        "100": ("FAILED", True),
        "101": ("RUNNING", False),
        "102": ("UNKNOWN", False),
    }
    for run_dir in run_dirs[:2]:
        assert settle_run(run_dir, SITE, ends)
    assert [bool(apply_decision.read_verdict(run_dir)) for run_dir in run_dirs] == [True, False, False]
    assert len(calls) == 2


def test_settle_leaves_a_run_that_is_locked_or_was_never_submitted(runs: Runs, cluster: Cluster) -> None:
    """The process that holds the lock diagnoses the run; a missing first job is submitted by `resume` alone."""
    run_dir = runs.make()
    runs.attempt(run_dir, error="ValueError: boom", code=1)
    cluster.states["100"] = "FAILED"
    with lock(run_dir / apply_decision.RUN_LOCK, "run"):
        settle_run(run_dir, SITE)
    assert apply_decision.read_verdict(run_dir) is None
    unsubmitted = runs.make("t-2")
    (unsubmitted / "job.json").unlink()
    shutil.rmtree(unsubmitted / "jobs" / "0")
    settle_run(unsubmitted, SITE)
    assert cluster.sent == []


def test_settle_holds_no_lock_while_slurm_is_queried(
    runs: Runs, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run's job needs the lock when it ends; what another process did meanwhile counts."""
    run_dir = runs.make()
    runs.attempt(run_dir, error="ValueError: boom", code=1)

    def current_state(*_: object) -> str:
        with lock(run_dir / apply_decision.RUN_LOCK, "run"):
            apply_decision.write_verdict(run_dir, "succeeded")
        return "FAILED"

    monkeypatch.setattr(slurm_query, "current_state", current_state)
    assert settle_run(run_dir, SITE)
    assert apply_decision.read_verdict(run_dir).kind == "succeeded"  # type: ignore[union-attr]
    assert not (run_dir / "attempts" / "0" / "cause.json").exists()


def test_settle_says_that_slurm_does_not_respond(runs: Runs, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is recorded then."""
    run_dir = runs.make()
    runs.attempt(run_dir, error="ValueError: boom", code=1)

    def silent(*_: object) -> str:
        raise Unreachable("no answer")

    monkeypatch.setattr(slurm_query, "current_state", silent)
    assert not settle_run(run_dir, SITE)
    assert apply_decision.read_verdict(run_dir) is None


def test_settle_diagnoses_each_task_of_an_array(runs: Runs, cluster: Cluster) -> None:
    """The tasks of an array are no repetitions of each other, and one that failed is not hidden by a later one."""
    run_dir = runs.make()
    first = runs.attempt(run_dir, error="ValueError: boom", code=1)
    last = runs.attempt(run_dir, code=0)
    shutil.rmtree(run_dir / "jobs")
    first.rename(first.with_name("0.0"))
    shutil.copytree(first.with_name("0.0"), first.with_name("1.0"))
    last.rename(last.with_name("2.0"))
    cluster.states["100"] = "COMPLETED"  # the last task has the array's number
    settle_run(run_dir, SITE)
    reasons = [json.loads((path / "cause.json").read_text())["reason"] for path in sorted(first.parent.iterdir())]
    assert len(reasons) == 3
    assert not any("repeated" in reason for reason in reasons)
    verdict = apply_decision.read_verdict(run_dir)
    assert verdict
    assert (verdict.kind, verdict.exit_code, verdict.reason.partition(":")[0]) == ("program", 1, "task 0")


def _as_ticket(run_dir: Path) -> None:
    (run_dir / "events.jsonl").unlink()
    run_folder.record_created(run_dir, "s", ticket=True)


@pytest.mark.parametrize("state", ["FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED"])
def test_a_run_of_pit_place_gets_no_second_job(runs: Runs, cluster: Cluster, state: str) -> None:
    """Its script permits one job. What its queue continues has no verdict, which would end the queue's job."""
    run_dir = runs.make()
    _as_ticket(run_dir)
    runs.attempt(run_dir, progress=68)
    cluster.states["100"] = state
    result = resume_run(run_dir, SITE)
    is_continued = state in ("PREEMPTED", "TIMEOUT")
    assert (result.action, "pit place" in result.reason) == ("untouched" if is_continued else "stop", True)
    assert resume_run(run_dir, SITE).action == ("untouched" if is_continued else "already_ended")
    with pytest.raises(UsageError):
        resume_run(run_dir, SITE, force=True)
    assert (cluster.sent, apply_decision.read_verdict(run_dir) is None) == ([], is_continued)


def test_tick_leaves_the_runs_of_pit_place_alone(runs: Runs, cluster: Cluster) -> None:
    """Also those with hooks: their events begin as those of other runs do."""
    run_dir = runs.make()
    _as_ticket(run_dir)
    runs.attempt(run_dir)
    cluster.states["100"] = "NODE_FAIL"
    assert tick.unfinished_runs(runs.root, SITE, lambda *_: None) == []


def test_the_job_before_does_not_begin_again(runs: Runs, cluster: Cluster) -> None:
    """Should Slurm have put it back as well, it finds that it has no leave any more; its successor may have one."""
    run_dir = runs.make()
    grant.claim(submissions.job_dir(run_dir, 0), grant.grant_token("100"))
    runs.attempt(run_dir)
    cluster.states["100"] = "PREEMPTED"
    resume_run(run_dir, SITE)
    assert grant.claim(submissions.job_dir(run_dir, 0), grant.grant_token("100")) == grant.REVOKED
    assert grant.claim(submissions.job_dir(run_dir, 1), grant.grant_token("101")) == grant.grant_token("101")


def test_what_the_program_did_wrong_stops_it(runs: Runs, cluster: Cluster) -> None:
    """The verdict names the error, and holds: the next look changes nothing."""
    run_dir = runs.make()
    runs.attempt(run_dir, error="ValueError: boom", code=1)
    cluster.states["100"] = "FAILED"
    outcome = resume_run(run_dir, SITE)
    assert (outcome.action, outcome.cause) == ("stop", "program")
    verdict = apply_decision.read_verdict(run_dir)
    assert verdict
    assert (verdict.state, verdict.code, verdict.kind, verdict.exit_code) == ("stopped", "failed", "program", 1)
    assert "ValueError: boom" in verdict.reason
    assert resume_run(run_dir, SITE).action == "already_ended"
    assert cluster.sent == []


def test_what_a_person_cancelled_stays_so(runs: Runs, cluster: Cluster) -> None:
    """Before its first attempt or in it, by scancel, the run is stopped as cancelled."""
    for number, begun in enumerate((False, True)):
        run_dir = runs.make(f"t-{number}")
        if begun:
            runs.attempt(run_dir, code=143)
        cluster.states["100"] = "CANCELLED"
        assert resume_run(run_dir, SITE).action == "stop"
        assert apply_decision.read_verdict(run_dir).kind == "cancelled"  # type: ignore[union-attr]
    assert cluster.sent == []


def test_force_goes_on_after_a_verdict(runs: Runs, cluster: Cluster) -> None:
    """The verdict is kept beside, its budgets are spent no more; a run that is queued again is left alone."""
    run_dir = runs.make()
    runs.attempt(run_dir, error="ValueError: boom", code=1)
    cluster.states["100"] = "FAILED"
    resume_run(run_dir, SITE)
    assert resume_run(run_dir, SITE, force=True).action == "resubmit"
    assert apply_decision.read_verdict(run_dir) is None
    assert len(list((run_dir / "verdicts").glob("*.json"))) == 1
    assert apply_decision.cause_history(run_dir) == []
    assert resume_run(run_dir, SITE, force=True).action == "untouched"
    assert len(cluster.sent) == 1


def test_force_asks_slurm_itself(runs: Runs, cluster: Cluster) -> None:
    """The answer that all share may be minutes old: what has ended since then is not called running."""
    run_dir = runs.make()
    runs.attempt(run_dir, error="ValueError: boom", code=1)
    apply_decision.write_verdict(run_dir, "cancelled")
    cluster.states["100"] = "RUNNING"
    with pytest.raises(TryLater):
        resume_run(run_dir, SITE, force=True)
    cluster.queue["100"] = "CANCELLED"
    assert resume_run(run_dir, SITE, force=True).action == "resubmit"


def test_a_submission_that_was_begun_is_finished(runs: Runs, cluster: Cluster) -> None:
    """An intent without a job is handed to `once`, which knows whether there is one."""
    run_dir = runs.make()
    runs.attempt(run_dir)
    submissions.record_intent(run_dir, 1, SITE, ())
    cluster.states["100"] = "NODE_FAIL"
    outcome = resume_run(run_dir, SITE)
    assert (outcome.action, outcome.job_id) == ("submitted", "101")


def test_two_resumes_at_once(runs: Runs, cluster: Cluster) -> None:
    """One does it, the other says to try later or finds it done: there is one job."""
    run_dir = runs.make()
    runs.attempt(run_dir)
    cluster.states["100"] = "NODE_FAIL"

    def go(_: int) -> str:
        try:
            return resume_run(run_dir, SITE).action
        except TryLater:
            return "later"

    with ThreadPoolExecutor(8) as pool:
        output = list(pool.map(go, range(16)))
    assert output.count("resubmit") == 1
    assert set(output) <= {"resubmit", "untouched", "later"}
    assert len(cluster.sent) == 1
    with lock(run_dir / apply_decision.RUN_LOCK, "it"), pytest.raises(TryLater, match="another process"):
        resume_run(run_dir, SITE)


def test_the_next_job_leaves_bad_nodes_out(runs: Runs, cluster: Cluster) -> None:
    """What any run of the folder learnt about a node counts for this one."""
    run_dir = runs.make()
    runs.attempt(run_dir)
    site = Site(name="s")
    bad = Cause(attempt="0", kind="gpu", confidence="certain", reason="Xid 79")
    exclusions.exclude_nodes(run_dir.parent, site, ["n7"], bad, "other-run")
    cluster.states["100"] = "PREEMPTED"
    resume_run(run_dir, site)
    assert cluster.sent == [("--exclude=n7",)]


def in_job(run_dir: Path, kind: str, confidence: str = "certain", **recover: str) -> tuple[str, Site]:
    """What the newest attempt's own job does about it; the action that holds."""
    site = Site(name="s", recovery=Recovery(**recover))  # type: ignore[arg-type]
    attempt = run_folder.attempt_dirs(run_dir)[-1].name
    cause = Cause(attempt=attempt, kind=kind, confidence=confidence, reason=kind)  # type: ignore[arg-type]
    plan = load_plan(run_dir)
    decided = policy.decide(
        plan, site, cause, apply_decision.cause_history(run_dir, before_attempt=attempt), in_job=True
    )
    return apply_decision.apply_from_job(run_dir, plan, site, cause, decided).action, site


def test_a_dying_job_sends_its_successor(runs: Runs, cluster: Cluster) -> None:
    """When it was preempted it also withdraws what Slurm has put back in the queue; its cause and decision are kept."""
    run_dir = runs.make()
    runs.attempt(run_dir, code=143)
    assert in_job(run_dir, "preempted")[0] == "resubmit"
    assert (len(cluster.sent), cluster.cancelled) == (1, ["100"])
    assert (run_dir / "attempts" / "0" / "decision.json").is_file()


def test_a_signal_alone_lets_slurm_say_what_it_was(
    runs: Runs, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it does not say so while there is time, nothing is submitted, and no verdict given."""
    monkeypatch.setattr(slurm_query, "_PAUSE_S", 0.0)
    run_dir = runs.make()
    runs.attempt(run_dir, code=143)
    cluster.states["100"] = "RUNNING"
    assert in_job(run_dir, "preempted", "guess")[0] == "defer"
    assert (cluster.sent, apply_decision.read_verdict(run_dir)) == ([], None)


def test_a_job_that_is_put_back(runs: Runs, cluster: Cluster) -> None:
    """With chain = "requeue" the same job goes on, but not where a node has to be left out."""
    run_dir = runs.make()
    runs.attempt(run_dir, code=1)
    assert in_job(run_dir, "time-limit", chain="requeue")[0] == "resubmit"
    assert (cluster.requeued, cluster.sent) == (["100"], [])


def test_a_job_comes_after_the_verdict(runs: Runs, cluster: Cluster) -> None:
    """What was cancelled meanwhile stays so, whatever its job has decided."""
    run_dir = runs.make()
    runs.attempt(run_dir, code=1)
    apply_decision.write_verdict(run_dir, "cancelled", "by a person")
    assert in_job(run_dir, "preempted")[0] == "stop"
    assert cluster.sent == []


def test_where_no_job_follows_by_itself(runs: Runs, cluster: Cluster) -> None:
    """On a site that says so the run is stopped with its true cause, and how to go on."""
    run_dir = runs.make()
    runs.attempt(run_dir)
    cluster.states["100"] = "NODE_FAIL"
    assert resume_run(run_dir, Site(name="s", recovery=Recovery(chain="none"))).action == "stop"
    verdict = apply_decision.read_verdict(run_dir)
    assert verdict
    assert verdict.kind == "node"
    assert "--force" in verdict.reason


def test_a_slurm_that_forgets(runs: Runs, cluster: Cluster) -> None:
    """A job that nobody knows is over when its script said so; without a word from it, after minutes of silence."""
    run_dir = runs.make()
    attempt = runs.attempt(run_dir)
    del cluster.states["100"]
    assert resume_run(run_dir, SITE).action == "untouched"
    mark = run_dir / ".missed.100"
    os.utime(mark, (time.time() - 700,) * 2)
    assert resume_run(run_dir, SITE).action == "resubmit"
    run_dir = runs.make("t-2")
    attempt = runs.attempt(run_dir)
    run_folder.write_record(
        attempt / "exit.json", run_folder.AttemptExit(job_id="100", exit_code=0, ended="2026-01-01T00:00:00Z")
    )
    del cluster.states["100"]
    assert resume_run(run_dir, SITE).action == "done"


def test_a_slurm_that_refuses_loses_nothing(runs: Runs, cluster: Cluster) -> None:
    """The error is told, there is no verdict, and the next time it is done."""
    run_dir = runs.make()
    runs.attempt(run_dir)
    cluster.states["100"] = "NODE_FAIL"
    cluster.refuses = ClusterError("no such account")
    with pytest.raises(ClusterError):
        resume_run(run_dir, SITE)
    assert apply_decision.read_verdict(run_dir) is None
    cluster.refuses = None
    assert resume_run(run_dir, SITE).action == "resubmit"


@pytest.mark.parametrize(
    ("gone", "kind", "word"),
    [
        ("plan.json", DataError, "plan.json"),
        ("script.sbatch", DataError, "script.sbatch"),
        ("attempts", DataError, "attempts"),
        (".", UsageError, "no run"),
    ],
)
def test_half_a_folder(runs: Runs, cluster: Cluster, gone: str, kind: type[Exception], word: str) -> None:
    """What is missing is named, and nothing is submitted or written off."""
    run_dir = runs.make()
    cluster.states["100"] = "NODE_FAIL"
    path = run_dir / gone
    _ = shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(kind, match=word):
        resume_run(run_dir, SITE)
    assert cluster.sent == []
    assert not (run_dir / "verdict.json").exists()


def test_another_site_s_run(runs: Runs) -> None:
    """A run is never continued by way of a site that is not its own."""
    with pytest.raises(ConfigError, match='of site "s"'):
        resume_run(runs.make(), Site(name="other"))


def test_a_verdict_is_given_once(runs: Runs) -> None:
    """Of many who conclude at once one is believed, by all."""
    run_dir = runs.make()
    with ThreadPoolExecutor(8) as pool:
        output = list(
            pool.map(lambda at: apply_decision.write_verdict(run_dir, "program", f"reason {at}").reason, range(16))
        )
    assert len(set(output)) == 1
    assert apply_decision.read_verdict(run_dir).reason == output[0]  # type: ignore[union-attr]
    assert not list(run_dir.glob(".verdict*"))


def test_faults_with_progress_go_on_and_on(runs: Runs, cluster: Cluster) -> None:
    """Preempted thirty times, each time a checkpoint further, the run is still alive: its history is all there."""
    run_dir = runs.make()
    for number in range(30):
        attempt = runs.attempt(run_dir, progress=10 * number)
        (run_dir / "progress").write_text(str(10 * number + 10))
        cluster.states[str(100 + number)] = "PREEMPTED"
        outcome = resume_run(run_dir, SITE)
        assert (outcome.action, outcome.attempt) == ("resubmit", attempt.name)
    assert len(apply_decision.cause_history(run_dir)) == 30
    assert "stopped" not in ended(run_dir)
    assert isinstance(outcome, ResumeResult)


def test_a_copy_without_records_is_not_continued(runs: Runs, cluster: Cluster, tmp_path: Path) -> None:
    """A copy is refused; where the original cannot be seen, the hint is not to reproduce it."""
    run_dir = runs.make()
    runs.attempt(run_dir, error="ValueError: boom", code=1)
    cluster.states["100"] = "FAILED"
    copy = shutil.copytree(run_dir, tmp_path / "copies" / run_dir.name)
    with pytest.raises(ConfigError, match=rf"\(expected the original, {run_dir}\)") as caught:
        resume_run(copy, SITE, force=True)
    assert "reproduce" in caught.value.hint
    runs.root.rename(tmp_path / "away")
    with pytest.raises(ConfigError, match=rf"missing \(expected {run_dir}\)") as caught:
        resume_run(copy, SITE, force=True)
    assert "reproduce" not in caught.value.hint
    assert cluster.sent == []


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.ESTALE, Unreachable), (errno.EIO, Unreachable), (errno.EACCES, ClusterError)]
)
def test_what_cannot_be_read_is_not_called_a_copy(
    runs: Runs, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[PitError]
) -> None:
    """An error of the file system is raised as such, without the hint to reproduce, which would run it twice."""

    def fails(*_: object) -> bool:
        raise OSError(number, os.strerror(number))

    run_dir = runs.make()
    monkeypatch.setattr(Path, "samefile", fails)
    with pytest.raises(kind, match=os.strerror(number)) as caught:
        resume_run(run_dir, SITE)
    assert "reproduce" not in caught.value.hint


def test_settle_counts_the_tasks_of_an_array_that_never_began(
    runs: Runs, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm's accounting has them; there is no attempt of them."""
    run_dir = runs.make()
    attempt = runs.attempt(run_dir, code=0)
    shutil.rmtree(run_dir / "jobs")
    attempt.rename(attempt.with_name("0.0"))
    cluster.states["100"] = "COMPLETED"
    rows = {"0": "COMPLETED", "[1-3]": "CANCELLED"}
    monkeypatch.setattr(
        slurm_query,
        "query_tasks",
        lambda *_: {task: AccountingRow(job_id="", raw_id="", state=state) for task, state in rows.items()},
    )
    settle_run(run_dir, SITE)
    verdict = apply_decision.read_verdict(run_dir)
    assert verdict
    assert (verdict.state, verdict.kind) == ("stopped", "cancelled")


def test_settle_leaves_the_next_job_of_a_ticket_to_the_queue(runs: Runs, cluster: Cluster) -> None:
    """`pit place` submits it, whatever the site says of runs; a verdict of a mere look would end the queue's job."""
    site = Site(name="s", recovery=Recovery(chain="none"))
    verdicts = []
    for is_ticket in (True, False):
        run_dir = runs.make(f"t-{is_ticket}")
        runs.attempt(run_dir)
        if is_ticket:
            _as_ticket(run_dir)
        cluster.states["100"] = "PREEMPTED"
        settle_run(run_dir, site)
        verdict = apply_decision.read_verdict(run_dir)
        verdicts.append(verdict.kind if verdict else "")
    assert verdicts == ["", "preempted"]
