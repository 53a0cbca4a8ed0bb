"""Jobs that end before their first attempt: their own output says why, and what cannot succeed is not tried again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from pitools.launch.diagnosis import explain, unstarted_jobs
from pitools.launch.monitor import status, wait
from pitools.launch.recovery import apply_decision
from pitools.launch.recovery.resume import resume_run
from pitools.run import run_folder
from pitools.run.attempt_records import Cause, Decision
from pitools.site.schema import Site
from pitools.slurm.records import AccountingRow

Runs = Any
Cluster = Any
SITE = Site(name="s")
SCRIPT = "/var/spool/slurmd/n1/job00100/slurm_script: line 71: "
NO_PYTHON = f"{SCRIPT}/nope/python: No such file or directory"
NO_PITOOLS = (
    "/usr/bin/python3: Error while finding module specification for 'pitools.launch.job' "
    "(ModuleNotFoundError: No module named 'pitools')"
)
LMOD = 'Lmod has detected the following error: The following module(s) are unknown: "cuda/13"'


def fails(runs: Runs, cluster: Cluster, said: str, *, run_dir: Path | None = None, code: int = 0) -> Path:
    """A run whose newest job has just failed, with this as all its output."""
    run_dir = run_dir or runs.make()
    ref = run_folder.read_record(run_dir / "job.json", run_folder.JobRef)
    assert ref is not None
    (run_dir / f"slurm-{ref.job_id}.out").write_text(said + "\n")
    cluster.states[ref.job_id] = "FAILED"
    return run_dir  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("said", "quoted"),
    [
        (NO_PYTHON, "/nope/python: No such file or directory"),
        (NO_PITOOLS, NO_PITOOLS),
        (f"{SCRIPT}module: command not found", "module: command not found"),
        (f"a warning\n{LMOD}", LMOD),
        (f"{SCRIPT}/nope/python: Permission denied", "/nope/python: Permission denied"),
    ],
)
def test_what_cannot_begin_is_said_once(runs: Runs, cluster: Cluster, said: str, quoted: str) -> None:
    """Its cause is the line that says so, the run is stopped with it, and nothing is submitted."""
    run_dir = fails(runs, cluster, said)
    done = resume_run(run_dir, SITE)
    assert (done.action, done.cause, cluster.sent) == ("stop", "program", [])
    verdict = apply_decision.read_verdict(run_dir)
    assert verdict
    assert quoted in verdict.reason
    reported: set[str] = set()
    assert quoted in "".join(explain.past_attempts(run_dir, reported))
    assert list(explain.past_attempts(run_dir, reported)) == []
    lines = list(explain.explain_run(run_dir))
    assert quoted[:100] in lines[0]
    assert "[slurm-100.out]" in lines[1]


def test_an_interpreter_without_pitools_is_named(runs: Runs, cluster: Cluster) -> None:
    """The reason says whose key it is, besides Python's own words."""
    run_dir = fails(runs, cluster, NO_PITOOLS)
    assert "`python` of the request" in resume_run(run_dir, SITE).reason


