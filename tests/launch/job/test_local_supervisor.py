"""A run without Slurm ends whole: nothing of it lives on, and its folder says how it ended."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from pitools.core import subprocesses
from pitools.core.errors import ClusterError, NoSpace, ToolMissing, TryLater
from pitools.launch import exit_codes
from pitools.launch import plan as planning
from pitools.launch.diagnosis import unstarted_jobs
from pitools.launch.job import local_supervisor
from pitools.launch.monitor import status
from pitools.launch.recovery import cancel_run, tick
from pitools.launch.recovery.resume import resume_run
from pitools.launch.request import RetryBudget
from pitools.launch.submission import local_process, submit
from pitools.run import run_folder
from pitools.run.attempt_records import Cause, HangReport
from pitools.site.load import load_site

# A supervisor is meant to outlive whoever started it.
pytestmark = pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")

MakePlan = Callable[..., planning.Plan]
Started = Callable[..., tuple[Path, run_folder.JobRef]]


@pytest.fixture
def started(make_plan: MakePlan) -> Iterator[Started]:
    """Starts runs on this machine, and ends what a failed test would leave."""
    jobs: list[run_folder.JobRef] = []

    def run(time_s: int = 60, **asked: object) -> tuple[Path, run_folder.JobRef]:
        plan = make_plan("local", snapshot=False, **asked)
        plan = msgspec.structs.replace(plan, job=msgspec.structs.replace(plan.job, time_s=time_s))
        run_dir = submit.submit_run(plan, load_site("local"))
        job = run_folder.read_record(run_dir / "job.json", run_folder.JobRef)
        assert job is not None
        jobs.append(job)
        return run_dir, job

    yield run
    for job in jobs:
        local_process.terminate_supervisor(job)
    for _ in range(200):
        if not any(local_process.is_alive(job) for job in jobs):
            return
        time.sleep(0.05)


def end_of(run_dir: Path) -> run_folder.AttemptExit:
    for _ in range(600):
        if record := run_folder.read_record(run_dir / "attempts" / "0" / "exit.json", run_folder.AttemptExit):
            return record
        time.sleep(0.05)
    raise AssertionError((run_dir / "supervisor.out").read_text())


def until(path: Path) -> None:
    for _ in range(600):
        if path.exists() and path.read_text():
            return
        time.sleep(0.05)
    raise AssertionError(f"{path.name} did not come")


def listens(run_dir: Path, number: int) -> None:
    """Waits until rank 0 passes a signal on to its program; before, it would end of it."""
    rank = run_folder.read_record(run_dir / "attempts" / "0" / "ranks" / "0.json", run_folder.RankRecord)
    assert rank is not None
    for _ in range(600):
        status = dict(line.split(":", 1) for line in Path(f"/proc/{rank.pid}/status").read_text().splitlines())
        if int(status["SigCgt"], 16) >> (number - 1) & 1:
            return
        time.sleep(0.05)
    raise AssertionError("it does not listen")


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_cancel_ends_the_program_too(started: Started, tmp_path: Path) -> None:
    """The program of a compound command is gone when exit.json is there, and so is one in a group of its own."""
    run_dir, _ = started(
        command="set -m; sleep 931 & echo $! > other; set +m; bash -c 'echo $$ > p; exec sleep 931'; :"
    )
    until(tmp_path / "p")
    cancel_run.cancel_run(run_dir, load_site("local"))
    end = end_of(run_dir)
    assert (end.state, end.exit_code) == ("CANCELLED", 143)
    assert not lives(int((tmp_path / "p").read_text()))
    assert not lives(int((tmp_path / "other").read_text()))


def test_a_run_is_continued_after_a_reboot(started: Started, tmp_path: Path) -> None:
    """A SIGTERM without a cancel, as of a machine that shuts down, is no end of the run: the next tick continues it."""
    run_dir, job = started(command="[ ! -e p ] || exit 0; touch p; echo > begun; sleep 931")
    until(tmp_path / "begun")
    local_process.terminate_supervisor(job)
    assert (end_of(run_dir).state, end_of(run_dir).exit_code) == ("PREEMPTED", 143)
    free(run_dir)
    (result,) = tick.tick_runs(run_dir.parent, load_site("local"), lambda *_: None)
    assert (result.action, result.cause) == ("resubmit", "preempted")
    until(run_dir / "verdict.json")
    assert status.run_status(run_dir, load_site("local")).state == "COMPLETED"


def test_a_run_is_cancelled_once_its_ranks_are_gone(started: Started, tmp_path: Path) -> None:
    """While a rank takes its time to end the cancel is but asked for; the verdict comes when nothing is left of it."""
    run_dir, _ = started(
        command="trap 'until [ -e end ]; do sleep 0.1; done; exit 0' TERM; echo $$ > p; while :; do sleep 0.1; done"
    )
    until(tmp_path / "p")
    listens(run_dir, signal.SIGTERM)
    site = load_site("local")
    assert cancel_run.cancel_run(run_dir, site) is None
    run = status.run_status(run_dir, site)
    assert (run.state, run.is_over, bool(run.cancel_requested)) == ("RUNNING", False, True)
    assert lives(int((tmp_path / "p").read_text()))
    (tmp_path / "end").touch()
    until(run_dir / "verdict.json")
    assert status.run_status(run_dir, site).state == "CANCELLED"
    assert not lives(int((tmp_path / "p").read_text()))


def test_cancel_ends_ranks_whose_supervisor_was_killed(started: Started, tmp_path: Path) -> None:
    """They are told to end, and the run is cancelled when they have: nobody else would."""
    run_dir, job = started(command="trap 'echo saved > saved; exit' TERM; echo $$ > p; while :; do sleep 0.1; done")
    until(tmp_path / "p")
    listens(run_dir, signal.SIGTERM)
    os.kill(job.pid, signal.SIGKILL)
    while local_process.is_alive(job):
        time.sleep(0.05)
    cancel_run.cancel_run(run_dir, load_site("local"))
    assert status.run_status(run_dir, load_site("local")).state == "CANCELLED"
    assert (tmp_path / "saved").exists()
    assert not lives(int((tmp_path / "p").read_text()))


def test_cancel_leaves_a_run_that_was_started_from_within(started: Started, tmp_path: Path) -> None:
    """It has a supervisor of its own, as what left the ranks' sessions before an orderly end has a life of its own."""
    (tmp_path / "b.toml").write_text('name = "b"\ncommand = "echo $$ > q; sleep 931"\ntime = "5m"\nsnapshot = false\n')
    pit = f"env PIT_RUNS={tmp_path} {sys.executable} -m pitools"
    run_dir, _ = started(
        command=f"setsid sleep 932 & echo $! > p; {pit} launch run b.toml --site local > b; sleep 931", time_s=600
    )
    until(tmp_path / "q")
    until(tmp_path / "b")
    inner = Path(json.loads((tmp_path / "b").read_text())["run_dir"])
    cancel_run.cancel_run(run_dir, load_site("local"))
    until(run_dir / "verdict.json")
    own = int((tmp_path / "p").read_text())
    assert (status.run_status(inner, load_site("local")).state, lives(own)) == ("RUNNING", True)
    os.kill(own, signal.SIGTERM)
    cancel_run.cancel_run(inner, load_site("local"))
    assert not lives(int((tmp_path / "q").read_text()))


