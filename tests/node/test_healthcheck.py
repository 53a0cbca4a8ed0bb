"""`scripts/pit-healthcheck`: what it does in a prolog, and that nothing but a fault of the node fails one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pitools.node.gather.read import read_bytes

Hook = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def hook(repo: Path, tmp_path: Path) -> Hook:
    """Runs the script as slurmd does, with nothing in its environment."""
    (tmp_path / "state").mkdir()
    (tmp_path / "spool").mkdir()
    config = tmp_path / "node.toml"
    config.write_text(f'spool = "{tmp_path}/spool"\nstate = "{tmp_path}/state"\npython = "{sys.executable}"\n')

    def call(**env: str) -> subprocess.CompletedProcess[str]:
        env = {"PIT_NODE_CONFIG": str(config), "SLURMD_NODENAME": "n01", **env}
        script = str(repo / "scripts" / "pit-healthcheck")
        return subprocess.run([script], env=env, capture_output=True, text=True, timeout=60, check=False)

    return call


@pytest.mark.parametrize(("option", "code"), [("--help", 0), ("--report", 2)])
def test_an_argument_is_answered_by_the_header(repo: Path, tmp_path: Path, option: str, code: int) -> None:
    """Slurm gives none: a person does, and no node is checked."""
    env = {"PIT_NODE_CONFIG": str(tmp_path / "none.toml")}
    argv = [str(repo / "scripts" / "pit-healthcheck"), option]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (code, "")
    assert "HealthCheckProgram=" in done.stdout


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("{later}\ngpu-count: gpus: 7\n", 1),
        ("{before}\ngpu-count: gpus: 7\n", 0),
        ("", 0),
        ("{later}\n", 0),
        ("soon\nwhy\n", 0),
        ("-1 -o 1\nwhy\n", 0),
        ("$(touch /tmp/pit-no)\nwhy\n", 0),
        (None, 0),
    ],
    ids=["fresh", "old", "empty", "no reason", "no time", "test's words", "a command", "missing"],
)
@pytest.mark.parametrize("context", ["prolog_slurmd", "epilog_slurmd"])
def test_only_a_fresh_refusal_fails_a_prolog(
    hook: Hook, tmp_path: Path, context: str, text: str | None, code: int
) -> None:
    """Its reason is on stderr, for slurmd's log."""
    if text is not None:
        now = int(time.time())
        (tmp_path / "state" / "n01.refuse").write_text(text.format(later=now + 600, before=now - 600))
    done = hook(SLURM_SCRIPT_CONTEXT=context, SLURM_JOB_ID="7")
    assert done.returncode == code
    assert ("job 7: gpu-count: gpus: 7" in done.stderr) is bool(code)


def test_a_pipe_in_place_of_a_refusal_holds_no_prolog_up(hook: Hook, tmp_path: Path) -> None:
    """It is not opened, as its other end may never be."""
    os.mkfifo(tmp_path / "state" / "n01.refuse")
    assert hook(SLURM_SCRIPT_CONTEXT="prolog_slurmd").returncode == 0


def test_a_configuration_that_others_can_write_is_not_used(hook: Hook, tmp_path: Path) -> None:
    """It names a program: a warning, and no node is drained for it."""
    (tmp_path / "node.toml").chmod(0o666)
    (tmp_path / "state" / "n01.refuse").write_text(f"{int(time.time()) + 600}\nwhy\n")
    for env in ({}, {"SLURM_SCRIPT_CONTEXT": "prolog_slurmd"}):
        done = hook(**env)
        assert done.returncode == 0
        assert "others than root" in done.stderr


@pytest.mark.parametrize(("path", "mode"), [("state", 0o777), ("state", 0o1777), ("state/n01.refuse", 0o666)])
def test_a_refusal_that_others_can_write_is_not_obeyed(hook: Hook, tmp_path: Path, path: str, mode: int) -> None:
    """Nor any in a sticky folder, where users could exchange it; one would keep all others' jobs off a node."""
    refusal = tmp_path / "state" / "n01.refuse"
    refusal.write_text(f"{int(time.time()) + 600}\nhello\n")
    (tmp_path / path).chmod(mode)
    done = hook(SLURM_SCRIPT_CONTEXT="prolog_slurmd")
    assert (done.returncode, "others than root" in done.stderr) == (0, True)


