"""Wrong requests, sites and clusters: a clear message, the right exit code, and nothing left behind."""

from __future__ import annotations

import subprocess
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
    said = refused(GOOD, 2, "--site", "alpah")
    assert 'no site "alpah"' in said
    assert 'did you mean "alpha"?' in said


def test_an_unknown_key_names_file_and_neighbour(refused: Callable[..., str]) -> None:
    """Exit 3, in a request."""
    said = refused(GOOD + "nodse = 2\n", 3)
    assert 'unknown key "nodse"' in said
    assert "where: request.toml" in said
    assert 'did you mean "nodes"?' in said


def test_an_unknown_key_of_a_site(refused: Callable[..., str], tmp_path: Path) -> None:
    """Exit 3, in a site file, named with its path."""
    (tmp_path / "bad.toml").write_text('name = "bad"\nscheduller = "none"\n')
    said = refused(GOOD, 3, "--site", "bad", PIT_SITE_PATH=str(tmp_path))
    assert f"where: {tmp_path / 'bad.toml'}" in said
    assert 'did you mean "scheduler"?' in said


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
    said = refused(f'name = "x"\nentry = "{entry}"\n', 3)
    assert f'entry = "{entry}" does not import' in said
    assert what in said


def test_a_dataset_that_is_none(refused: Callable[..., str], tmp_path: Path) -> None:
    """Exit 5 for a folder without a manifest, 3 for a name left open."""
    (tmp_path / "empty").mkdir()
    wanted = GOOD + '[data]\ndemo = ""\n'
    assert "not a dataset" in refused(wanted, 5, "--data", f"demo={tmp_path / 'empty'}")
    assert 'dataset "demo" has no path' in refused(wanted, 3)


def test_a_runs_folder_that_cannot_be(refused: Callable[..., str]) -> None:
    """Exit 4, naming it."""
    assert "/proc/runs" in refused(GOOD, 4, PIT_RUNS="/proc/runs")


def test_a_plan_that_is_none(pit: Pit) -> None:
    """Exit 2, and what to pipe instead."""
    done = pit("launch", "run", "-", stdin='{"schema":"pit.run/1"}\n')
    assert done.returncode == 2
    assert "pipe it from `pit launch plan`" in done.stderr


@pytest.mark.slurm
def test_a_controller_that_is_gone(clusters: Path, refused: Callable[..., str], tmp_path: Path) -> None:
    """Exit 75, in seconds: the same request may be run again."""
    conf = tmp_path / "slurm.conf"
    text = (clusters / "alpha" / "slurm.conf").read_text()
    lines = ["SlurmctldPort=19" if line.startswith("SlurmctldPort") else line for line in text.splitlines()]
    conf.write_text("\n".join([*lines, "MessageTimeout=5"]) + "\n")
    (tmp_path / "alpha.toml").write_text(f'[slurm]\nconf = "{conf}"\n')
    said = refused(GOOD, 75, "--site", "alpha", PIT_SITE_PATH=str(tmp_path))
    assert "Unable to contact slurm controller" in said
    assert "next:" in said


@pytest.mark.slurm
def test_what_slurm_itself_refuses(clusters: Path, refused: Callable[..., str]) -> None:
    """Exit 4 with Slurm's own sentence."""
    assert "Invalid feature" in refused(GOOD + 'constraint = "h900"\n', 4, "--site", "alpha")