def test_time_out_kills_a_program_that_does_not_listen(make_plan: MakePlan, tmp_path: Path) -> None:
    """A program that ignores SIGTERM is killed after the grace, and the state is TIMEOUT."""
    # Supervised from a process of the test's, because the grace of 30 s is a constant of the supervisor's.
    plan = make_plan(
        "local", snapshot=False, command="trap '' TERM; bash -c 'echo $$ > p; sleep 931; sleep 931'; sleep 931"
    )
    plan = msgspec.structs.replace(plan, job=msgspec.structs.replace(plan.job, time_s=2))
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "plan.json").write_bytes(msgspec.json.encode(plan))
    text = (
        "import sys; from pathlib import Path; from pitools.launch.job import local_supervisor; "
        "local_supervisor.local_process.KILL_GRACE_S = 1.0; sys.exit(local_supervisor.supervise(Path(sys.argv[1])))"
    )
    done = subprocesses.run([sys.executable, "-c", text, str(run_dir)], timeout_s=40, env={"PIT_PORTS": "22200-22327"})
    assert done.code == 143
    assert end_of(run_dir).state == "TIMEOUT"
    assert not lives(int((tmp_path / "p").read_text()))


def test_what_a_rank_leaves_behind_ends_with_the_run(started: Started, tmp_path: Path) -> None:
    """A server that a command started and forgot does not outlive a run that went well."""
    run_dir, _ = started(command="sleep 931 & echo $! > p")
    assert end_of(run_dir).state == "COMPLETED"
    assert not lives(int((tmp_path / "p").read_text()))