def test_a_python_that_cannot_start_is_said(hook: Hook, tmp_path: Path) -> None:
    """It is named, with the end of what it said; it ends with 1, as a check that failed does, which is no news."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nseq 9999 >&2\necho 'No module named pitools' >&2\nexit 1\n")
    python.chmod(0o755)
    done = hook(PIT_PYTHON=str(python))
    assert done.returncode == 0
    assert f"{python} failed (1)" in done.stderr
    assert done.stderr.endswith("No module named pitools\n")
    python.write_text("#!/bin/sh\nprintf 'check\\tstate\\nx\\tfailed\\n'\nexit 1\n")
    done = hook(PIT_PYTHON=str(python))
    assert (done.returncode, done.stderr) == (0, "")
    done = hook(PIT_PYTHON="/no/such/python", PATH="/no")
    assert "python3 (/no/such/python cannot be run)" in done.stderr


def test_a_report_without_the_nodes_own_files_is_not_denied(hook: Hook, tmp_path: Path) -> None:
    """It is written although `state` cannot be; the warning says what is wrong, and no more."""
    (tmp_path / "state").rmdir()
    (tmp_path / "state").touch()
    done = hook()
    assert (tmp_path / "spool" / "n01.json").exists()
    assert (done.returncode, "failed (" in done.stderr, str(tmp_path / "state") in done.stderr) == (0, True, True)
    assert "no new report" not in done.stderr


@pytest.mark.parametrize("quote", ['"', "'"])
def test_paths_may_have_blanks(hook: Hook, tmp_path: Path, quote: str) -> None:
    """A prolog reads `state` as TOML has it, also with a blank or a number sign in it."""
    state = tmp_path / "my state # 1"
    state.mkdir()
    (state / "n01.refuse").write_text(f"{int(time.time()) + 600}\ngpu-count: gpus: 7\n")
    (tmp_path / "node.toml").write_text(f"state = {quote}{state}{quote} # {quote}x{quote}\n[nhc]\nstate = 1\n")
    assert hook(SLURM_SCRIPT_CONTEXT="prolog_slurmd").returncode == 1


def test_nothing_is_left_behind(hook: Hook, tmp_path: Path) -> None:
    """The clock that ends a check ends with it: on a node with a check a minute there would be many."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 0\n")
    python.chmod(0o755)
    assert hook(PIT_PYTHON=str(python), PIT_MARK=str(tmp_path)).returncode == 0
    mark = f"PIT_MARK={tmp_path}".encode()
    for _ in range(100):
        left = [one for one in Path("/proc").glob("[0-9]*/environ") if mark in (read_bytes(str(one)) or b"")]
        if not left:
            break
        time.sleep(0.05)
    assert not left


def test_a_program_that_hangs_is_left_behind(hook: Hook, tmp_path: Path, repo: Path) -> None:
    """The limit is 55 s, as slurmd kills after 60; here the script has a shorter one."""
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nsleep 100\n")
    slow.chmod(0o755)
    script = tmp_path / "pit-healthcheck"
    script.write_text((repo / "scripts" / "pit-healthcheck").read_text().replace("limit=55", "limit=1"))
    env = {"PIT_NODE_CONFIG": str(tmp_path / "node.toml"), "PIT_PYTHON": str(slow)}
    done = subprocess.run(["sh", str(script)], env=env, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0
    assert "gave up after 1 s" in done.stderr


HANG = """
import os, pathlib, signal, subprocess, sys
from tests.node.gather.bad_host import mount_hanging
_, folder, script, *configs = sys.argv
server, _ = mount_hanging(pathlib.Path(folder))
jobs = [subprocess.Popen(["sh", script], env={**os.environ, "PIT_NODE_CONFIG": config}) for config in configs]
codes = [job.wait() for job in jobs]
os.kill(server, signal.SIGKILL)  # with it all end that wait
os.waitpid(server, 0)
sys.exit(any(codes))
"""


def test_a_folder_that_hangs_is_left_behind(tmp_path: Path, repo: Path) -> None:
    """Of spool, state and interpreter: not even SIGKILL ends what waits for a FUSE mount whose server is silent."""
    if os.geteuid() or not os.access("/dev/fuse", os.W_OK):
        pytest.skip("only root can mount, where /dev/fuse is")
    good = {"spool": f"{tmp_path}/spool", "state": f"{tmp_path}/state", "python": sys.executable}
    configs = []
    for key in good:
        lines = [f'{name} = "{value}"' for name, value in {**good, key: f"{tmp_path}/hung/{key}"}.items()]
        configs.append(str(tmp_path / f"{key}.toml"))
        Path(configs[-1]).write_text("\n".join(lines))
    script = tmp_path / "pit-healthcheck"
    script.write_text((repo / "scripts" / "pit-healthcheck").read_text().replace("limit=55", "limit=12"))
    unshare = ["unshare", "--mount", "--propagation", "private"]
    argv = [*unshare, sys.executable, "-c", HANG, str(tmp_path / "hung"), str(script), *configs]
    env = {"PYTHONPATH": str(repo), "PATH": os.environ["PATH"]}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr.count("gave up after 12 s")) == (0, 3), done.stderr
