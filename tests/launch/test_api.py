"""The Python interface: runs of a file, of keywords and of a function; submitit's idioms; a lazy import."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import submitit

import pitools
from pitools.core.errors import ConfigError, PitError, UsageError
from pitools.launch import auto_executor
from pitools.launch.api import Run
from pitools.run import run_folder
from pitools.site.connect import client
from pitools.site.load import load_site

ENTRY = """\
import os
import pitools


def train(lr, seed=0):
    print("training", lr, seed, os.environ["PIT_RANK"])


if __name__ == "__main__":
    run = pitools.launch(train, nodes=2, params={"lr": 0.5}, name="mine")
    print(run.wait().state, run.logs("all"), sep="\\n")
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of one's own, with its runs."""
    monkeypatch.setenv("PIT_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))  # for the processes that unpickle `add`
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_importing_pitools_imports_nothing_else() -> None:
    """Its names are imported at their first use; an unknown one is an AttributeError."""
    code = "import sys; before = set(sys.modules); import pitools; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["pitools"]
    assert {*pitools.__all__} <= {*dir(pitools)}
    with pytest.raises(AttributeError):
        pitools.nothing  # noqa: B018


def test_a_run_from_its_start_to_its_end(here: Path) -> None:
    """Everything that the commands show is there, and a second object of the same run sees the same."""
    (here / "r.toml").write_text('name = "r"\ncommand = "echo out {x}; exit {code}"\n[params]\nx = 1\ncode = 0\n')
    run = pitools.launch("r.toml", nodes=2, params={"x": 7})
    assert run.wait(60).state == run.state == "COMPLETED"
    assert run.logs(1) == "out 7\n"
    assert run.logs("all") == "0: out 7\n1: out 7\n"
    assert [cause.kind for cause in run.why()] == ["succeeded"]
    assert run.steps() == []
    assert run.resume().action == "already_ended"
    failed = pitools.launch("r.toml", params={"code": 3}, retry={"unknown": 0})
    assert failed.wait().state == "FAILED"
    assert {one.id for one in pitools.runs()} == {run.id, failed.id}
    assert pitools.Run(run.id).record() == run.record()


def test_runs_of_a_broken_site_are_left_out(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run whose site file cannot be read does not hide the others."""
    (here / "other.toml").write_text('name = "other"\nscheduler = "none"\n[paths]\nruns = "$PIT_RUNS"\n')
    monkeypatch.setenv("PIT_SITE_PATH", str(here))
    pitools.launch(name="a", command="true", site="other").wait()
    kept = pitools.launch(name="b", command="true")
    kept.wait()
    (here / "other.toml").write_text("nosuch = 1\n")
    assert [run.id for run in pitools.runs()] == [kept.id]


def test_a_file_beside_keywords_is_not_the_request(here: Path) -> None:
    """A run of keywords has these in its request.toml, and nothing of a file in the working folder."""
    (here / "request").write_text('name = "stranger"\ncommand = "false"\n')
    run = pitools.launch(name="mine", command="true")
    run.wait()
    assert "stranger" not in (run.dir / "request.toml").read_text()


def test_waiting_has_a_limit_and_a_run_can_be_cancelled(here: Path) -> None:
    """TimeoutError, with the run's state; the run goes on until it is cancelled."""
    run = pitools.launch(name="s", command="sleep 60")
    with pytest.raises(TimeoutError, match=run.id):
        run.wait(1.0)
    run.cancel()
    assert run.wait(60).state == "CANCELLED"


def test_a_function_of_a_script_is_an_entry(here: Path) -> None:
    """Every rank imports the script's module, and calls the function with the parameters."""
    (here / "mine.py").write_text(ENTRY)
    done = subprocess.run([sys.executable, "mine.py"], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "COMPLETED\n0: training 0.5 0 0\n1: training 0.5 0 1\n\n", done.stderr


def test_a_script_that_launches_itself_at_its_import_is_refused(here: Path) -> None:
    """Without `if __name__ == "__main__"` the check of its entry would launch again, and so on: one error, no run."""
    (here / "mine.py").write_text(ENTRY.replace('if __name__ == "__main__":', "if True:"))
    done = subprocess.run([sys.executable, "mine.py"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "__main__" in done.stderr
    assert not list(here.glob("runs/*/plan.json"))


def test_a_crash_before_a_pipe_is_a_failure(here: Path) -> None:
    """`python … | tee log`: the rank fails as its program does, not as tee."""
    assert pitools.launch(name="t", command="exit 3 | cat").wait().exit_code == 3


def test_a_parameter_that_the_request_lacks_is_refused(here: Path) -> None:
    """As `--set` of the command does."""
    (here / "r.toml").write_text('name = "r"\ncommand = "true"\n[params]\nlr = 1\n')
    with pytest.raises(ConfigError, match="lrr"):
        pitools.launch(here / "r.toml", params={"lrr": 3})


@pytest.mark.parametrize(
    ("request_or_function", "keys"),
    [
        (None, {"name": "x"}),
        (None, {"name": "x", "command": "true", "node": 2}),
        (None, {"name": "x", "command": "true", "nodes": "two"}),
        (lambda: None, {}),
        ("missing.toml", {}),
        ({"name": "x", "command": "true"}, {}),
    ],
)
def test_wrong_requests_are_named(here: Path, request_or_function: Any, keys: dict[str, Any]) -> None:
    """As errors of pitools, before anything is created."""
    with pytest.raises(ConfigError):
        pitools.launch(request_or_function, **keys)
    assert not list(here.glob("runs/*/plan.json"))


def add(first: int, second: int = 1) -> int:
    """Return a sum; fail for a negative one."""
    if first < 0:
        raise ValueError(f"negative: {first}")
    print("adding", first)
    return first + second


@pytest.mark.parametrize(
    ("parameters", "keys"),
    [
        ({"timeout_min": 5, "mem_gb": 1.5}, {"time": "5", "memory": "1536M"}),
        ({"name": "My Job!", "nodes": 2}, {"name": "my-job", "nodes": 2}),
        ({"slurm_mail_user": "a@b.c", "slurm_additional_parameters": {"mail_type": "END"}}, {}),
    ],
)
def test_submitits_parameters_are_a_request(parameters: dict[str, Any], keys: dict[str, Any]) -> None:
    """Generic names and slurm_ names, as AutoExecutor has them."""
    request = auto_executor._request(parameters)
    assert {key: getattr(request, key) for key in keys} == keys
    assert request.sbatch == ({} if keys else {"mail-user": "a@b.c", "mail-type": "END"})


@pytest.mark.parametrize(
    "parameters",
    [
        {"timeout": 5},
        {"nodes": 0},
        {"nodes": "x"},
        {"slurm_setup": ["x"]},
        {"slurm_additional_parameters": {"wrap": "x"}},
    ],
)
def test_wrong_parameters_are_refused(here: Path, parameters: dict[str, Any]) -> None:
    """With their names, when they are set and not on a cluster; the earlier ones stay."""
    executor = pitools.Executor()
    executor.update_parameters(nodes=1)
    with pytest.raises(PitError):
        executor.update_parameters(**parameters)
    assert executor.parameters == {"nodes": 1}
    with pytest.raises(UsageError, match="timeout_mins"):
        executor.update_parameters(timeout_mins=3)


def check_idioms(executor: pitools.Executor) -> None:
    """submitit's own examples: submit, map_array, submit_array, batch, exceptions, output."""
    executor.update_parameters(timeout_min=3, name="idioms")
    job = executor.submit(add, 5, second=7)
    jobs = executor.map_array(add, [1, 2], [3, 4])
    with executor.batch():
        batch = [executor.submit(add, number) for number in (10, 20)]
    failing = executor.submit(add, -1)
    assert job.result() == 12
    assert [one.result() for one in jobs] == [4, 6]
    assert [one.result() for one in batch] == [11, 21]
    assert "negative: -1" in str(failing.exception())
    assert "adding 5" in job.stdout()
    assert job.done()
    for one in (job, *jobs, *batch, failing):
        if isinstance(one, submitit.LocalJob):
            one._process.wait(30)  # submitit leaves the process of a job that has its result


def test_idioms_of_submitit_here(here: Path) -> None:
    """On a site without Slurm, as processes."""
    check_idioms(pitools.Executor())


@pytest.mark.slurm
def test_idioms_of_submitit_on_slurm(clusters: Path, here: Path) -> None:
    """On a cluster; two functions are one array with its limit, and every job is a run."""
    executor = pitools.Executor(site="alpha")
    executor.update_parameters(slurm_array_parallelism=1)
    check_idioms(executor)
    runs = pitools.runs(site="alpha")
    assert len(runs) == 4
    assert sum("#SBATCH --array=0-1%1" in (run.dir / "script.sbatch").read_text() for run in runs) == 2
    assert sum("adding 5" in run.logs() for run in runs) == 1
    sleeping = executor.submit(time.sleep, 60)
    sleeping.cancel()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not sleeping.done(force_check=True):
        time.sleep(0.5)
    assert sleeping.state.startswith("CANCELLED")


@pytest.mark.slurm
def test_an_executor_s_folder_holds_whole_runs(clusters: Path, here: Path) -> None:
    """A job that Slurm refuses leaves no run; the run of another is diagnosed in that folder."""
    executor = pitools.Executor(here / "mine", site="alpha")
    executor.update_parameters(slurm_constraint="no-such-feature")
    with pytest.raises(PitError):
        executor.submit(add, 1)
    assert list((here / "mine").iterdir()) == []
    executor.update_parameters(slurm_constraint=None)
    assert executor.submit(add, 1).result() == 2
    (run_dir,) = (here / "mine").iterdir()
    until(lambda: Run(run_dir, site="alpha").why())
    assert Run(run_dir, site="alpha").record().is_over


def until(condition: Callable[[], object]) -> None:
    """Wait for a state, three minutes at most: other tests keep the cluster busy."""
    deadline = time.monotonic() + 180
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


class Counter(submitit.helpers.Checkpointable):  # type: ignore[misc]
    """Counts in a file; interrupted, it is called again, by a copy of itself."""

    def __call__(self, file: Path, wanted: int) -> int:
        for number in range(int(file.read_text()) if file.exists() else 0, wanted):
            time.sleep(0.2)
            file.write_text(str(number + 1))
        return wanted


@pytest.mark.slurm
def test_checkpointing_and_waiting_of_submitit_on_slurm(clusters: Path, here: Path) -> None:
    """A callable that is interrupted saves, is requeued and ends; jobs are awaited, also as they complete."""
    executor = pitools.Executor(site="alpha")
    executor.update_parameters(timeout_min=4, name="counter")
    file = here / "count"
    job = executor.submit(Counter(), file, 30)
    others = executor.map_array(add, [1, 2], [3, 4])

    async def results() -> list[int]:
        return [await one.awaitable().result() for one in others]

    assert asyncio.run(results()) == [4, 6]
    assert {one.result() for one in submitit.helpers.as_completed(others)} == {4, 6}
    until(lambda: file.exists() and int(file.read_text()) >= 3)
    job._interrupt(timeout=False)
    env = {**os.environ, "SLURM_CONF": str(clusters / "alpha" / "slurm.conf")}
    # Requeued, it waits for its time to start; where Slurm is slow, this test may see it only once it runs again.
    until(lambda: job.done() or client(load_site("alpha")).job(job.job_id)[0].state == "PENDING")
    subprocess.run(["scontrol", "update", f"jobid={job.job_id}", "starttime=now"], check=False, env=env)
    assert job.result() == 30
    attempts = [[path.name for path in run_folder.attempt_dirs(run.dir)] for run in pitools.runs(site="alpha")]
    assert sorted(attempts) == [["0", "1"], ["0.0", "1.0"]]


def test_this_process_keeps_its_environment(here: Path) -> None:
    """Launching changes neither the working directory nor variables."""
    before = dict(os.environ), Path.cwd()
    pitools.launch(name="e", command="true").wait(60)
    assert (dict(os.environ), Path.cwd()) == before
