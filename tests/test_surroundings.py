"""What a command is started with: closed or full streams, odd Python options, a poor environment."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

PIT = str(Path(sys.executable).parent / "pit")
PLAIN = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"}
THIS = {"PYTHONPATH": str(Path(__file__).parents[1])}


def run(
    argv: list[str], env: Mapping[str, str] = PLAIN, before: Callable[[], None] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        argv, env={**THIS, **env}, capture_output=True, text=True, timeout=60, check=False, preexec_fn=before
    )


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams(tmp_path: Path, closed: str) -> None:
    """A stream that the caller closed is nobody's, and no other file takes its place."""
    done = run(["sh", "-c", f'"$@" {closed}', "sh", PIT, "site", "list"])
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    assert ("local" in done.stdout) == (">&-" not in closed.split())


def test_a_closed_stdin_is_an_empty_one() -> None:
    """A command that reads it says that nothing is there, and a command that asks has no terminal."""
    for words in ("launch run -", "place run -", "site exec local -- true"):
        done = run(["sh", "-c", f"{PIT} {words} <&-"])
        assert "Traceback" not in done.stderr, done.stderr
        assert done.returncode < 70


def test_a_full_disk_behind_stdout() -> None:
    """A stdout that takes nothing is an error, and not a crash."""
    assert run(["sh", "-c", f"{PIT} site list > /dev/full"]).returncode == 4


@pytest.mark.parametrize(
    "env",
    [
        {"PATH": ""},
        {"PATH": "/usr/bin:/bin", "LANG": "C", "LC_ALL": "C"},
        {"PYTHONPATH": "/nonexistent"},
        {"TMPDIR": "/nonexistent", "HOME": "/nonexistent"},
        {},
    ],
    ids=["no-path", "C", "pythonpath", "no-tmpdir", "empty"],
)
def test_a_poor_environment(env: dict[str, str]) -> None:
    """Neither PATH, HOME, TMPDIR nor a locale is needed to list sites."""
    done = run([PIT, "site", "list"], env)
    assert done.returncode == 0, done.stderr
    assert "local" in done.stdout


@pytest.mark.parametrize("option", ["-I", "-OO", "-X utf8=0"])
def test_options_of_python(option: str) -> None:
    """The command works isolated from its surroundings, and without asserts and docstrings."""
    done = run([sys.executable, *option.split(), "-c", "from pitools.cli import main; main()", "site", "list"])
    assert done.returncode == 0, done.stderr


def test_few_descriptors() -> None:
    """64 open files are enough."""
    done = run([PIT, "site", "list"], PLAIN, lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)))
    assert done.returncode == 0, done.stderr


def test_a_broken_pipe_of_the_command_is_a_failure() -> None:
    """Exit 0 is for a reader of stdout that has enough, not for a pipe to another process that breaks."""
    code = """
import sys
import click
from pitools.cli import run
@click.command()
def command():
    raise BrokenPipeError(32, "Broken pipe")
sys.exit(run(command, "command"))
"""
    result = run([sys.executable, "-c", code], PLAIN)
    assert (result.returncode, bool(result.stderr)) == (4, True)
    result = run(["sh", "-c", f"(sleep 0.5; {PIT} site list; echo $? >&2) | true"], PLAIN)
    assert result.stderr == "0\n"


def test_a_reader_that_has_enough(repo: Path, tmp_path: Path) -> None:
    """A pipe that nobody reads is no failure of devcluster."""
    command = f"{sys.executable} {repo}/scripts/devcluster status --root {tmp_path}/none; exec >&-"

    done = run(["sh", "-c", f"({command}) | true"], {**os.environ})
    assert "BrokenPipe" not in done.stderr


def test_what_tests_start_is_this_checkout(tmp_path: Path) -> None:
    """Python runs the code of this checkout from any folder, also where another one is installed beside it."""
    argv = [sys.executable, "-c", "import pitools; print(pitools.__file__)"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()).parents[1] == Path(__file__).parents[1]
