"""Sweeps on a real Slurm: one array for the first jobs, killed launchers, a run that goes on by itself."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pitools.core.errors import PitError
from pitools.launch.submission import array_job, submissions
from pitools.launch.sweep import launch_sweep, points, sweep_folder
from pitools.run import run_folder
from pitools.run.attempt_records import AttemptStart
from pitools.site import connect, load
from pitools.slurm.client import Client

pytestmark = pytest.mark.slurm

Pit = Callable[..., subprocess.CompletedProcess[str]]
# The first attempt of seed 1 is ended by a signal that its run does not know, as by an out-of-memory killer.
REQUEST = """\
name = "s"
command = "echo {lr} >> $PIT_RUN_DIR/ran; [ {seed} != 1 ] || [ -e $PIT_RUN_DIR/attempts/1 ] || kill -KILL $$"
time = "3m"
[params]
lr = 1.0
seed = 0
[retry]
unknown = 2
[sbatch]
comment = "a 'b'"
"""


@pytest.fixture
def alpha(clusters: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Client:
    monkeypatch.setenv("PIT_RUNS", str(tmp_path / "runs"))
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "request.toml").write_text(REQUEST)
    return connect.client(load.load_site("alpha"))


def test_one_array_and_each_run_goes_on_by_itself(pit: Pit, alpha: Client, tmp_path: Path) -> None:
    """Four runs are one job array; a failed one is retried in its own job, and the others are not touched."""
    words = ("launch", "run", "work/request.toml", "--site", "alpha", "--set", "lr=1,2", "--set", "seed=0..1")
    done = pit(*words, "--at-a-time", "3", "--sweep", "four", "--wait", PIT_RUNS=str(tmp_path / "runs"))
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert (done.returncode, [row["state"] for row in rows]) == (0, ["COMPLETED"] * 4), done.stderr
    run_dirs = [tmp_path / "runs" / row["run_id"] for row in rows]
    jobs = [run_folder.read_record(run_dir / "jobs" / "0" / "job.json", run_folder.JobRef) for run_dir in run_dirs]
    ids = [job.job_id for job in jobs if job]
    array = ids[0].partition("_")[0]
    assert ids == [f"{array}_{task}" for task in range(4)]
    # Also within the jobs: Slurm's own number of the last task is the whole array's, and would cancel all of it.
    starts = [run_folder.read_record(run_dir / "attempts/0/start.json", AttemptStart) for run_dir in run_dirs]
    assert [start.job_id for start in starts if start] == ids
    assert [len((run_dir / "ran").read_text().splitlines()) for run_dir in run_dirs] == [1, 2, 1, 2]
    names = {job.comment for job in alpha.job(array)}
    assert names == {"a 'b'"}


def launch_and_die(sweep_dir: Path, planned: list[launch_sweep.PlannedPoint], module: object, name: str) -> int:
    """Launch in a child process that is killed where it calls a function; its exit status."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        setattr(module, name, lambda *_args, **_options: os._exit(9))
        launch_sweep.launch_points(sweep_dir, planned)
    finally:
        os._exit(1)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (sweep_folder, "add_point"),
        (submissions, "record_intent"),
        (array_job, "create_array"),
        (array_job, "submit_array"),
        (array_job, "array_runs"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_killed_launcher_is_completed(alpha: Client, tmp_path: Path, module: object, name: str) -> None:
    """Wherever it is killed, the same launch again gives every point one run, and every run one job."""
    site = load.load_site("alpha")
    request = tmp_path / "work" / "request.toml"
    planned = []
    for index, point in enumerate(points.make_points(points.parse_sets(["lr=1,2,3"]))):
        plan = points.plan_point(request, site, point, data={}, name="{name}-{index}", index=index)
        planned.append(launch_sweep.PlannedPoint(point, site, plan))
    sweep_dir = tmp_path / "runs" / "sweeps" / name.replace("_", "-")
    sweep_folder.open_sweep(sweep_dir, request, "digest", ("alpha",), "owner")
    assert launch_and_die(sweep_dir, planned, module, name) == 9
    made = launch_sweep.launch_points(sweep_dir, planned).points
    deadline = time.monotonic() + 120
    run_dirs = [Path(point.run_dir) for point in made]
    while time.monotonic() < deadline and not all((run_dir / "verdict.json").exists() for run_dir in run_dirs):
        time.sleep(0.5)
    assert [(run_dir / "ran").read_text().splitlines() for run_dir in run_dirs] == [["1.0"], ["2.0"], ["3.0"]]
    assert sorted(tmp_path.glob("runs/s-*")) == sorted(run_dirs)
    if name in ("submit_array", "array_runs"):  # the array's folder was complete: it is submitted, and no single jobs
        jobs = [run_folder.read_record(run_dir / "jobs/0/job.json", run_folder.JobRef) for run_dir in run_dirs]
        assert [job.job_id.partition("_")[2] for job in jobs if job] == ["0", "1", "2"]


def test_a_failure_after_the_submission_keeps_the_runs(
    alpha: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stale file handle once Slurm has the array: its tasks need their folders, and a repetition records the jobs."""
    site = load.load_site("alpha")
    request = tmp_path / "work" / "request.toml"
    planned = []
    for index, point in enumerate(points.make_points(points.parse_sets(["lr=1,2"]))):
        plan = points.plan_point(request, site, point, data={}, name="{name}-{index}", index=index)
        planned.append(launch_sweep.PlannedPoint(point, site, plan))
    sweep_dir = tmp_path / "runs" / "sweeps" / "stale"
    sweep_folder.open_sweep(sweep_dir, request, "digest", ("alpha",), "owner")

    def stale(_array_dir: Path) -> list[Path]:
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr(array_job, "array_runs", stale)
        with pytest.raises(PitError):
            launch_sweep.launch_points(sweep_dir, planned)
    run_dirs = sorted(tmp_path.glob("runs/s-*"))
    assert len(run_dirs) == len(sweep_folder.read_points(sweep_dir)) == 2
    made = launch_sweep.launch_points(sweep_dir, planned).points
    assert sorted(Path(point.run_dir) for point in made) == run_dirs
    jobs = [run_folder.read_record(run_dir / "job.json", run_folder.JobRef) for run_dir in run_dirs]
    assert all(jobs)
    alpha.cancel([job.job_id for job in jobs if job])


def test_a_refused_array_leaves_nothing(alpha: Client, tmp_path: Path, pit: Pit) -> None:
    """Slurm refuses the array: exit 4, and neither runs nor points remain, so that a repetition starts from nothing."""
    (tmp_path / "work" / "request.toml").write_text(REQUEST + 'reservation = "nosuch"\n')
    words = ("launch", "run", "work/request.toml", "--site", "alpha", "--set", "lr=1,2", "--sweep", "none")
    done = pit(*words, PIT_RUNS=str(tmp_path / "runs"))
    assert done.returncode == 4
    assert "reservation" in done.stderr.lower()
    assert not list(tmp_path.glob("runs/s-*"))
    assert not list(tmp_path.glob("runs/sweeps/none/points/*"))
