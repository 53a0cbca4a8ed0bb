"""PitExecutor, against the installed submitit and the real Slurm."""

from __future__ import annotations

import inspect
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import submitit
from msgspec.structs import replace
from submitit.core import core, utils

from pitools.core.errors import ConfigError, UsageError
from pitools.launch import plan as planning
from pitools.launch.api import Run
from pitools.launch.executor import PitExecutor
from pitools.launch.monitor import rank_log, status
from pitools.launch.request import Request
from pitools.run import run_folder
from pitools.site import load
from pitools.site.connect import client

MakePlan = Callable[..., planning.Plan]


def square(number: int) -> tuple[int, str]:
    """Return the square and the node it was computed on."""
    print(f"squaring {number}")
    return number * number, os.environ["SLURMD_NODENAME"]


def fail(code: int) -> None:
    """End the rank with its own exit code."""
    raise SystemExit(code)


def executor(plan: planning.Plan, run_dir: Path) -> PitExecutor:
    site = load.load_site(plan.site)
    return PitExecutor(plan, site, run_dir, submit_script=lambda path: client(site).submit(path=str(path)).job_id)


def test_overridden_methods_exist_in_submitit() -> None:
    """submitit calls these, with these arguments; a release that changes them fails here and not on a cluster."""
    expected = {
        (submitit.SlurmExecutor, "_make_submission_file_text"): ["self", "command", "uid"],
        (submitit.SlurmExecutor, "_num_tasks"): ["self"],
        (submitit.SlurmExecutor, "_internal_update_parameters"): ["self", "kwargs"],
        (core.PicklingExecutor, "_submit_command"): ["self", "command"],
        (submitit.SlurmExecutor, "_internal_process_submissions"): ["self", "delayed_submissions"],
        (utils.DelayedSubmission, "set_timeout"): ["self", "timeout_min", "max_num_timeout"],
        (utils.JobPaths, "move_temporary_file"): ["self", "tmp_path", "name", "keep_as_symlink"],
    }
    for (owner, name), names in expected.items():
        assert list(inspect.signature(getattr(owner, name)).parameters) == names
    assert isinstance(inspect.getattr_static(core.PicklingExecutor, "_submitit_command_str"), property)


def test_resources_come_from_the_plan_only(make_plan: MakePlan, tmp_path: Path) -> None:
    """A parameter given submitit's way is refused, not silently ignored."""
    pit_executor = executor(make_plan("alpha"), tmp_path / "r")
    with pytest.raises(UsageError, match="nodes"):
        pit_executor.update_parameters(nodes=8)


def test_a_plan_is_submitted_without_a_pickle(make_plan: MakePlan, tmp_path: Path) -> None:
    """Its ranks read the plan from the run's folder, and there is no folder of submitit's."""
    run_dir, scripts = tmp_path / "r", list[Path]()

    def submit_script(script: Path) -> str:
        scripts.append(script)
        return "7"

    pit_executor = PitExecutor(make_plan("alpha"), load.load_site("alpha"), run_dir, submit_script)
    assert pit_executor.submit_plan() == "7"
    assert scripts == [run_dir / "script.sbatch"]
    assert f'"$PIT_PYTHON" -u -m pitools.launch.rank.main plan {run_dir}/plan.json\n' in scripts[0].read_text()
    assert not (run_dir / "submitit").exists()
    pit_executor.submit(square, 2)
    assert f"pitools.launch.rank.main submitit {run_dir}/submitit\n" in scripts[1].read_text()
    assert (run_dir / "submitit" / "7_submitted.pkl").is_file()
    assert (run_dir / "submitit").stat().st_mode & 0o777 == 0o700


def test_a_folder_of_another_user_is_refused(make_plan: MakePlan, tmp_path: Path) -> None:
    """Another user who created the run's folder could replace the pickles in it, and pickles are code."""
    run_dir = tmp_path / "r"
    run_dir.mkdir()
    run_dir.chmod(0o777)
    with pytest.raises(ConfigError):
        executor(make_plan("alpha"), run_dir)
    assert list(run_dir.iterdir()) == []


