"""What a run is said to be, when its folder and Slurm do not speak at the same moment."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from pitools.core import clock
from pitools.launch import jobs, once, status, watching
from pitools.launch import plan as planning
from pitools.launch.recover import asking, settling
from pitools.run import folder
from pitools.run.attempt import Decision, Start
from pitools.site.load import load

MakePlan = Callable[..., planning.Plan]


class EndsWhileAsked:
    """A Slurm in which the job ends, and its script leaves word, between the question and the answer."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    def ask(self, site: object, ids: list[str], *, max_age_s: float) -> dict[str, str]:
        ended = folder.Attempt(job_id=ids[0], exit_code=7, ended="2026-01-01T00:00:00Z")
        folder.write(self.run_dir / "attempts" / "0" / "exit.json", ended)
        return {ids[0]: "FAILED"}


def test_a_run_that_ends_while_slurm_is_asked(
    make_plan: MakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finished state never comes without the exit code that the folder has by then."""
    run_dir = tmp_path / "r"
    run_dir.mkdir()
    (run_dir / "plan.json").write_bytes(msgspec.json.encode(make_plan("alpha")))
    folder.write(run_dir / "job.json", folder.JobRef(job_id="5", site="alpha", submitted="2026-01-01T00:00:00Z"))
    slurm: Any = EndsWhileAsked(run_dir)
    monkeypatch.setattr(asking, "polling", slurm)
    run = status.show(run_dir, load("alpha"))
    assert (run.state, run.exit_code, run.attempts) == ("FAILED", 7, 1)


class Says:
    """A Slurm that says one word of every job, and notes what it is told to end."""

    def __init__(self, word: str) -> None:
        self.word, self.ended, self.verdict_was_there = word, [""], False
        self.run_dir = Path()

    def ask(self, site: object, ids: list[str], *, max_age_s: float) -> dict[str, str]:
        return dict.fromkeys(ids, self.word)

    def cancel(self, ids: list[str]) -> None:
        self.ended = list(ids)
        self.verdict_was_there = (self.run_dir / "verdict.json").exists()


@pytest.fixture
def run_dir(make_plan: MakePlan, tmp_path: Path) -> Path:
    """A run on its second job, whose first had an attempt that ended with 143."""
    made = tmp_path / "r"
    made.mkdir()
    (made / "plan.json").write_bytes(msgspec.json.encode(make_plan("alpha")))
    for number, job_id in enumerate(("5", "6")):
        ref = folder.JobRef(job_id=job_id, site="alpha", submitted="2026-01-01T00:00:00Z", number=number)
        jobs.intend(made, number, load("alpha"), ())
        folder.write(jobs.at(made, number) / "job.json", ref)
        folder.write(made / "job.json", ref)
    ended = folder.Attempt(job_id="5", exit_code=143, ended="2026-01-01T00:00:00Z")
    folder.write(made / "attempts" / "0" / "exit.json", ended)
    decided = Decision(attempt="0", action="resubmit", kind="preempted", reason="preempted")
    folder.write(made / "attempts" / "0" / "decision.json", decided)
    return made


def say(word: str, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Says:
    slurm: Any = Says(word)
    slurm.run_dir = run_dir
    monkeypatch.setattr(asking, "polling", slurm)
    monkeypatch.setattr(status, "client", lambda site: slurm)
    return slurm  # type: ignore[no-any-return]


def test_a_run_is_its_newest_job(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """How an attempt of an earlier job ended is not how the run is, whether Slurm is asked or not."""
    say("PENDING", run_dir, monkeypatch)
    run = status.show(run_dir, load("alpha"))
    assert (run.state, run.job_id, run.exit_code, run.is_over) == ("PENDING", "6", None, False)
    assert status.show(run_dir, load("alpha"), ask=False).state == "UNKNOWN"


@pytest.mark.parametrize("word", ["UNKNOWN", "PENDING"])
def test_what_has_just_begun_is_known_before_slurm_says_so(
    word: str, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job just submitted waits; one whose script has just begun runs; for what is older Slurm's word stands."""
    say(word, run_dir, monkeypatch)
    now, old = clock.now(), "2026-01-01T00:00:00Z"
    ref = folder.JobRef(job_id="6", site="alpha", submitted=now, number=1)
    folder.write(run_dir / "job.json", ref)
    assert status.show(run_dir, load("alpha")).state == "PENDING"
    folder.write(run_dir / "job.json", replace(ref, submitted=old))
    assert status.show(run_dir, load("alpha")).state == word
    for job_id, started, state in (("5", now, word), ("6", now, "RUNNING"), ("6", old, word)):
        start = Start(
            attempt="1", job=1, job_id=job_id, cluster="", restart=0, node_list="n1", nodes=1, started=started
        )
        folder.write(run_dir / "attempts" / "1" / "start.json", start)
        assert status.show(run_dir, load("alpha")).state == state, (job_id, started)


def test_the_verdict_is_what_counts(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever Slurm still believes; and it is not even asked."""
    slurm = say("RUNNING", run_dir, monkeypatch)
    monkeypatch.setattr(slurm, "ask", None)
    settling.conclude(run_dir, "stopped", "memory", "CUDA out of memory", 1)
    run = status.show(run_dir, load("alpha"))
    assert (run.state, run.exit_code, run.cause, run.is_over) == ("OUT_OF_MEMORY", 1, "memory", True)
    assert run.reason == "CUDA out of memory"


def test_cancel_says_so_first(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The verdict is there before Slurm is told, every job of the run is ended, and again does no harm."""
    slurm = say("RUNNING", run_dir, monkeypatch)
    for _ in range(2):
        status.cancel(run_dir, load("alpha"))
        assert (slurm.ended, slurm.verdict_was_there) == (["5", "6"], True)
    assert settling.verdict(run_dir).kind == "cancelled"  # type: ignore[union-attr]


def test_what_is_over_is_not_cancelled_again(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm is not called for a run that has ended by itself; that it was so is the answer."""
    slurm = say("COMPLETED", run_dir, monkeypatch)
    given = settling.conclude(run_dir, "stopped", "memory", "CUDA out of memory", 1)
    assert status.cancel(run_dir, load("alpha")) == given
    assert (slurm.ended, settling.verdict(run_dir)) == ([""], given)


def test_only_changes_are_told(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record when a run is first seen, and when its state, job, attempt or cause is another; not for a step."""
    say("RUNNING", run_dir, monkeypatch)
    run = status.show(run_dir, load("alpha"))
    rows = [run, replace(run, steps=9), replace(run, steps=10, attempts=2), replace(run, steps=12, attempts=2)]
    assert list(watching.changes(iter([[row] for row in rows]))) == [rows[0], rows[2]]


def test_cancel_before_the_job_is_known(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A submission that nobody has heard of is looked for, and its job ended; with no job at all the verdict holds."""
    slurm = say("PENDING", run_dir, monkeypatch)
    (run_dir / "job.json").unlink()
    for number in (0, 1):
        (jobs.at(run_dir, number) / "job.json").unlink()
    ref = folder.JobRef(job_id="6", site="alpha", submitted="2026-01-01T00:00:00Z", number=1)
    monkeypatch.setattr(once, "find", lambda run_dir, site, number: ref if number == 1 else None)
    status.cancel(run_dir, load("alpha"))
    assert slurm.ended == ["6"]
    monkeypatch.setattr(once, "find", lambda run_dir, site, number: None)
    status.cancel(run_dir, load("alpha"))
    assert settling.verdict(run_dir).kind == "cancelled"  # type: ignore[union-attr]


def test_wait_outlasts_a_slurm_that_forgets(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`resume` knows after ten minutes whether the job is over: until then its run is not given up."""
    say("UNKNOWN", run_dir, monkeypatch)
    run = replace(status.show(run_dir, load("alpha"), ask=False), state="UNKNOWN")
    clock_s = [0.0]

    class Forgets:
        lost = True

        def __init__(self, *_: object) -> None: ...

        def look(self) -> folder.Run:
            return run if clock_s[0] < 700 else replace(run, state="COMPLETED", is_over=True)

    asked: list[float] = []
    monkeypatch.setattr(status, "Watch", Forgets)
    monkeypatch.setattr(status, "continued", lambda *_: asked.append(clock_s[0]))
    monkeypatch.setattr(status.time, "monotonic", lambda: clock_s[0])
    monkeypatch.setattr(status.time, "sleep", lambda s: clock_s.__setitem__(0, clock_s[0] + s))
    assert status.wait(run_dir, load("alpha"), lambda _: None).is_over
    assert len(asked) < 30, "each of them asks slurmctld"