def test_a_node_that_cannot_begin_what_others_could(
    runs: Runs, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Is left out; where the next one cannot either, it is not the node."""
    run_dir = runs.make()
    runs.attempt(run_dir)
    cluster.states["100"] = "PREEMPTED"
    assert resume_run(run_dir, SITE).action == "resubmit"
    monkeypatch.setattr(
        cluster,
        "accounting",
        lambda ids, all_starts: [
            AccountingRow(job_id=one, raw_id=one, state="FAILED", exit_code=127, node_list="n[3-4]") for one in ids
        ],
    )
    done = resume_run(fails(runs, cluster, NO_PYTHON, run_dir=run_dir), SITE)
    assert (done.action, done.cause, done.exclude) == ("resubmit", "node", ("n3",))
    done = resume_run(fails(runs, cluster, NO_PYTHON, run_dir=run_dir), SITE)
    assert (done.action, done.cause) == ("stop", "program")


@pytest.mark.parametrize(
    ("said", "actions"),
    [
        ("cp: nothing to copy", ["resubmit", "stop"]),
        ("", ["resubmit", "resubmit", "stop"]),
        (
            "Traceback (most recent call last):\n  File \"begin.py\", line 3, in begin\nKeyError: 'x'",
            ["resubmit", "stop"],
        ),
    ],
)
def test_what_nothing_explains_is_tried_again(runs: Runs, cluster: Cluster, said: str, actions: list[str]) -> None:
    """Once where it ends with the same words, which are quoted, and twice where there are none."""
    run_dir, done = None, []
    for _ in actions:
        run_dir = fails(runs, cluster, said, run_dir=run_dir)
        done.append(resume_run(run_dir, SITE).action)
    assert done == actions
    ((_, cause), *_) = unstarted_jobs.unstarted_causes(run_dir)  # type: ignore[arg-type]
    assert (said.splitlines() or [""])[-1] in cause.reason


def test_a_node_that_does_not_see_the_run(runs: Runs, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm ends a job whose output it cannot open with 0:53 and no word: the folder is named, and the site's key."""
    run_dir = runs.make()
    cluster.states["100"] = "FAILED"
    row = AccountingRow(job_id="100", raw_id="100", state="FAILED", signal=53, node_list="n3")
    monkeypatch.setattr(cluster, "accounting", lambda ids, all_starts: [row])
    done = resume_run(run_dir, SITE)
    assert (done.action, done.cause) == ("stop", "program")
    assert str(run_dir) in done.reason
    assert "paths.runs" in done.reason


def test_storage_that_is_away_is_waited_for(runs: Runs, cluster: Cluster) -> None:
    """What will pass is tried again, later."""
    run_dir = fails(runs, cluster, "pit: no attempt: /runs/t-1/attempts: Stale file handle")
    assert (resume_run(run_dir, SITE).action, cluster.sent[0][0]) == ("resubmit", "--begin=now+10")


def test_a_damaged_record_hides_no_other(runs: Runs) -> None:
    """One that was cut short says nothing; the others are there."""
    run_dir = runs.make()
    for number, text in ((0, ""), (1, None)):
        path = run_dir / "jobs" / str(number) / "cause.json"
        path.parent.mkdir(exist_ok=True)
        if text is None:
            run_folder.write_record(path, Cause(attempt="", kind="node", confidence="certain", reason="r"))
        else:
            path.write_text(text)
    assert [number for number, _ in unstarted_jobs.unstarted_causes(run_dir)] == [1]


def test_each_attempt_that_fails_is_said_while_one_waits(
    runs: Runs, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, when it is known what follows; the last one is said by the run's verdict."""
    run_dir = runs.make()
    observed = replace(status.run_status(run_dir, SITE, query_slurm=False), state="RUNNING")
    looks = iter([observed, *(replace(observed, attempts=item) for item in (1, 1, 2)), replace(observed, is_over=True)])
    monkeypatch.setattr(wait.time, "sleep", lambda _: None)
    monkeypatch.setattr(wait, "may_be_delayed", lambda *_: False)

    def look(_: wait.RunPoller) -> run_folder.RunRecord:
        run = next(looks)
        if run.attempts > len(run_folder.attempt_dirs(run_dir)):
            created = runs.attempt(run_dir)
            decided = Decision(
                attempt=created.name, action="retry" if run.attempts == 1 else "stop", kind="node", reason="r"
            )
            run_folder.write_record(
                created / "cause.json", Cause(attempt=created.name, kind="node", confidence="certain", reason="r")
            )
            run_folder.write_record(created / "decision.json", decided)
        return run

    monkeypatch.setattr(wait.RunPoller, "poll", look)
    output: list[str] = []
    assert wait.wait_for_run(run_dir, SITE, lambda _: None, output.append).is_over
    assert output == ["attempt 0: node (certain): r: retry"]