class SubmittedJobs(NamedTuple):
    """An array of three and a job that fails, submitted together, with the folders of both."""

    array: list[Any]
    array_dir: Path
    failing: Any
    failing_dir: Path


@pytest.fixture(scope="module")
def submitted(clusters: Path, tmp_path_factory: pytest.TempPathFactory) -> SubmittedJobs:
    """Submit both on alpha."""
    base = tmp_path_factory.mktemp("runs")

    def plan(**keys: Any) -> planning.Plan:
        request = Request(name="t", time="5m", workdir=str(base), command="true", **keys)
        return replace(planning.make_plan(request, load.load_site("alpha"), "test"), runs_dir=str(base))

    array_dir, failing_dir = base / run_folder.new_run_id("array"), base / run_folder.new_run_id("code")
    array = executor(plan(), array_dir).map_array(square, [1, 2, 3])
    return SubmittedJobs(array, array_dir, executor(plan(nodes=2), failing_dir).submit(fail, 7), failing_dir)


@pytest.mark.slurm
def test_an_array_is_one_job_of_our_script(submitted: SubmittedJobs) -> None:
    """map_array submits once, every task runs pitools' template, and each call gets its own result."""
    jobs, run_dir = submitted.array, submitted.array_dir
    assert {job.job_id.split("_")[0] for job in jobs} == {jobs[0].job_id.split("_")[0]}
    until(lambda: all(job.paths.result_pickle.exists() for job in jobs))
    assert [job.result()[0] for job in jobs] == [1, 4, 9]
    script = (run_dir / "script.sbatch").read_text()
    assert "#SBATCH --array=0-2" in script
    assert "PIT_ATTEMPT_DIR" in script
    assert [path.name for path in run_folder.attempt_dirs(run_dir)] == ["0.0", "1.0", "2.0"]


@pytest.mark.slurm
def test_its_folder_is_a_run(submitted: SubmittedJobs) -> None:
    """`show` and `logs` find the run, and a job's stdout() returns the output of its task."""
    until(lambda: all(job.paths.result_pickle.exists() for job in submitted.array))
    assert ["squaring 2" in (job.stdout() or "") for job in submitted.array] == [False, True, False]
    assert submitted.array[1].paths.stdout == submitted.array_dir / "attempts" / "1.0" / "logs" / "0.out"
    site = load.load_site("alpha")
    run = status.run_status(submitted.array_dir, site)
    assert (run.job_id, run.attempts) == (submitted.array[0].job_id.partition("_")[0], 3)
    assert "squaring 3" in "".join(rank_log.read_log(submitted.array_dir, site, 0, follow=False))
    # Before its ranks begin, a job's output is the job's own file.
    until(lambda: submitted.failing.task(1).paths.stdout.name == "1.out")
    assert not (submitted.failing_dir / "verdict.json").exists()  # what failed is its caller's to repeat


@pytest.mark.slurm
def test_the_job_s_exit_code_is_the_ranks(clusters: Path, submitted: SubmittedJobs) -> None:
    """A rank that ends with 7 makes a job that ends with 7: no epilogue hides it."""
    job, run_dir = submitted.failing, submitted.failing_dir
    until(lambda: (run_dir / "attempts" / "0" / "exit.json").exists())
    record = run_folder.read_record(run_dir / "attempts" / "0" / "exit.json", run_folder.AttemptExit)
    assert record is not None
    assert record.exit_code == 7
    until(lambda: client(load.load_site("alpha")).state_of([job.job_id])[job.job_id] == "FAILED")
    shown = subprocess.run(
        ["scontrol", "-o", "show", "job", job.job_id],
        env={**os.environ, "SLURM_CONF": f"{clusters}/alpha/slurm.conf"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert " ExitCode=7:0 " in shown.stdout


@pytest.mark.slurm
def test_why_shows_the_end_of_a_run_that_nobody_watched(submitted: SubmittedJobs) -> None:
    """The run of a callable has no `--wait` and is not continued by cron: its cause is found when it is asked for."""
    run = Run(submitted.failing_dir, site="alpha")
    until(lambda: bool(run.why()))
    assert [cause.exit_code for cause in run.why()] == [7]
    assert run.record().is_over


def until(condition: Callable[[], bool], timeout_s: float = 90) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.3)