def test_usr2_reaches_the_program(started: Started, tmp_path: Path) -> None:
    """The supervisor passes it on, and the run goes on."""
    run_dir, job = started(command="(trap 'echo got >> saved' USR2; echo $BASHPID > p; sleep 1; sleep 1); cat saved")
    until(tmp_path / "p")
    listens(run_dir, signal.SIGUSR2)
    os.kill(job.pid, signal.SIGUSR2)
    assert end_of(run_dir).state == "COMPLETED"
    assert (tmp_path / "saved").read_text() == "got\n"


def test_the_warning_comes_before_the_limit(started: Started) -> None:
    """A program that saves at the signal it asked for has ended well before its time is up."""
    command = "trap 'echo saved; exit 0' USR2; while :; do sleep 0.1; done"
    run_dir, _ = started(time_s=30, command=command, signal="USR2@27")
    assert end_of(run_dir).state == "COMPLETED"
    assert (run_dir / "attempts" / "0" / "logs" / "0.out").read_text() == "saved\n"


def test_after_a_save_at_the_warning_the_next_supervisor_continues(started: Started, tmp_path: Path) -> None:
    """A program that saves and exits with a code of its own is not begun again in the little time that is left."""
    save = "echo 5 > $PIT_RUN_DIR/progress; exit 3"
    command = f"[ ! -e p ] || exit 0; touch p; trap '{save}' USR2; while :; do sleep 0.1; done"
    run_dir, _ = started(time_s=30, command=command, signal="USR2@27")
    assert (end_of(run_dir).state, end_of(run_dir).exit_code) == ("FAILED", 3)
    free(run_dir)
    cause = run_folder.read_record(run_dir / "attempts" / "0" / "cause.json", Cause)
    assert cause is not None
    assert (cause.kind, cause.progressed) == ("time-limit", True)
    assert (len(run_folder.attempt_dirs(run_dir)), (run_dir / "verdict.json").exists()) == (1, False)
    (result,) = tick.tick_runs(run_dir.parent, load_site("local"), lambda *_: None)
    assert (result.action, result.cause) == ("resubmit", "time-limit")
    until(run_dir / "verdict.json")
    assert status.run_status(run_dir, load_site("local")).state == "COMPLETED"


def test_a_cancel_at_once_is_a_cancel(started: Started) -> None:
    """However early it comes, the run says that it was cancelled."""
    for _ in range(3):
        run_dir, _ = started(command="sleep 931")
        cancel_run.cancel_run(run_dir, load_site("local"))
        until(run_dir / "verdict.json")
        assert status.run_status(run_dir, load_site("local")).state == "CANCELLED"


def test_the_first_failure_is_the_runs(started: Started) -> None:
    """Of two ranks that have both failed when they are looked at, the code of the first counts, not of the lowest."""
    command = "if [ $PIT_RANK = 1 ]; then exit 5; fi; until [ -s $PIT_ATTEMPT_DIR/first_failure ]; do :; done; exit 9"
    run_dir, _ = started(command=command, tasks_per_node=2)
    assert (end_of(run_dir).state, end_of(run_dir).exit_code) == ("FAILED", 5)


def test_a_run_of_another_host_is_not_judged(started: Started) -> None:
    """Elsewhere nobody can say whether the supervisor lives, and a cancel says where to go."""
    _, job = started(command="sleep 931")
    assert job.host == socket.gethostname()
    assert local_process.is_alive(job) is True
    away = msgspec.structs.replace(job, host="login9")
    assert local_process.is_alive(away) is None
    with pytest.raises(ClusterError, match="login9") as caught:
        local_process.terminate_supervisor(away)
    assert "login9" in caught.value.hint
    assert local_process.is_alive(job) is True
    local_process.terminate_supervisor(job)


def test_a_pid_that_was_given_to_another_is_not_the_run(started: Started) -> None:
    """The start time tells them apart."""
    run_dir, job = started(command="sleep 931")
    assert local_process.is_alive(msgspec.structs.replace(job, start_ticks=job.start_ticks + 1)) is False
    local_process.terminate_supervisor(job)
    end_of(run_dir)


def free(run_dir: Path) -> None:
    """Waits until the run has no supervisor."""
    for _ in range(600):
        job = run_folder.read_record(run_dir / "job.json", run_folder.JobRef)
        if not local_process.is_supervised(run_dir) and not (job and local_process.is_alive(job)):
            return
        time.sleep(0.05)
    raise AssertionError("its supervisor does not end")


