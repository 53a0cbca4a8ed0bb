"""Runs that go on, on a real Slurm: preempted, cancelled, failed, interrupted, two at once."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pitools.launch.submission import submissions
from pitools.site import connect, load
from pitools.slurm.client import Client

pytestmark = pytest.mark.slurm

Pit = Callable[..., subprocess.CompletedProcess[str]]

# Steps of 0.1 s with a safe one every five, as a program without our checkpoints would keep it; a test may end it.
LOOP = """\
import os, sys, time
from pathlib import Path
from pitools.run.steps import StepLog

run, rank = Path(os.environ["PIT_RUN_DIR"]), int(os.environ["PIT_RANK"])
safe = run / "progress"
step = int(safe.read_text()) if safe.exists() else 0
log = StepLog(Path(os.environ["PIT_ATTEMPT_DIR"]) / "steps", rank)
while step < int(sys.argv[1]) and not (run / "enough").exists():
    time.sleep(0.1)
    log.write(step=step, loss=1 / (step + 1), wall_s=0.1, input_s=0, compute_s=0.1, comm_s=0, rank_samples=1)
    step += 1
    if rank == 0 and step % 5 == 0:
        (run / ".progress").write_text(str(step))
        (run / ".progress").rename(safe)
"""
# All CPUs of a node: what preempts this job takes no other from its node.
REQUEST = """\
name = "loop"
command = "exec python loop.py {steps}"
nodes = {nodes}
cpus_per_task = 4
tier = "low"
time = "{time}"
"""


@pytest.fixture
def alpha(clusters: Path) -> Client:
    return connect.client(load.load_site("alpha"))


@pytest.fixture
def made(pit: Pit, clusters: Path, alpha: Client, tmp_path: Path) -> Iterator[Callable[..., dict[str, Any]]]:
    """Starts a loop of so many steps in a folder of runs of the test's own, and ends it with the test."""
    runs = clusters / "runs" / f"recover-{os.getpid()}-{tmp_path.name}"
    (tmp_path / "loop.py").write_text(LOOP)
    begin: list[dict[str, Any]] = []

    def start(steps: int = 40, nodes: int = 1, time: str = "5m") -> dict[str, Any]:
        (tmp_path / "loop.toml").write_text(REQUEST.format(steps=steps, nodes=nodes, time=time))
        done = pit("launch", "run", "loop.toml", "--site", "alpha", PIT_RUNS=str(runs))
        assert done.returncode == 0, done.stderr
        begin.append(json.loads(done.stdout))
        return begin[-1]

    yield start
    for run in begin:
        pit("launch", "cancel", run["run_dir"], PIT_RUNS=str(runs))
    remove(runs)


def remove(runs: Path) -> None:
    """Removes a folder of runs; the last process of a cancelled job may still write there."""
    until(lambda: not subprocess.run(["rm", "-rf", str(runs)]).returncode)


def until(what: Callable[[], Any], timeout_s: float = 60) -> Any:
    """Waits until something is the case, and returns it."""
    deadline = time.monotonic() + timeout_s
    while not (actual := what()):
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.2)
    return actual


def watched(pit: Pit, run: dict[str, Any]) -> tuple[int, list[dict[str, Any]]]:
    """The exit code of `watch` and every change that it told, until the run is over."""
    done = pit("launch", "watch", run["run_dir"], "--site", "alpha")
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


