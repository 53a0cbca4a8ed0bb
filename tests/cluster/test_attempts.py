"""Attempts on a real Slurm: what fails is tried again in the same job, and ends with the right code."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pitools.launch import plan as planning
from pitools.launch.request import HangWatch, Request
from pitools.launch.submission import submit
from pitools.run import attempt_records as records
from pitools.run import run_folder
from pitools.site import connect, load

pytestmark = pytest.mark.slurm

# Steps of 0.1 s; in the first attempt rank 1 stops at a step, or waits there to be killed, and rank 0 waits for it.
LOOP = """\
import os, signal, time
from pathlib import Path
from pitools.run.steps import StepLog

def main(at):
    attempt, rank = Path(os.environ["PIT_ATTEMPT_DIR"]), int(os.environ["PIT_RANK"])
    log = StepLog(attempt / "steps", rank)
    for step in range(8):
        if step == at and attempt.name == "0" and rank == 1:
            time.sleep(600)
        log.write(step=step, loss=1, wall_s=0.1, input_s=0, compute_s=0.1, comm_s=0, rank_samples=1)
        if step == at and attempt.name == "0":
            time.sleep(600)
        time.sleep(0.1)
    log.close()
"""


# Name → what is asked for besides.
REQUESTS: dict[str, dict[str, Any]] = {
    "requeued": {"command": "[ $(basename $PIT_ATTEMPT_DIR) != 0 ] || sleep 60"},
    "killed": {"entry": "loop:main", "args": {"at": 3}},
    "hangs": {"entry": "loop:main", "args": {"at": 3}, "watch": HangWatch(min_stall="1s", hang_factor=3)},
    "fails": {"command": "if [ $PIT_RANK = 1 ]; then exit 7; fi; sleep 60"},
}


@pytest.fixture(scope="module")
def started(clusters: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """The folder of each run on alpha. All begin together; what is left of them ends with the module."""
    work = tmp_path_factory.mktemp("attempts")
    runs = clusters / "runs" / f"attempts-{os.getpid()}-{time.monotonic_ns()}"
    (work / "loop.py").write_text(LOOP)
    created: dict[str, Path] = {}
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PIT_RUNS", str(runs))
            alpha = load.load_site("alpha")
            for name, more in REQUESTS.items():
                request = Request(name=name, nodes=2, time="5m", workdir=str(work), **more)
                created[name] = submit.submit_run(planning.make_plan(request, alpha, "test"), alpha)
        yield created
    finally:
        slurm = connect.client(alpha)
        slurm.cancel([job_id(run_dir) for run_dir in created.values()])
        until(lambda: not [job for job in slurm.jobs() if job.name in {run_dir.name for run_dir in created.values()}])
        shutil.rmtree(runs, ignore_errors=True)


@pytest.fixture(scope="module")
def requeued(started: dict[str, Path], clusters: Path) -> Path:
    """A run whose job was put back into the queue, which takes Slurm a while: so it comes before all tests."""
    run_dir = started["requeued"]
    until(lambda: (run_dir / "attempts" / "0" / "ranks" / "1.json").exists())
    env = {**os.environ, "SLURM_CONF": f"{clusters}/alpha/slurm.conf"}
    subprocess.run(["scontrol", "requeue", job_id(run_dir)], env=env, check=True, timeout=20)
    return run_dir


def job_id(run_dir: Path) -> str:
    job = run_folder.read_record(run_dir / "job.json", run_folder.JobRef)
    assert job is not None
    return job.job_id


def until(what: Callable[[], Any], timeout_s: float = 60) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (actual := what()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)
    return actual


def verdict(run_dir: Path) -> records.Verdict:
    actual = until(lambda: run_folder.read_record(run_dir / "verdict.json", records.Verdict))
    assert isinstance(actual, records.Verdict)
    return actual


def cause(run_dir: Path, attempt: int) -> records.Cause:
    record = run_folder.read_record(run_dir / "attempts" / str(attempt) / "cause.json", records.Cause)
    assert record is not None
    return record


def starts(run_dir: Path) -> list[records.AttemptStart]:
    paths = [path / "start.json" for path in run_folder.attempt_dirs(run_dir)]
    return [msgspec.json.decode(path.read_bytes(), type=records.AttemptStart) for path in paths]


def seconds_between(first: str, second: str) -> float:
    from datetime import datetime

    return (datetime.fromisoformat(second) - datetime.fromisoformat(first)).total_seconds()


def test_a_killed_rank_is_started_again_in_the_same_job(requeued: Path, started: dict[str, Path]) -> None:
    """The other rank ends within seconds, the second attempt has the same nodes, and the run finishes."""
    run_dir = started["killed"]
    log = run_dir / "attempts" / "0" / "steps" / "0.jsonl"
    until(lambda: log.exists() and log.read_bytes().count(b"\n") > 3)
    rank = run_folder.read_record(run_dir / "attempts" / "0" / "ranks" / "1.json", run_folder.RankRecord)
    assert rank is not None
    killed = time.monotonic()
    os.kill(rank.pid, signal.SIGKILL)
    until(lambda: (run_dir / "attempts" / "1" / "start.json").exists())
    assert time.monotonic() - killed < 12
    assert verdict(run_dir).state == "succeeded"
    first, second = starts(run_dir)
    assert (first.job_id, first.node_list) == (second.job_id, second.node_list)
    assert cause(run_dir, 0).signal == signal.SIGKILL
    assert cause(run_dir, 0).kind not in ("program", "hang", "succeeded")


def test_a_rank_that_hangs_leaves_its_stack(started: dict[str, Path]) -> None:
    """The standstill is ended, all ranks' stacks are there, the one behind is named, and the run goes on."""
    run_dir = started["hangs"]
    assert verdict(run_dir).state == "succeeded"
    attempt = run_dir / "attempts" / "0"
    hang = run_folder.read_record(attempt / "hang.json", records.HangReport)
    record = run_folder.read_record(attempt / "exit.json", run_folder.AttemptExit)
    assert hang is not None
    assert record is not None
    assert (hang.step, hang.slow_ranks) == (3, (1,))
    assert seconds_between(hang.t, record.ended) < 10
    assert cause(run_dir, 0).kind == "hang"
    for rank in range(2):
        text = (attempt / "stacks" / f"{rank}.txt").read_text()
        assert "loop.py" in text
        assert "most recent call first" in text


def test_the_job_ends_with_the_program_s_code(started: dict[str, Path]) -> None:
    """A program that fails of itself is not tried for ever, and its code is the job's and the run's."""
    run_dir = started["fails"]
    assert verdict(run_dir).exit_code == 7
    assert [path.name for path in (run_dir / "attempts" / "0" / "failures").iterdir()] == ["1.json"]


def test_a_requeued_job_makes_a_new_attempt(requeued: Path) -> None:
    """Slurm's own restart keeps what was there, and the attempt that it cut off gets its cause."""
    assert verdict(requeued).state == "succeeded"
    first, second = starts(requeued)
    assert (second.job_id, second.restart_count) == (first.job_id, first.restart_count + 1)
    assert cause(requeued, 0).kind == "preempted"
