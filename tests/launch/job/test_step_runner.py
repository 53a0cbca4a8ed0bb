"""A step that is attended: heard, bounded when it fails, ended when it stands still, with the stacks of its ranks."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pitools.core import subprocesses
from pitools.launch import exit_codes
from pitools.launch.job import fencing
from pitools.launch.job.step_runner import StderrRelay
from pitools.launch.job.step_runner import run_step as attend_step
from pitools.launch.probes import stacks, unreachable_nodes
from pitools.launch.rank import failure_record
from pitools.launch.recovery import slurm_query
from pitools.launch.submission import grant, submissions
from pitools.run import attempt_records as records
from pitools.run import run_folder
from pitools.site.schema import Site
from pitools.slurm.transport import Transport

STUCK = """
import os, sys, time
from pathlib import Path
from pitools.launch.probes import stacks
from pitools.run import run_folder
from pitools.site.schema import Site
attempt = Path(os.environ["PIT_ATTEMPT_DIR"])
stacks.register_handler(attempt, 3)
rank = run_folder.RankRecord(rank=3, world_size=4, local_rank=0, node="here", pid=os.getpid(), coordinator="", data={})
run_folder.write_record(attempt / "ranks" / "3.json", rank)
def waits_for_ever():
    (attempt / "waits").write_text("for ever")
    time.sleep(600)
waits_for_ever()
"""


@pytest.fixture
def attempt(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "attempts" / "0"
    (path / "logs").mkdir(parents=True)
    yield path
    for pid in slurm_query.orphan_pids(path):  # of a test that failed
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def attend(attempt: Path, *argv: str) -> subprocess.Popen[bytes]:
    env = {**os.environ, "PIT_ATTEMPT_DIR": str(attempt), "PIT_RUN_DIR": str(attempt.parent.parent)}
    words = [sys.executable, "-m", "pitools.launch.job", "step", "ranks", "--", *argv]
    with (attempt / "said").open("wb") as output:
        return subprocess.Popen(words, env=env, stderr=output)


def until(path: Path, text: str = "") -> None:
    for _ in range(400):
        if path.exists() and (output := path.read_text()) and text in output:
            return
        time.sleep(0.05)
    raise AssertionError(f"{path.name} did not come")


def test_what_it_says_is_kept_with_its_time(attempt: Path) -> None:
    """The step's messages are in the attempt's srun.err and in the job's output, the code is the step's."""
    process = attend(attempt, "bash", "-c", "echo srun: hello >&2; echo -n half >&2; exit 4")
    assert process.wait() == 4
    text = (attempt / "said").read_text()
    assert (attempt / "logs" / "srun.err").read_text() == text
    assert [line.split(" ", 1)[1] for line in text.splitlines()] == ["srun: hello", "half"]
    assert [path.name for path in (attempt / "logs").iterdir()] == ["srun.err"]


@pytest.mark.parametrize("said", ["srun: error: n2: task 1: Killed", ""])
def test_a_step_that_has_failed_ends(attempt: Path, said: str) -> None:
    """A step that hangs on after a rank has failed, as srun says or the rank itself, is told to end soon."""
    if not said:
        (attempt / "first_failure").write_text("3 1 n2\n")
    began = time.monotonic()
    code = f"trap 'exit 77' TERM; echo '{said}' >&2; while :; do sleep 0.1; done"
    process = attend(attempt, "bash", "-c", code)
    assert process.wait(60) == 77  # told, and not killed later for want of an answer
    assert time.monotonic() - began > 2.5


def test_usr2_is_passed_on(attempt: Path) -> None:
    """srun tells the ranks; the signal is in the record."""
    code = f"trap 'exit 5' USR2; echo > {attempt}/ready; echo x >> {attempt}/ready; while :; do sleep 0.05; done"
    process = attend(attempt, "bash", "-c", code)
    until(attempt / "ready")
    process.send_signal(signal.SIGUSR2)
    assert process.wait(60) == 5
    assert "SIGUSR2" in (attempt / "signals.jsonl").read_text()


def test_a_signal_that_comes_before_the_step_is_passed_on(attempt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is heard before there is a process to tell."""
    start = subprocesses.start_detached

    def signalled(argv: list[str], **options: Any) -> subprocess.Popen[bytes]:
        process = start(argv, **options)
        until(attempt / "ready")
        os.kill(os.getpid(), signal.SIGUSR2)
        return process

    monkeypatch.setenv("PIT_RUN_DIR", str(attempt.parent.parent))
    monkeypatch.setattr(subprocesses, "start_detached", signalled)
    code = f"trap 'exit 5' USR2; echo x > {attempt}/ready; for i in {{1..200}}; do sleep 0.05; done"
    assert attend_step(["bash", "-c", code], attempt, name="other") == 5