def decisions(run: dict[str, Any]) -> list[tuple[str, str]]:
    lines = (Path(run["run_dir"]) / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    return [(event["detail"]["kind"], event["detail"]["action"]) for event in events if event["event"] == "decided"]


def steps(run: dict[str, Any], attempt: int = 0) -> list[int]:
    path = Path(run["run_dir"]) / "attempts" / str(attempt) / "steps" / "0.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


def test_a_preempted_run_goes_on(made: Callable[..., dict[str, Any]], pit: Pit, alpha: Client, tmp_path: Path) -> None:
    """The job that is preempted sends its successor, which starts at the last safe step; none of the old is left."""
    run = made(40)
    until(lambda: len(steps(run)) > 12)
    (job,) = alpha.jobs([run["job_id"]])
    (tmp_path / "high.sh").write_text("#!/bin/sh\nsleep 3\n")
    flags = ["--account=lab", "--qos=high", "--cpus-per-task=4", "--time=1", "--output=/dev/null"]
    high = alpha.submit(path=str(tmp_path / "high.sh"), args=[*flags, f"--nodelist={job.node_list}"]).job_id
    code, rows = watched(pit, run)
    assert (code, rows[-1]["state"], rows[-1]["attempts"]) == (0, "COMPLETED", 2)
    assert decisions(run) == [("preempted", "resubmit"), ("succeeded", "done")]
    lost = steps(run)[-1] + 1 - steps(run, 1)[0]
    assert 0 <= lost <= 5
    assert steps(run, 1)[-1] == 39
    assert rows[-1]["job_id"] != run["job_id"]
    alpha.cancel([high])
    assert alpha.state_of([run["job_id"]])[run["job_id"]] in ("PREEMPTED", "CANCELLED")


def test_scancel_is_the_end(made: Callable[..., dict[str, Any]], pit: Pit, alpha: Client) -> None:
    """What a person takes out of the queue, not by way of us, is never submitted again: by its job, or by a tick."""
    run = made(600)
    until(lambda: len(steps(run)) > 3)
    alpha.cancel([run["job_id"]])
    code, rows = watched(pit, run)
    assert (code, rows[-1]["state"], rows[-1]["cause"]) == (1, "CANCELLED", "cancelled")
    runs = {"PIT_RUNS": str(Path(run["run_dir"]).parent)}
    done = pit("launch", "tick", "--site", "alpha", **runs)
    assert (done.returncode, done.stdout) == (0, "")
    assert submissions.job_numbers(Path(run["run_dir"])) == [0]
    done = pit("launch", "resume", run["run_dir"], **runs)
    assert json.loads(done.stdout)["action"] == "already_ended"


@pytest.mark.usefixtures("as_root")
def test_a_run_of_another_user_ends_no_job_of_ours(
    made: Callable[..., dict[str, Any]], pit: Pit, alpha: Client
) -> None:
    """Root who cancels a user's run ends that user's jobs, and not whichever its records name."""
    run = made(600)
    tasks = alpha.submit("#!/bin/sh\nsleep 600\n", args=["--array=1-3", "--output=/dev/null"]).job_id
    try:
        until(lambda: len(alpha.jobs([tasks], each_task=True)) == 3)
        until(lambda: len(steps(run)) > 3)  # a job that begins while root's request is pending ends by it
        os.chown(run["run_dir"], 12345, 12345)
        for job_id in (f"{tasks}_[1-3]", run["job_id"]):
            for path in (Path(run["run_dir"], "job.json"), Path(run["run_dir"], "jobs/0/job.json")):
                path.write_text(json.dumps(json.loads(path.read_text()) | {"job_id": job_id}))
            done = pit("launch", "cancel", run["run_dir"])
            assert (done.returncode, alpha.jobs([run["job_id"]]) != []) == (4, True), done.stderr
        assert len(alpha.jobs([tasks], each_task=True)) == 3
    finally:
        alpha.cancel([tasks])
    os.chown(run["run_dir"], 0, 0)
    assert pit("launch", "cancel", run["run_dir"]).returncode == 0
    until(lambda: not alpha.jobs([run["job_id"]]))


def test_an_error_of_the_program_is_told(pit: Pit, clusters: Path, tmp_path: Path) -> None:
    """`run --wait` ends with 1, the cause and the line; `why` shows the attempt."""
    (tmp_path / "boom.py").write_text("raise ValueError('no such camera')\n")
    (tmp_path / "boom.toml").write_text('name = "boom"\ncommand = "exec python boom.py"\nnodes = 2\ntime = "5m"\n')
    runs = {"PIT_RUNS": str(clusters / "runs" / f"recover-{os.getpid()}-boom")}
    done = pit("launch", "run", "boom.toml", "--site", "alpha", "--wait", **runs)
    run = json.loads(done.stdout)
    try:
        assert (done.returncode, run["state"], run["cause"]) == (1, "FAILED", "program")
        assert "ValueError: no such camera" in done.stderr
        (cause,) = [json.loads(line) for line in pit("launch", "why", run["run_dir"], **runs).stdout.splitlines()]
        assert (cause["kind"], cause["attempt"]) == ("program", "0")
    finally:
        remove(Path(runs["PIT_RUNS"]))


def test_a_lost_login_session_is_made_good(made: Callable[..., dict[str, Any]], pit: Pit, alpha: Client) -> None:
    """Several resumes at once make one job; a submission whose sender died is found by a tick, and not made again."""
    run = made(600)
    run_dir, site = Path(run["run_dir"]), ("--site", "alpha")
    runs = {"PIT_RUNS": str(run_dir.parent)}
    until(lambda: len(steps(run)) > 3)
    alpha.cancel([run["job_id"]])
    until(lambda: (run_dir / "verdict.json").exists())
    until(lambda: alpha.state_of([run["job_id"]])[run["job_id"]] == "CANCELLED")
    output: list[str] = []

    def force() -> None:
        output.append(pit("launch", "resume", run["run_dir"], "--force", *site, **runs).stdout)

    threads = [threading.Thread(target=force) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum('"action":"resubmit"' in text for text in output) == 1
    assert submissions.job_numbers(run_dir) == [0, 1]
    # Its sender was killed before it heard the answer: the job is there, and its folder does not know it.
    second = json.loads((run_dir / "job.json").read_text())["job_id"]
    intent = json.loads((run_dir / "jobs" / "1" / "intent.json").read_text())
    old = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(time.time() - 300))
    (run_dir / "jobs" / "1" / "intent.json").write_text(json.dumps({**intent, "last_tried_at": old}))
    (run_dir / "jobs" / "1" / "job.json").unlink()
    (run_dir / "job.json").write_bytes((run_dir / "jobs" / "0" / "job.json").read_bytes())
    (run_dir / "jobs" / ".sbatch-output").write_text("")
    done = pit("launch", "tick", *site, **runs)
    assert done.returncode == 0, done.stderr
    assert [(row["action"], row["job_id"]) for row in map(json.loads, done.stdout.splitlines())] == [
        ("submitted", second)
    ]


@pytest.mark.slow
def test_the_time_limit_is_no_end(made: Callable[..., dict[str, Any]], pit: Pit) -> None:
    """A minute is too short for the loop: it is continued from its last safe step, without anybody's doing."""
    run = made(1300, time="1m")
    code, rows = watched(pit, run)
    assert (code, rows[-1]["state"]) == (0, "COMPLETED")
    assert decisions(run)[0] == ("time-limit", "resubmit")
    assert steps(run)[-1] + 1 - steps(run, 1)[0] <= 5
    assert rows[-1]["attempts"] == 2


def test_a_run_on_this_machine_goes_on(pit: Pit, tmp_path: Path) -> None:
    """After a kill -9 of its supervisor the ranks are found, and named; without them it goes on, when asked to."""
    (tmp_path / "loop.py").write_text(LOOP)
    # So long that the ranks still run when `resume` looks for them.
    text = REQUEST.format(steps=3000, nodes=1, time="5m").replace('tier = "low"\n', "")
    (tmp_path / "loop.toml").write_text(text)
    run = json.loads(pit("launch", "run", "loop.toml").stdout)
    until(lambda: len(steps(run)) > 6)
    os.kill(json.loads((Path(run["run_dir"]) / "job.json").read_text())["pid"], signal.SIGKILL)
    done = pit("launch", "resume", run["run_dir"])
    assert done.returncode == 4, done.stderr
    left = [int(word) for word in done.stderr.rpartition("kill ")[2].split()]
    for pid in left:
        with contextlib.suppress(ProcessLookupError):  # it has ended with one before it
            os.kill(pid, signal.SIGKILL)
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in left))
    assert json.loads(pit("launch", "resume", run["run_dir"]).stdout)["action"] == "resubmit"
    until(lambda: steps(run, 1))
    (Path(run["run_dir"]) / "enough").touch()
    code, rows = watched(pit, run)
    assert (code, rows[-1]["state"]) == (0, "COMPLETED")
    assert 0 <= steps(run)[-1] + 1 - steps(run, 1)[0] <= 5


@pytest.mark.parametrize(
    ("python", "said"), [("/nope/python", "No such file or directory"), ("bare", "No module named 'pitools'")]
)
def test_a_site_s_python_that_cannot_is_quoted_and_not_tried_again(
    clusters: Path, pit: Pit, tmp_path: Path, python: str, said: str
) -> None:
    """Of a real job's output: the run stops after its one job, with the line that says why."""
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')  # without what is installed
    bare.chmod(0o755)
    (tmp_path / "alpha.toml").write_text(f'[paths]\npython = "{bare if python == "bare" else python}"\n')
    (tmp_path / "hello.toml").write_text('name = "hello"\ncommand = "true"\ntime = "1m"\nsnapshot = false\n')
    env = {"PIT_SITE_PATH": str(tmp_path), "PIT_RUNS": str(tmp_path / "runs")}
    done = pit("launch", "run", "hello.toml", "--site", "alpha", "--wait", **env)
    run = json.loads(done.stdout)
    assert (done.returncode, run["cause"], run["attempts"]) == (1, "program", 0)
    assert said in run["reason"]
    assert len(list((Path(run["run_dir"]) / "jobs").glob("*/job.json"))) == 1
