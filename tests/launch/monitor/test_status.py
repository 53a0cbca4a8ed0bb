"""What a run is said to be, when its folder and Slurm do not speak at the same moment."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from pitools.core import timestamps
from pitools.core.errors import ClusterError, NoSpace, PitError, ToolMissing, Unreachable
from pitools.launch import plan as planning
from pitools.launch import slurm_cache
from pitools.launch.monitor import follow_runs, status, wait
from pitools.launch.plan import load_plan
from pitools.launch.recovery import apply_decision, cancel_run, slurm_query
from pitools.launch.recovery.resume import resume_run
from pitools.launch.submission import exactly_once, submissions
from pitools.run import cancel_request, run_folder
from pitools.run.attempt_records import AttemptStart, Cause, Decision
from pitools.site.load import load_site
from pitools.slurm.errors import SlurmReason, SlurmRefused

MakePlan = Callable[..., planning.Plan]


def denied() -> SlurmRefused:
    """What scancel of another user's job raises."""
    return SlurmRefused("Access/permission denied", reason=SlurmReason.PERMISSION_DENIED)


class EndsWhileAsked:
    """A Slurm in which the job ends, and its script leaves word, between the question and the answer."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    def require_states(self, site: object, ids: list[str], *, max_age_s: float) -> dict[str, str]:
        attempt_exit = run_folder.AttemptExit(job_id=ids[0], exit_code=7, ended="2026-01-01T00:00:00Z")
        run_folder.write_record(self.run_dir / "attempts" / "0" / "exit.json", attempt_exit)
        return {ids[0]: "FAILED"}


def test_a_run_that_ends_while_slurm_is_asked(
    make_plan: MakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finished state never comes without the exit code that the folder has by then."""
    run_dir = tmp_path / "r"
    run_dir.mkdir()
    (run_dir / "plan.json").write_bytes(msgspec.json.encode(make_plan("alpha")))
    run_folder.write_record(
        run_dir / "job.json", run_folder.JobRef(job_id="5", site="alpha", submitted="2026-01-01T00:00:00Z")
    )
    slurm: Any = EndsWhileAsked(run_dir)
    monkeypatch.setattr(slurm_query, "slurm_cache", slurm)
    run = status.run_status(run_dir, load_site("alpha"))
    assert (run.state, run.exit_code, run.attempts) == ("FAILED", 7, 1)


class Says:
    """A Slurm that says one word of every job, and notes what it is told to end, or refuses that."""

    def __init__(self, word: str) -> None:
        self.word, self.ended, self.was_there = word, [""], [False, False]
        self.named: list[str] = []
        self.run_dir = Path()
        self.refuses: PitError | None = None
        self.waits = slurm_cache.CachedState(state="PENDING", age_s=0.0)

    def require_states(self, site: object, ids: list[str], *, max_age_s: float) -> dict[str, str]:
        return dict.fromkeys(ids, self.word)

    def cached_states(self, site: object, ids: list[str]) -> dict[str, slurm_cache.CachedState]:
        return dict.fromkeys(ids, self.waits)

    def cancel(self, ids: list[str], name: str = "", user: str = "") -> None:
        self.was_there = [(self.run_dir / name).exists() for name in ("cancel.json", "verdict.json")]
        if self.refuses:
            raise self.refuses
        self.ended = list(ids)
        self.named += [name] if name else []


@pytest.fixture
def run_dir(make_plan: MakePlan, tmp_path: Path) -> Path:
    """A run on its second job, whose first had an attempt that ended with 143."""
    folder = tmp_path / "r"
    folder.mkdir()
    (folder / "plan.json").write_bytes(msgspec.json.encode(replace(make_plan("alpha"), runs_dir=str(tmp_path))))
    for number, job_id in enumerate(("5", "6")):
        ref = run_folder.JobRef(job_id=job_id, site="alpha", submitted="2026-01-01T00:00:00Z", job_number=number)
        submissions.record_intent(folder, number, load_site("alpha"), ())
        run_folder.write_record(submissions.job_dir(folder, number) / "job.json", ref)
        run_folder.write_record(folder / "job.json", ref)
    attempt_exit = run_folder.AttemptExit(job_id="5", exit_code=143, ended="2026-01-01T00:00:00Z")
    run_folder.write_record(folder / "attempts" / "0" / "exit.json", attempt_exit)
    decided = Decision(attempt="0", action="resubmit", kind="preempted", reason="preempted")
    run_folder.write_record(folder / "attempts" / "0" / "decision.json", decided)
    return folder