def test_a_run_whose_submitter_was_killed_is_started(
    make_plan: MakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run folder without a supervisor is continued by a tick, after the time that its submitter may still need."""
    plan, site = make_plan("local", snapshot=False), load_site("local")
    run_dir = Path(plan.runs_dir) / "t-1"
    submit.create_run_dir(run_dir, plan, site, lambda _: None)

    def ticked() -> list[str]:
        return [result.action for result in tick.tick_runs(run_dir.parent, site, lambda *_: None)]

    assert ticked() == []
    with monkeypatch.context() as later:
        now = time.time()
        later.setattr(time, "time", lambda: now + 1200)
        assert ticked() == ["submitted"]
    assert end_of(run_dir).exit_code == 0
    free(run_dir)


def test_a_retry_waits_as_long_as_was_decided(make_plan: MakePlan, tmp_path: Path) -> None:
    """A supervisor with a wait begins no program before it is over, and hears a signal meanwhile."""
    plan, site = make_plan("local", snapshot=False, command="touch ran"), load_site("local")
    run_dir = Path(plan.runs_dir) / "t-1"
    submit.create_run_dir(run_dir, plan, site, lambda _: None)
    local_process.terminate_supervisor(local_process.start_job(run_dir, site, wait_s=3600.0))
    assert (end_of(run_dir).state, (tmp_path / "ran").exists()) == ("PREEMPTED", False)
    free(run_dir)


def test_whoever_was_killed_while_starting_it_starts_no_second(
    started: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A supervisor that no job.json names yet is the run's: it says so itself, and a resume leaves it alone."""
    run_dir, job = started(command="echo x >> begun; sleep 931")
    until(tmp_path / "begun")
    local_process.terminate_supervisor(job)
    end_of(run_dir)
    free(run_dir)
    data = (run_dir / "job.json").read_bytes()
    (run_dir / "verdict.json").unlink(missing_ok=True)
    site = load_site("local")
    second = local_process.start_supervisor(run_dir, site)  # and nobody wrote it down
    assert (run_dir / "job.json").read_bytes() == data
    assert resume_run(run_dir, site, force=True).action == "untouched"
    with pytest.raises(TryLater, match="has a supervisor"):
        local_process.start_supervisor(run_dir, site)
    until(run_dir / "attempts" / "1" / "start.json")
    named = run_folder.read_record(run_dir / "job.json", run_folder.JobRef)
    assert named is not None
    assert (named.pid, local_process.is_alive(named)) == (second.pid, True)
    assert resume_run(run_dir, site, force=True).action == "untouched"
    (run_dir / local_process.STARTING_MARK).unlink(missing_ok=True)
    monkeypatch.setattr(local_process, "LOCK_HANDOVER_S", 0.0)
    monkeypatch.setattr(local_supervisor, "_StopRequest", lambda _: None)  # whose signals are this process's
    assert local_supervisor.supervise(run_dir) == 75  # one that came all the same does nothing
    local_process.terminate_supervisor(named)
    free(run_dir)
    assert len(run_folder.attempt_dirs(run_dir)) == 2


def test_a_supervisor_is_followed_by_another(
    make_plan: MakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where jobs follow each other it starts its successor itself, which waits for its end, and has the run then."""
    (tmp_path / "solo.toml").write_text(f'name = "solo"\nscheduler = "none"\n[paths]\nruns = "{tmp_path}/runs"\n')
    monkeypatch.setenv("PIT_SITE_PATH", str(tmp_path))
    monkeypatch.setenv("PIT_RECOVER", "run")
    fault = "echo 'NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.'"
    command = f"[ ! -e again ] || exit 0; touch again; {fault}; exit 1"
    run_dir = submit.submit_run(make_plan("solo", snapshot=False, command=command), load_site("solo"))
    job = run_folder.read_record(run_dir / "job.json", run_folder.JobRef)
    until(run_dir / "verdict.json")
    free(run_dir)
    named = run_folder.read_record(run_dir / "job.json", run_folder.JobRef)
    assert job is not None
    assert named is not None
    assert named.pid != job.pid
    assert [path.name for path in run_folder.attempt_dirs(run_dir)] == ["0", "1"]


def test_supervisors_that_begin_nothing_come_to_an_end(started: Started, tmp_path: Path) -> None:
    """Each is counted, though none left an attempt; and the next one that can begins."""
    run_dir, job = started(command="true", retry=RetryBudget(unknown=1))
    local_process.terminate_supervisor(job)
    free(run_dir)
    for path in (run_dir / "verdict.json", *run_dir.glob("attempts/*/*.json")):
        path.unlink(missing_ok=True)
    shutil.rmtree(run_dir / "attempts")
    (run_dir / "attempts").write_text("no folder")  # nothing can begin there
    site = load_site("local")
    done = []
    for _ in range(4):
        done.append(resume_run(run_dir, site).action)
        free(run_dir)
    assert done == ["resubmit", "stop", "already_ended", "already_ended"]
    assert "pit: no attempt: " in unstarted_jobs.unstarted_causes(run_dir)[-1][1].reason
    (run_dir / "attempts").unlink()
    assert resume_run(run_dir, site, force=True).action == "resubmit"
    until(run_dir / "attempts" / "0" / "exit.json")
    assert end_of(run_dir).exit_code == 0


def test_a_supervisor_that_cannot_start_is_not_waited_for(
    make_plan: MakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it is gone its run is looked at: nobody waits for the time that a start may take."""
    bare = tmp_path / "python"
    bare.write_text("#!/bin/sh\necho No module named pitools >&2\nexit 1\n")
    bare.chmod(0o755)
    text = f'name = "solo"\nscheduler = "none"\n[paths]\nruns = "{tmp_path}/runs"\n'
    (tmp_path / "solo.toml").write_text(text)
    monkeypatch.setenv("PIT_SITE_PATH", str(tmp_path))
    plan = msgspec.structs.replace(make_plan("solo", snapshot=False), python=str(bare))
    monkeypatch.setattr(submit, "create_run_dir", lambda run_dir, plan, site, seed: made(run_dir, plan))

    def made(run_dir: Path, plan: planning.Plan) -> planning.Plan:
        (run_dir / "attempts").mkdir(parents=True)
        (run_dir / "plan.json").write_bytes(msgspec.json.encode(plan))
        return plan

    run_dir = submit.submit_run(plan, load_site("solo"))
    job = run_folder.read_record(run_dir / "job.json", run_folder.JobRef)
    assert job is not None
    while local_process.is_alive(job):
        time.sleep(0.05)
    done = resume_run(run_dir, load_site("solo"))
    assert (done.action, done.cause) == ("stop", "program")


def test_the_interpreter_is_the_sites(make_plan: MakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks run under `paths.python`, as they do in Slurm; one that is not there is refused at once."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/called\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    text = f'name = "solo"\nscheduler = "none"\n[paths]\nruns = "{tmp_path}/runs"\npython = "%s"\n'
    (tmp_path / "solo.toml").write_text(text % python)
    monkeypatch.setenv("PIT_SITE_PATH", str(tmp_path))
    run_dir = submit.submit_run(make_plan("solo", snapshot=False), load_site("solo"))
    assert end_of(run_dir).exit_code == 0
    assert "pitools.launch.rank.main plan" in (tmp_path / "called").read_text()
    (tmp_path / "solo.toml").write_text(text % (tmp_path / "none"))
    with pytest.raises(ToolMissing):
        submit.submit_run(make_plan("solo", snapshot=False), load_site("solo"))


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], HangReport]], tuple[int, int]]:
    """Runs an attempt of one rank that never ends, with this in the place of the hang watch: exit code and rank."""

    def run(due: Callable[[], HangReport]) -> tuple[int, int]:
        monkeypatch.setattr(local_process, "SUPERVISOR_SIGNALS", ())  # whose signals are this process's
        stopper, looker = local_supervisor._StopRequest(60.0), SimpleNamespace(poll_if_due=due)
        for name in ("_check_machine", "_stage_datasets"):
            monkeypatch.setattr(local_supervisor, name, lambda *_: 0)
        wait = local_supervisor._wait_for_ranks
        monkeypatch.setattr(local_supervisor, "_run_ranks", lambda *_: wait(stopper, tmp_path, hang_detector=looker))  # type: ignore[arg-type]
        stopper.children = [subprocess.Popen(["sleep", "931"], start_new_session=True)]
        try:
            code = local_supervisor._run_attempt(None, tmp_path, tmp_path, stopper)  # type: ignore[arg-type]
        except OSError as error:
            code = error.errno or 0
        return code, stopper.children[0].wait(10)

    return run


def test_a_full_disk_does_not_keep_a_hang_from_ending(
    watched: Callable[..., tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks are ended, and the code says what it was, though the hang record cannot be written."""

    def full(path: Path, _record: object, **_: object) -> None:
        raise NoSpace("no space left", where=str(path))

    monkeypatch.setattr(run_folder, "write_record", full)
    hang = HangReport(t="", step=1, stalled_s=1.0, median_step_s=1.0)
    assert watched(lambda: hang) == (exit_codes.HUNG, -signal.SIGKILL)


def test_a_supervisor_that_fails_leaves_no_ranks(watched: Callable[..., tuple[int, int]]) -> None:
    """Whatever it was: nobody else would end them."""

    def stale() -> HangReport:
        raise OSError(errno.ESTALE, "Stale file handle")

    assert watched(stale) == (errno.ESTALE, -signal.SIGKILL)
