"""Wrong requests, sites and clusters: a clear message, the right exit code, and nothing left behind."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

Pit = Callable[..., subprocess.CompletedProcess[str]]

GOOD = 'name = "x"\ncommand = "true"\ntime = "2m"\n'


@pytest.fixture
def refused(pit: Pit, tmp_path: Path) -> Callable[..., str]:
    """Runs `pit launch run` on a request that must fail with this code; what it said. No run may be left."""

    def run(request: str, code: int, *flags: str, **env: str) -> str:
        (tmp_path / "request.toml").write_text(request)
        runs = tmp_path / "runs"
        done = pit("launch", "run", "request.toml", *flags, **{"PIT_RUNS": str(runs), **env})
        assert done.returncode == code, done.stderr
        assert done.stdout == ""
        assert "Traceback" not in done.stderr
        assert not runs.exists() or not list(runs.iterdir())
        return done.stderr

    return run


def test_an_unknown_site_names_the_nearest(refused: Callable[..., str]) -> None:
    """Exit 2."""
    error = refused(GOOD, 2, "--site", "alpah")
    assert 'no site "alpah"' in error
    assert 'did you mean "alpha"?' in error


def test_an_unknown_key_names_file_and_neighbour(refused: Callable[..., str]) -> None:
    """Exit 3, in a request."""
    error = refused(GOOD + "nodse = 2\n", 3)
    assert 'unknown key "nodse"' in error
    assert "where: request.toml" in error
    assert 'did you mean "nodes"?' in error


def test_an_unknown_key_of_a_site(refused: Callable[..., str], tmp_path: Path) -> None:
    """Exit 3, in a site file, named with its path."""
    (tmp_path / "bad.toml").write_text('name = "bad"\nscheduller = "none"\n')
    error = refused(GOOD, 3, "--site", "bad", PIT_SITE_PATH=str(tmp_path))
    assert f"where: {tmp_path / 'bad.toml'}" in error
    assert 'did you mean "scheduler"?' in error


def test_an_unknown_partition(refused: Callable[..., str]) -> None:
    """Exit 3, with the partition that is near."""
    assert 'did you mean "train"?' in refused(GOOD + 'partition = "trian"\n', 3, "--site", "alpha")


@pytest.mark.parametrize(
    ("entry", "what"),
    [
        ("no_such_module:main", "No module named 'no_such_module'"),
        ("json:no_such_function", "module json has no function no_such_function"),
        ("broken:main", "ZeroDivisionError"),
    ],
)
def test_an_entry_point_that_does_not_import(
    refused: Callable[..., str], tmp_path: Path, entry: str, what: str
) -> None:
    """Exit 3 before anything is submitted, with the reason Python gave."""
    (tmp_path / "broken.py").write_text("1 / 0\n")
    error = refused(f'name = "x"\nentry = "{entry}"\n', 3)
    assert f'entry = "{entry}" does not import' in error
    assert what in error


def test_an_entry_that_reads_its_arguments_sees_none_of_ours(refused: Callable[..., str], tmp_path: Path) -> None:
    """A module whose argparse runs at its import is checked without arguments; one named as a file is refused."""
    (tmp_path / "arguments.py").write_text(
        "import argparse\nargparse.ArgumentParser().parse_args()\nraise SystemError\n"
    )
    assert "SystemError" in refused('name = "x"\nentry = "arguments:main"\n', 3)
    assert "without .py" in refused('name = "x"\nentry = "arguments.py:main"\n', 3)


def test_a_mistyped_parameter_in_a_command(refused: Callable[..., str]) -> None:
    """{lrr} with a parameter lr is refused, with both ways to mend it; braces that are like no parameter stay."""
    error = refused('name = "x"\ncommand = "echo {lrr} ${lr} {print}"\n[params]\nlr = 1\n', 3)
    assert "{lrr}" in error
    assert "{lr}" in error
    assert "{print}" not in error


def test_a_dataset_that_is_none(refused: Callable[..., str], tmp_path: Path) -> None:
    """Exit 5 for a folder without a manifest, 3 for a name left open, and for one of nothing, with its key."""
    (tmp_path / "empty").mkdir()
    expected = GOOD + '[data]\ndemo = ""\n'
    assert "not a dataset" in refused(expected, 5, "--data", f"demo={tmp_path / 'empty'}")
    assert 'dataset "demo" has no path' in refused(expected, 3)
    for source in ("nothing/here", "s3://lab/demo", f"{tmp_path}/empty@good"):
        error = refused(GOOD + f'[data]\ndemo = "{source}"\n', 3)
        assert "data.demo" in error
        assert "request.toml" in error


def test_a_runs_folder_that_cannot_be(refused: Callable[..., str]) -> None:
    """Exit 4, naming it."""
    assert "/proc/runs" in refused(GOOD, 4, PIT_RUNS="/proc/runs")


def test_a_program_that_is_missing_is_named_at_once(pit: Pit, tmp_path: Path) -> None:
    """The script of a command, and a hook, which may both be there on the nodes only: a note, and the plan is made."""
    (tmp_path / "t.py").touch()
    hook = '[[hooks]]\non = ["verdict"]\ncommand = ["{}"]\n'
    notes = {}
    for script, program in (("t.py", "/bin/true"), ("typo.py", "/no/hook")):
        request = f'name = "t"\ncommand = "python {script} --x"\n' + hook.format(program)
        (tmp_path / "request.toml").write_text(request)
        done = pit("launch", "plan", "request.toml")
        assert done.returncode == 0
        notes[script] = [line for line in done.stderr.splitlines() if "note" in line]
    assert notes["t.py"] == []
    assert [name in note for name, note in zip(("/no/hook", "typo.py"), notes["typo.py"], strict=True)] == [True, True]


def test_a_plan_that_is_none(pit: Pit) -> None:
    """Exit 2, and what to pipe instead."""
    done = pit("launch", "run", "-", stdin='{"schema":"pit.run/1"}\n')
    assert done.returncode == 2
    assert "pipe it from `pit launch plan`" in done.stderr


@pytest.mark.slurm
def test_a_controller_that_is_gone(clusters: Path, refused: Callable[..., str], tmp_path: Path) -> None:
    """Exit 75, when patience is over: the same request may be run again."""
    conf = tmp_path / "slurm.conf"
    text = (clusters / "alpha" / "slurm.conf").read_text()
    lines = ["SlurmctldPort=19" if line.startswith("SlurmctldPort") else line for line in text.splitlines()]
    conf.write_text("\n".join([*lines, "MessageTimeout=1"]) + "\n")
    (tmp_path / "alpha.toml").write_text(f'[slurm]\nconf = "{conf}"\n')
    error = refused(GOOD, 75, "--site", "alpha", PIT_SITE_PATH=str(tmp_path), PIT_RETRY_FOR="1s")
    assert "Unable to contact slurm controller" in error
    assert "next:" in error


@pytest.mark.slurm
def test_what_slurm_itself_refuses(clusters: Path, refused: Callable[..., str]) -> None:
    """Exit 4 with Slurm's own sentence."""
    assert "Invalid feature" in refused(GOOD + 'constraint = "h900"\n', 4, "--site", "alpha")