def test_a_standstill_is_ended_and_named(attempt: Path) -> None:
    """Steps that stop come to HUNG, hang.json, and no process."""
    (attempt.parent.parent / "plan.json").write_text('{"request":{"watch":{"min_stall":"1s","hang_factor":2}}}')
    code = (
        "import sys, time; from pathlib import Path; from pitools.run.steps import StepLog\n"
        f"at = Path({str(attempt)!r}); log = StepLog(at / 'made', 0)\n"
        "for i in range(3): log.write(step=i, loss=1, wall_s=.1, input_s=0, compute_s=0, comm_s=0, rank_samples=1)\n"
        "(at / 'made').rename(at / 'steps')  # however long they took to write\n"
        "time.sleep(600)"
    )
    process = attend(attempt, sys.executable, "-c", code)
    assert process.wait(60) == exit_codes.HUNG
    hang = run_folder.read_record(attempt / "hang.json", records.HangReport)
    assert hang is not None
    assert hang.step == 2


def test_stacks_come_from_inside_and_outside(attempt: Path) -> None:
    """faulthandler's at least, py-spy's where it is installed; only of a process that is this attempt's rank."""
    env = {**os.environ, "PIT_ATTEMPT_DIR": str(attempt), "SLURM_PROCID": "3"}
    process = subprocess.Popen([sys.executable, "-c", STUCK], env=env)
    try:
        until(attempt / "waits")
        assert stacks.dump_here(attempt, "elsewhere") == []
        assert stacks.dump_here(attempt, "here") == [3]
        until(attempt / "stacks" / "3.txt", "in waits_for_ever")  # faulthandler's, which nobody waits for longer
        text = (attempt / "stacks" / "3.txt").read_text()
        assert "waits_for_ever (<string>" in text  # py-spy's, which is among the tests' requirements
        assert process.poll() is None
        rank_record = run_folder.RankRecord(
            rank=1, world_size=4, local_rank=0, node="here", pid=os.getpid(), coordinator="", data={}
        )  # its number was given to another process
        run_folder.write_record(attempt / "ranks" / "1.json", rank_record)
        assert stacks.dump_here(attempt, "here") == [3]
    finally:
        process.kill()
        process.wait()