def say(word: str, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Says:
    slurm: Any = Says(word)
    slurm.run_dir = run_dir
    monkeypatch.setattr(slurm_query, "slurm_cache", slurm)
    monkeypatch.setattr(cancel_run, "client", lambda site: slurm)
    return slurm  # type: ignore[no-any-return]


def test_a_run_is_its_newest_job(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """How an attempt of an earlier job ended is not how the run is, whether Slurm is asked or not."""
    say("PENDING", run_dir, monkeypatch)
    run = status.run_status(run_dir, load_site("alpha"))
    assert (run.state, run.job_id, run.exit_code, run.is_over) == ("PENDING", "6", None, False)
    assert status.run_status(run_dir, load_site("alpha"), query_slurm=False).state == "UNKNOWN"


def test_when_a_run_was_created(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As its folder was made: not with its newest job, nor only once Slurm has taken one."""
    say("RUNNING", run_dir, monkeypatch)
    assert status.run_status(run_dir, load_site("alpha")).created == "2026-01-01T00:00:00Z"  # the folder does not say
    run_folder.append_event(run_dir, "created", site="alpha")
    t = run_folder.read_record(run_dir / "job.json", run_folder.JobRef).submitted  # type: ignore[union-attr]
    assert status.run_status(run_dir, load_site("alpha")).created > t
    (run_dir / "job.json").unlink()
    assert status.run_status(run_dir, load_site("alpha"), query_slurm=False).created > t


@pytest.mark.parametrize("word", ["UNKNOWN", "PENDING"])
def test_what_has_just_begun_is_known_before_slurm_says_so(
    word: str, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job just submitted waits; one whose script has just begun runs; for what is older Slurm's word stands."""
    say(word, run_dir, monkeypatch)
    now, old = timestamps.now_rfc3339(), "2026-01-01T00:00:00Z"
    ref = run_folder.JobRef(job_id="6", site="alpha", submitted=now, job_number=1)
    run_folder.write_record(run_dir / "job.json", ref)
    assert status.run_status(run_dir, load_site("alpha")).state == "PENDING"
    run_folder.write_record(run_dir / "job.json", replace(ref, submitted=old))
    assert status.run_status(run_dir, load_site("alpha")).state == word
    for job_id, started, state in (("5", now, word), ("6", now, "RUNNING"), ("6", old, word)):
        start = AttemptStart(
            attempt="1",
            job_number=1,
            job_id=job_id,
            cluster="",
            restart_count=0,
            node_list="n1",
            nodes=1,
            started=started,
        )
        run_folder.write_record(run_dir / "attempts" / "1" / "start.json", start)
        assert status.run_status(run_dir, load_site("alpha")).state == state, (job_id, started)


def test_the_verdict_is_what_counts(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever Slurm still believes; and it is not even asked."""
    slurm = say("RUNNING", run_dir, monkeypatch)
    monkeypatch.setattr(slurm, "require_states", None)
    apply_decision.write_verdict(run_dir, "memory", "CUDA out of memory", 1)
    run = status.run_status(run_dir, load_site("alpha"))
    assert (run.state, run.exit_code, run.cause, run.is_over) == ("OUT_OF_MEMORY", 1, "memory", True)
    assert run.reason == "CUDA out of memory"


def test_cancel_is_asked_for_first(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is on disk before Slurm is told, is the verdict only after, ends every job, and again does no harm: by then
    the ids may be other jobs', and only those of the run's names are ended."""
    slurm = say("RUNNING", run_dir, monkeypatch)
    cancel_run.cancel_run(run_dir, load_site("alpha"))
    assert (slurm.ended, slurm.named, slurm.was_there) == (["5", "6"], [], [True, False])
    assert not (run_dir / "cancel.json").exists()
    cancel_run.cancel_run(run_dir, load_site("alpha"))
    assert (slurm.ended, slurm.named, slurm.was_there) == (["6"], ["r", "r.1"], [False, True])
    assert apply_decision.read_verdict(run_dir).kind == "cancelled"  # type: ignore[union-attr]


def test_a_cancel_that_slurm_has_not_taken(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A silent Slurm: it stays asked for, is shown as that, and the next one who continues the run carries it out."""
    slurm = say("RUNNING", run_dir, monkeypatch)
    slurm.refuses = Unreachable("Unable to contact slurm controller")
    with pytest.raises(Unreachable) as caught:
        cancel_run.cancel_run(run_dir, load_site("alpha"))
    assert "`pit launch tick --site alpha`" in caught.value.hint
    assert slurm.refuses.hint == "", "an error that was raised is not changed"
    run = status.run_status(run_dir, load_site("alpha"))
    assert (run.state, run.is_over, bool(run.cancel_requested)) == ("RUNNING", False, True)
    slurm.refuses = None
    (run_dir / "attempts").mkdir(exist_ok=True)
    (run_dir / "script.sbatch").touch()
    done = wait.try_resume(run_dir, load_site("alpha"), lambda _: None)
    assert done is not None
    assert (done.action, slurm.ended) == ("stop", ["5", "6"])
    run = status.run_status(run_dir, load_site("alpha"))
    assert (run.state, run.is_over, run.cancel_requested) == ("CANCELLED", True, "")


def test_a_cancel_that_slurm_refuses(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left of it, and the run goes on; so it does when one was asked for by somebody else than its owner."""
    slurm = say("RUNNING", run_dir, monkeypatch)
    slurm.refuses = denied()
    with pytest.raises(ClusterError):
        cancel_run.cancel_run(run_dir, load_site("alpha"))
    run = status.run_status(run_dir, load_site("alpha"))
    assert (run.state, run.is_over, run.cancel_requested) == ("RUNNING", False, "")
    assert not (run_dir / "cancel.json").exists()
    if os.geteuid() == 0:
        run_folder.write_record(run_dir / "cancel.json", cancel_request.CancelRequest(t=timestamps.now_rfc3339()))
        os.chown(run_dir / "cancel.json", 12345, -1)
        assert not status.run_status(run_dir, load_site("alpha")).cancel_requested


@pytest.mark.parametrize(
    "error", [ClusterError("Could not establish a configuration source"), ToolMissing('"scancel" is not installed')]
)
def test_a_failure_that_is_no_refusal_leaves_a_cancel_asked_for(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, error: ClusterError
) -> None:
    """A cluster whose configuration is away for a while has refused nothing: it is tried again by whoever comes."""
    slurm = say("RUNNING", run_dir, monkeypatch)
    (run_dir / "script.sbatch").touch()
    (run_dir / "attempts").mkdir(exist_ok=True)
    slurm.refuses = error
    for attempt in (cancel_run.cancel_run, resume_run):
        with pytest.raises(PitError):
            attempt(run_dir, load_site("alpha"))
        assert status.run_status(run_dir, load_site("alpha")).cancel_requested
    slurm.refuses = None
    assert resume_run(run_dir, load_site("alpha")).action == "stop"


def test_a_run_that_has_finished_does_not_go_on(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether its cancel was refused before, or its jobs' once more, though it has no verdict yet."""
    slurm = say("COMPLETED", run_dir, monkeypatch)
    run_folder.write_record(
        run_dir / "attempts" / "0" / "exit.json",
        run_folder.AttemptExit(job_id="6", exit_code=0, ended=timestamps.now_rfc3339()),
    )
    slurm.refuses = denied()
    with pytest.raises(ClusterError):
        cancel_run.cancel_run(run_dir, load_site("alpha"))
    assert not (run_dir / "cancel.json").exists()
    run_folder.write_record(
        run_dir / "cancel.json",
        cancel_request.CancelRequest(t=timestamps.now_rfc3339(), refused_by_slurm="Access/permission denied"),
    )
    run = status.run_status(run_dir, load_site("alpha"))
    assert (run.state, "refused" in run.reason) == ("COMPLETED", False)


def test_a_cancel_that_slurm_refuses_later(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused when whoever looks after the run carries it out: told once, shown with the reason, not tried again."""
    slurm = say("RUNNING", run_dir, monkeypatch)
    slurm.refuses = Unreachable("Unable to contact slurm controller")
    with pytest.raises(Unreachable):
        cancel_run.cancel_run(run_dir, load_site("alpha"))
    (run_dir / "script.sbatch").touch()
    slurm.refuses = denied()
    with pytest.raises(ClusterError, match="denied"):
        resume_run(run_dir, load_site("alpha"))
    run = status.run_status(run_dir, load_site("alpha"))
    assert (run.state, run.cancel_requested) == ("RUNNING", "")
    assert run.reason.endswith("Access/permission denied")
    slurm.refuses = None
    monkeypatch.setattr(slurm_query, "client", lambda site: slurm)
    assert resume_run(run_dir, load_site("alpha")).action == "untouched"
    assert slurm.ended == [""]
    cancel_run.cancel_run(run_dir, load_site("alpha"))
    assert status.run_status(run_dir, load_site("alpha")).state == "CANCELLED"


@pytest.mark.parametrize("exit_code", [0, 1])
def test_what_ends_after_its_cancel_was_asked_for(run_dir: Path, exit_code: int) -> None:
    """The job itself writes the verdict at its next end: nothing follows but that; one that has finished has."""
    run_folder.write_record(run_dir / "cancel.json", cancel_request.CancelRequest(t=timestamps.now_rfc3339()))
    cause = Cause(attempt="0", kind="node" if exit_code else "succeeded", confidence="certain", reason="it ended")
    decided = Decision(attempt="0", action="resubmit" if exit_code else "done", kind=cause.kind, reason="it ended")
    apply_decision.apply_decision(
        run_dir, load_plan(run_dir), load_site("alpha"), cause, decided, in_job=False, job=None
    )
    verdict = apply_decision.read_verdict(run_dir)
    assert verdict is not None
    assert (verdict.state, verdict.code) == (("stopped", "cancelled") if exit_code else ("succeeded", "succeeded"))
    assert not (run_dir / "cancel.json").exists()


def test_why_a_job_waits(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm's reason and expected start are part of the record; one that is held is not waited for."""
    slurm = say("PENDING", run_dir, monkeypatch)
    slurm.waits = replace(slurm.waits, reason="Resources", start="2026-01-02T00:00:00Z")
    run = status.run_status(run_dir, load_site("alpha"))
    assert (run.pending_reason, run.expected_start) == ("Resources", "2026-01-02T00:00:00Z")
    start = AttemptStart(
        attempt="1",
        job_number=1,
        job_id="6",
        cluster="",
        restart_count=0,
        node_list="n1",
        nodes=1,
        started=timestamps.now_rfc3339(),
    )
    run_folder.write_record(run_dir / "attempts" / "1" / "start.json", start)
    assert status.run_status(run_dir, load_site("alpha")).state == "RUNNING"
    slurm.waits = replace(slurm.waits, reason="launch_failed_requeued_held")
    assert status.run_status(run_dir, load_site("alpha")).state == "PENDING"  # however lately it ran
    monkeypatch.setattr(wait.RunPoller, "poll", lambda _: status.run_status(run_dir, load_site("alpha")))
    with pytest.raises(ClusterError) as caught:
        wait.wait_for_run(run_dir, load_site("alpha"), lambda _: None, lambda _: None)
    assert "scontrol release 6" in caught.value.hint
    heard: list[str] = []
    assert len(list(follow_runs.poll_runs([run_dir], load_site("alpha"), heard.append, every_s=0))) == 1
    assert len(heard) == 1
    # What Slurm said before the watch began may be over: whoever releases a job and then watches it waits for it.
    slurm.waits = replace(slurm.waits, age_s=3.0)
    rounds = follow_runs.poll_runs([run_dir], load_site("alpha"), heard.append, every_s=0)
    assert [len(next(rounds)) for _ in range(3)] == [1, 1, 1]


def test_a_damaged_end_of_an_attempt(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty exit.json, as a full disk leaves it, hides nothing that Slurm knows, and is named."""
    say("RUNNING", run_dir, monkeypatch)
    (run_dir / "attempts" / "0" / "exit.json").write_bytes(b"")
    run = status.run_status(run_dir, load_site("alpha"))
    assert (run.state, run.reason) == ("RUNNING", "attempts/0/exit.json is empty, as a full disk leaves a file")
    assert status.run_status(run_dir, load_site("alpha"), query_slurm=False).state == "UNKNOWN"
    assert cancel_run.cancel_run(run_dir, load_site("alpha")) is None
    assert status.run_status(run_dir, load_site("alpha")).state == "CANCELLED"


def test_what_is_over_is_not_cancelled_again(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm is not called for a run that has ended by itself; that it was so is the answer."""
    slurm = say("COMPLETED", run_dir, monkeypatch)
    verdict = apply_decision.write_verdict(run_dir, "memory", "CUDA out of memory", 1)
    assert cancel_run.cancel_run(run_dir, load_site("alpha")) == verdict
    assert (slurm.ended, apply_decision.read_verdict(run_dir)) == ([""], verdict)


def test_only_changes_are_told(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record when a run is first seen, and when its state, job, attempt or cause is another; not for a step."""
    say("RUNNING", run_dir, monkeypatch)
    run = status.run_status(run_dir, load_site("alpha"))
    rows = [run, replace(run, steps=9), replace(run, steps=10, attempts=2), replace(run, steps=12, attempts=2)]
    assert list(follow_runs.changed_runs(iter([[row] for row in rows]))) == [rows[0], rows[2]]


def test_watch_continues_a_run_that_was_never_submitted(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run without a job is resumed, so that the watch ends, once its submitter has had the time to go on."""
    say("UNKNOWN", run_dir, monkeypatch)
    shutil.rmtree(run_dir / "jobs")
    (run_dir / "job.json").unlink()
    (run_dir / "jobs").mkdir()
    resumed: list[Path] = []

    def resume(path: Path, *_: object) -> None:
        resumed.append(path)
        apply_decision.write_verdict(path, "succeeded")

    monkeypatch.setattr(wait, "try_resume", resume)
    rounds = follow_runs.poll_runs([run_dir], load_site("alpha"), lambda _: None, every_s=0)
    assert [next(rounds)[0].state, next(rounds)[0].state, resumed] == ["UNKNOWN", "UNKNOWN", []]
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 1200)
    assert [run.state for (run,) in rounds] == ["COMPLETED"]
    assert resumed == [run_dir]


def test_cancel_before_the_job_is_known(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A submission that nobody has heard of is looked for, and its job ended; with no job at all the verdict holds."""
    slurm = say("PENDING", run_dir, monkeypatch)
    (run_dir / "job.json").unlink()
    for number in (0, 1):
        (submissions.job_dir(run_dir, number) / "job.json").unlink()
    ref = run_folder.JobRef(job_id="6", site="alpha", submitted="2026-01-01T00:00:00Z", job_number=1)
    monkeypatch.setattr(exactly_once, "find_submitted", lambda run_dir, site, number: ref if number == 1 else None)
    cancel_run.cancel_run(run_dir, load_site("alpha"))
    assert slurm.ended == ["6"]
    monkeypatch.setattr(exactly_once, "find_submitted", lambda run_dir, site, number: None)
    cancel_run.cancel_run(run_dir, load_site("alpha"))
    assert apply_decision.read_verdict(run_dir).kind == "cancelled"  # type: ignore[union-attr]


def test_wait_outlasts_a_slurm_that_forgets(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`resume` knows after ten minutes whether the job is over: until then its run is kept, unless time is up."""
    say("UNKNOWN", run_dir, monkeypatch)
    run = replace(status.run_status(run_dir, load_site("alpha"), query_slurm=False), state="UNKNOWN")
    clock_s = [0.0]

    class Forgets:
        lost = True

        def __init__(self, *_: object) -> None: ...

        def poll(self) -> run_folder.RunRecord:
            return run if clock_s[0] < 700 else replace(run, state="COMPLETED", is_over=True)

    requested: list[float] = []
    monkeypatch.setattr(wait, "RunPoller", Forgets)
    monkeypatch.setattr(wait, "try_resume", lambda *_: requested.append(clock_s[0]))
    monkeypatch.setattr(wait.time, "monotonic", lambda: clock_s[0])
    monkeypatch.setattr(wait.time, "sleep", lambda s: clock_s.__setitem__(0, clock_s[0] + s))
    assert wait.wait_for_run(run_dir, load_site("alpha"), lambda _: None, lambda _: None).is_over
    assert len(requested) < 30, "each of them asks slurmctld"
    clock_s[0] = 0.0
    with pytest.raises(TimeoutError):
        wait.wait_for_run(run_dir, load_site("alpha"), lambda _: None, lambda _: None, 45.0)
    assert clock_s[0] < 47


@pytest.mark.parametrize("by", ["wait", "watch"])
def test_a_full_disk_is_told_while_it_is_waited_for(run_dir: Path, monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    """Once, with the file: only a person can make room, and a run that waits in silence seems to hang."""
    say("FAILED", run_dir, monkeypatch)
    heard: list[str] = []
    tries = iter(range(3))

    def full(run_dir: Path, _: object) -> None:
        if next(tries) == 2:
            apply_decision.write_verdict(run_dir, "storage", "no space left", 1)
        raise NoSpace("no space left", where=str(run_dir / "decision.json"), hint="free space there")

    monkeypatch.setattr(wait, "resume_run", full)
    monkeypatch.setattr(wait.time, "sleep", lambda _: None)
    monkeypatch.setattr(follow_runs, "_RESUME_AGAIN_S", 0.0)
    monkeypatch.setattr(wait.RunPoller, "poll", lambda _: status.run_status(run_dir, load_site("alpha")))
    if by == "wait":
        assert wait.wait_for_run(run_dir, load_site("alpha"), lambda _: None, heard.append).is_over
    else:
        assert len(list(follow_runs.poll_runs([run_dir], load_site("alpha"), heard.append, every_s=0))) == 4
    assert len([line for line in heard if "decision.json" in line]) == 1