def test_a_piped_plan_is_judged_too(pit: Pit, tmp_path: Path) -> None:
    """A plan's own name becomes a path: one that was tampered with is refused, and flags cannot change a plan."""
    (tmp_path / "request.toml").write_text(GOOD)
    plan = pit("launch", "plan", "request.toml").stdout
    done = pit("launch", "run", "-", "--nodes", "7", stdin=plan)
    assert done.returncode == 2
    assert "--nodes cannot change a plan" in done.stderr
    hostile = plan.replace('"request":{"name":"x"', '"request":{"name":"../x"')
    assert hostile != plan
    done = pit("launch", "run", "-", stdin=hostile)
    assert done.returncode == 3
    assert "name = '../x'" in done.stderr


@pytest.mark.parametrize("time", ["0", "30s"])
def test_less_than_a_minute_is_no_limit_to_slurm(refused: Callable[..., str], time: str) -> None:
    """Exit 3: `--time=0` would be unlimited."""
    assert "less than a minute" in refused(f'name = "x"\ncommand = "true"\ntime = "{time}"\n', 3)


def test_a_workdir_that_is_not_there(refused: Callable[..., str], pit: Pit) -> None:
    """Exit 3 before the queue, not after; a plan of it would be refused, so there is none, nor a place in the queue."""
    assert "is no folder" in refused(GOOD + 'workdir = "nowhere"\n', 3)
    for words in (("launch", "plan"), ("place", "run")):
        done = pit(*words, "request.toml", "--site", "alpha")
        assert (done.returncode, done.stdout, "is no folder" in done.stderr) == (3, "", True)


def test_an_argument_named_steps_may_be_anything(pit: Pit, tmp_path: Path) -> None:
    """Only the progress bar looks at it."""
    (tmp_path / "mine.py").write_text("def main(steps):\n    assert steps == 'many'\n")
    (tmp_path / "request.toml").write_text('name = "x"\nentry = "mine:main"\n[args]\nsteps = "many"\n')
    assert pit("launch", "run", "request.toml", "--wait").returncode == 0


@pytest.mark.slurm
def test_a_job_is_not_left_behind_by_a_failure_after_sbatch(
    clusters: Path, pit: Pit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a run's folder cannot take note of a job that Slurm has, the job is cancelled, the folder gone."""
    from pitools.core.errors import PitError
    from pitools.launch import plan as planning
    from pitools.launch import request as requests
    from pitools.launch.submission import submit
    from pitools.site.connect import client
    from pitools.site.load import load_site

    observed: list[str] = []
    replace = os.replace

    def full(source: Path, target: Path) -> None:
        if target.name == "job.json":
            observed.append(json.loads(Path(source).read_bytes())["job_id"])
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr("os.replace", full)
    monkeypatch.setenv("PIT_RUNS", str(tmp_path / "runs"))
    (tmp_path / "request.toml").write_text(GOOD)
    site = load_site("alpha")
    plan = planning.make_plan(requests.load_request(tmp_path / "request.toml"), site, "test")
    with pytest.raises(PitError) as caught:
        submit.submit_run(plan, site)
    assert caught.value.exit_code == 75
    assert not list((tmp_path / "runs").iterdir())
    (job_id,) = observed
    deadline = time.monotonic() + 30
    while (state := client(site).state_of([job_id])[job_id]) not in ("CANCELLED", "FAILED"):
        assert time.monotonic() < deadline, state
        time.sleep(0.5)