def test_a_py_spy_that_fails(attempt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its error is no stack: the process's state is recorded, and a program with faulthandler alone writes its own."""
    py_spy = tmp_path / "py-spy"
    py_spy.write_text("#!/bin/sh\necho Permission denied >&2; exit 1\n")
    py_spy.chmod(0o755)
    monkeypatch.setattr("shutil.which", lambda *_, **__: str(py_spy))
    program = STUCK.replace("stacks.register_handler(attempt, 3)", "")
    env = {**os.environ, "PIT_ATTEMPT_DIR": str(attempt), "SLURM_PROCID": "3"}
    argv = [sys.executable, "-X", "faulthandler", "-c", program]
    process = subprocess.Popen(argv, env=env, stderr=subprocess.PIPE, text=True)
    try:
        until(attempt / "waits")
        stacks.dump_here(attempt, "here")
        assert "in waits_for_ever" in process.communicate(timeout=60)[1]
        assert process.returncode == -signal.SIGABRT
        assert "State:" in (attempt / "stacks" / "3.txt").read_text()
    finally:
        process.kill()
        process.wait()


def test_a_failure_is_told_by_name(attempt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exception, its first line, its place; the same failure has the same fingerprint, and a code is a code."""
    monkeypatch.setenv("PIT_ATTEMPT_DIR", str(attempt))
    monkeypatch.setenv("SLURMD_NODENAME", "n1")

    def fails(rank: int, error: BaseException) -> records.RankFailure:
        monkeypatch.setenv("SLURM_PROCID", str(rank))
        with pytest.raises(type(error)), failure_record.record_failure():
            raise error
        record = run_folder.read_record(attempt / "failures" / f"{rank}.json", records.RankFailure)
        assert record is not None
        return record

    full = fails(0, OSError(28, "No space left on device"))
    assert (full.error, full.message, full.exit_code) == ("OSError", "[Errno 28] No space left on device", 1)
    first, second = fails(1, MemoryError()), fails(2, msgspec.ValidationError("line one\nline two"))
    assert (first.error, second.error, second.message) == ("MemoryError", "msgspec.ValidationError", "line one")
    assert fails(3, ValueError("step 17 at 0x7f00")).fingerprint == fails(4, ValueError("step 5 at 0x1")).fingerprint
    assert "in fails" in first.trace
    end = fails(5, SystemExit(7))
    assert (end.error, end.exit_code) == ("", 7)
    assert len(fails(6, ValueError("x" * 9000)).trace) <= 4200
    assert (attempt / "first_failure").read_text() == "1 0 n1\n"
    monkeypatch.setenv("SLURM_PROCID", "8")
    with pytest.raises(SystemExit), failure_record.record_failure():
        raise SystemExit(143)
    assert not (attempt / "failures" / "8.json").exists()


def test_a_node_that_does_not_answer_is_written_down(
    attempt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the job's nodes, those whose slurmd refuses; where the controller is away nothing is said of any."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as connection:
        connection.bind(("127.0.0.1", 0))
        lines = [
            f"NodeName=n{number} Arch=x86_64 NodeAddr=127.0.0.1 NodeHostName=vm Port={item.getsockname()[1]} Version=1"
            for number, item in enumerate((server, connection))
        ]
        (tmp_path / "scontrol").write_text("#!/bin/sh\nprintf '%s\\n' '" + "' '".join(lines) + "'\n")
        (tmp_path / "scontrol").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        (actual,) = unreachable_nodes.probe_slurmds(attempt, "n[0-1]")
    assert (actual.node, actual.error) == ("n1", "Connection refused")
    assert run_folder.read_record(attempt / "unreachable" / "n1.json", unreachable_nodes.UnreachableNode) == actual
    (tmp_path / "scontrol").write_text("#!/bin/sh\nexit 1\n")
    assert unreachable_nodes.probe_slurmds(attempt, "n[0-1]") == []


@pytest.mark.parametrize(
    ("states", "begun", "lost"),
    [
        (("DOWN*", "IDLE"), "2020", ["n0"]),
        (("IDLE", "MIXED+NOT_RESPONDING"), "2030", ["n1"]),
        (("IDLE", "IDLE"), "2030", ["n0"]),
        (("IDLE", "IDLE"), "2020", []),
        (("IDLE+CLOUD+POWERED_DOWN", "IDLE+CLOUD+POWERING_DOWN"), "2020", []),
        (("DOWN+CLOUD+POWERED_DOWN", "ALLOCATED+CLOUD+NOT_RESPONDING+POWERING_UP"), "2020", ["n0"]),
        (("IDLE+CLOUD+POWERED_DOWN", "IDLE"), "None", []),
    ],
)
def test_which_node_it_was_is_asked_of_slurm(
    attempt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, states: tuple[str, str], begun: str, lost: list[str]
) -> None:
    """One that is down; else the job's first, whose slurmd began anew since; and none where nothing says so.

    A cloud's node that rests is not lost.
    """
    since = begun if begun == "None" else f"{begun}-01-01T00:00:00"
    lines = [
        f"NodeName=n{number} NodeAddr=10.0.0.1 State={state} Weight=1 SlurmdStartTime={since}"
        for number, state in enumerate(states)
    ]
    (tmp_path / "scontrol").write_text("#!/bin/sh\nprintf '%s\\n' '" + "' '".join(lines) + "'\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("SLURM_CONF", raising=False)
    start = records.AttemptStart(
        attempt="0",
        job_number=0,
        job_id="7",
        cluster="",
        restart_count=0,
        node_list="n[0-1]",
        nodes=2,
        started="2026-11-22T00:00:00.000Z",
    )
    assert [item.node for item in unreachable_nodes.nodes_lost_by_slurm(attempt, start, Transport())] == lost
    assert sorted(path.stem for path in (attempt / "unreachable").glob("*")) == lost


def test_after_a_failure_the_nodes_are_looked_at(attempt: Path, tmp_path: Path) -> None:
    """A node that has gone is known whatever its neighbours said first; after a good end nobody looks."""
    with socket.socket() as connection:
        connection.bind(("127.0.0.1", 0))
        line = (
            f"NodeName=n1 Arch=x86_64 NodeAddr=127.0.0.1 NodeHostName=vm Port={connection.getsockname()[1]} Version=1"
        )
        (tmp_path / "scontrol").write_text(f"#!/bin/sh\necho '{line}'\n")
        (tmp_path / "scontrol").chmod(0o755)
        env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "n1"}
        output = [sys.executable, "-m", "pitools.launch.job", "step", "ranks", "--", "sh", "-c"]
        env |= {"PIT_ATTEMPT_DIR": str(attempt), "PIT_RUN_DIR": str(attempt.parent.parent)}
        assert subprocess.run([*output, "exit 0"], env=env, check=False).returncode == 0
        assert not (attempt / "unreachable").exists()
        assert subprocess.run([*output, "exit 1"], env=env, check=False).returncode == 1
    assert [path.name for path in (attempt / "unreachable").iterdir()] == ["n1.json"]


@pytest.mark.usefixtures("as_root")
def test_storage_that_goes_does_not_hide_the_code(attempt: Path) -> None:
    """A run's folder that is read-only when the step has ended: its code is told all the same."""
    place = attempt.parent.parent
    command = f"mount --bind {place} {place} && mount -o remount,ro,bind {place} && exit 7"
    try:
        assert attend(attempt, "sh", "-c", command).wait(20) == 7
        with pytest.raises(OSError, match="Read-only"):
            (place / "probe").touch()
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_ranks_of_a_job_that_was_followed_up_are_ended(attempt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm gave their node up, and it computes on: two jobs of a run never train at once for long."""
    run_dir = attempt.parent.parent
    (run_dir / "plan.json").write_text('{"request":{}}')
    for name, value in {"PIT_RUN_DIR": str(run_dir), "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": run_dir.name}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(fencing, "CHECK_EVERY_S", 0.3)
    submissions.record_intent(run_dir, 0, Site(name="s"), ())
    grant.claim(submissions.job_dir(run_dir, 0), "run.7")
    assert attend_step(["sleep", "1"], attempt, name="ranks") == 0, "it has the grant"
    threading.Timer(0.5, submissions.record_intent, [run_dir, 1, Site(name="s"), ()]).start()
    assert attend_step(["sleep", "60"], attempt, name="ranks") == 143
    assert "job 1 of the run has taken over" in (attempt / "logs" / "srun.err").read_text()


def test_ranks_of_a_folder_behind_a_link_are_found(tmp_path: Path) -> None:
    """A supervisor that reached the runs through a link started them; `resume` names their folder without it."""
    (tmp_path / "real" / "attempts" / "0").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    env = {**os.environ, "PIT_ATTEMPT_DIR": str(tmp_path / "link" / "attempts" / "0")}
    with subprocess.Popen(["sleep", "30"], env=env) as rank:
        try:
            assert slurm_query.orphan_pids(tmp_path / "real" / "attempts" / "0") == [rank.pid]
        finally:
            rank.kill()


def test_unreadable_output_does_not_end_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stale file handle of the log: the relay reads on when it is back."""
    relay = StderrRelay(tmp_path)
    relay.raw.write_text("first\n")

    class Stale:
        def read(self) -> bytes:
            raise OSError(errno.ESTALE, "Stale file handle")

    source = relay._source
    monkeypatch.setattr(relay, "_source", Stale())
    assert relay.relay() == b""
    monkeypatch.setattr(relay, "_source", source)
    assert relay.relay() == b"first\n"
    relay.close()
