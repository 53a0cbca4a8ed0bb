"""Being there: a shell's variables beside a rank, the same as the rank's own; a site's Slurm for one's own commands."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

Pit = Callable[..., subprocess.CompletedProcess[str]]
REQUEST = """\
name = "a"
command = "env > $PIT_RUN_DIR/env.$PIT_RANK; sleep {sleep}"
framework = "{framework}"
nodes = 2
time = "5m"
[params]
lr = 1e-3
sleep = 0
[env]
QUOTED = "it's $HOME"
"""
# What is of the rank's process, its step or its interpreter, and not of its program.
OWN = {
    "PATH",
    "PIT_JOB_SECRET",
    "PIT_HEAD_ADDRESS",
    "PIT_HEAD_NODE",
    "PIT_PORTS",
    "PIT_PYTHON",
    "PIT_HOST_SUFFIX",
    "PIT_UMASK",
}
OWN |= {"PIT_TASKS_PER_NODE", "PIT_GPUS_PER_NODE", "PIT_NODE"}


def variables(text: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


@pytest.mark.parametrize("framework", ["none", "torch", "jax"])
def test_env_is_the_rank_s_own(pit: Pit, tmp_path: Path, framework: str) -> None:
    """A shell that evaluates it has what rank 1 had, for each framework, without the secret of the rendezvous."""
    (tmp_path / "r.toml").write_text(REQUEST.format(framework=framework, sleep="{sleep}"))
    done = pit("launch", "run", "r.toml", "--wait", "--set", "lr=2")
    run = json.loads(done.stdout)
    printed = pit("launch", "env", run["run_id"], "--rank", "1")
    shell = subprocess.run(
        ["env", "-i", "/bin/sh", "-c", f"{printed.stdout}\n/usr/bin/env"], capture_output=True, text=True, check=True
    )
    actual = variables(shell.stdout)
    expected = variables((Path(run["run_dir"]) / "env.1").read_text())
    assert {name: value for name, value in actual.items() if name != "PWD"}.items() <= expected.items()
    missing = {name for name in expected if name.startswith(("PIT_", "MASTER_", "RANK", "JAX_"))} - actual.keys() - OWN
    assert missing == set()
    assert (actual["PIT_PARAM_LR"], actual["QUOTED"]) == ("2.0", "it's $HOME")
    assert pit("launch", "env", run["run_id"], "--rank", "2").returncode == 2


def test_env_of_a_request_runs_its_program(pit: Pit, tmp_path: Path) -> None:
    """As a single process, in a folder of its own, without a run."""
    (tmp_path / "r.toml").write_text(REQUEST.format(framework="torch", sleep="{sleep}"))
    printed = pit("launch", "env", "r.toml", "--set", "lr=3")
    code = 'echo "$RANK of $WORLD_SIZE: $PIT_PARAM_LR" > "$PIT_ATTEMPT_DIR/it"; cat runs/.debug.*/a/attempts/0/it'
    shell = subprocess.run(
        ["sh", "-euc", f"{printed.stdout}\n{code}"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert shell.stdout == "0 of 1: 3.0\n"
    assert not list(tmp_path.glob("debug*"))
    assert pit("launch", "list").stdout == ""
    assert str(tmp_path / "runs" / ".debug.") in printed.stderr


def test_a_command_beside_a_rank_here(pit: Pit, tmp_path: Path) -> None:
    """With the rank's variables, in its working directory, while the run runs."""
    (tmp_path / "r.toml").write_text(REQUEST.format(framework="none", sleep="{sleep}"))
    run = json.loads(pit("launch", "run", "r.toml", "--set", "sleep=120").stdout)
    _wait_for(Path(run["run_dir"]) / "env.1")
    command = ("launch", "attach", run["run_id"], "--rank", "1", "--", "sh", "-c", "echo rank $PIT_RANK in $PWD")
    done = pit(*command)
    assert done.stdout.startswith("rank 1 in /"), done.stderr
    assert "/code" in done.stdout
    assert pit("launch", "cancel", run["run_id"]).returncode == 0
    pit("launch", "watch", run["run_id"])
    assert pit(*command).returncode == 4


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not path.exists():
        time.sleep(0.3)


@pytest.mark.parametrize("command", [("attach", "--", "true"), ("env",)])
def test_a_run_that_others_could_have_changed(
    pit: Pit, tmp_path: Path, command: tuple[str, ...], as_root: None
) -> None:
    """Its variables decide which programs run: refused, as `reproduce` and `resume` refuse it."""
    (tmp_path / "r.toml").write_text(REQUEST.format(framework="none", sleep="{sleep}"))
    run = json.loads(pit("launch", "run", "r.toml", "--wait").stdout)
    os.chown(run["run_dir"], 65533, -1)
    done = pit("launch", command[0], run["run_id"], *command[1:])
    assert (done.returncode, done.stdout) == (3, "")


@pytest.mark.parametrize("name", ["A;touch pwned;B", "LD_PRELOAD", "BASH_ENV", "PATH"])
def test_variables_that_no_request_can_set(pit: Pit, tmp_path: Path, name: str) -> None:
    """A plan with one is refused where it is used, as the request would have been."""
    (tmp_path / "r.toml").write_text(REQUEST.format(framework="none", sleep="{sleep}"))
    run = json.loads(pit("launch", "run", "r.toml", "--wait").stdout)
    plan_path = Path(run["run_dir"]) / "plan.json"
    plan = json.loads(plan_path.read_text())
    plan["request"]["env"][name] = "x"
    plan_path.write_text(json.dumps(plan))
    done = pit("launch", "env", run["run_id"])
    assert (done.returncode, done.stdout) == (5, "")
    assert pit("launch", "run", "-", stdin=json.dumps(plan)).returncode == 3


@pytest.mark.slurm
def test_a_command_beside_a_rank_in_slurm(clusters: Path, pit: Pit, tmp_path: Path) -> None:
    """A step of the running job on the rank's node; refused before and after."""
    (tmp_path / "r.toml").write_text(REQUEST.format(framework="none", sleep="{sleep}"))
    runs = {"PIT_RUNS": str(tmp_path / "runs")}
    run = json.loads(pit("launch", "run", "r.toml", "--site", "alpha", "--set", "sleep=120", **runs).stdout)
    run_dir = Path(run["run_dir"])
    deadline = time.monotonic() + 60
    _wait_for(run_dir / "env.1")
    node = json.loads((run_dir / "attempts/0/ranks/1.json").read_text())["node"]
    command = ("--rank", "1", "--", "sh", "-c", "echo $PIT_RANK $SLURMD_NODENAME $SLURM_JOB_ID")
    done = pit("launch", "attach", run["run_id"], *command, **runs)
    assert done.stdout.split() == ["1", node, run["job_id"]], done.stderr
    assert pit("launch", "cancel", run["run_id"], **runs).returncode == 0
    while time.monotonic() < deadline and pit("launch", "attach", run["run_id"], *command, **runs).returncode != 4:
        time.sleep(0.5)
    assert pit("launch", "attach", run["run_id"], *command, **runs).returncode == 4


@pytest.mark.slurm
def test_a_site_s_slurm_for_ones_own_commands(clusters: Path, pit: Pit) -> None:
    """`pit site exec` finds the cluster without a variable; the exit code is the command's."""
    for name in ("alpha", "beta"):
        done = pit("site", "exec", name, "--", "scontrol", "show", "config")
        assert f"ClusterName             = {name}\n" in done.stdout
    assert pit("site", "exec", "alpha", "--", "sh", "-c", "exit 7").returncode == 7
    assert pit("site", "exec", "nosuch", "--", "true").returncode == 2


def test_a_command_that_is_not_there(pit: Pit) -> None:
    """Exit code 4, and its name."""
    done = pit("site", "exec", "local", "--", "nosuchcommand")
    assert (done.returncode, "nosuchcommand" in done.stderr) == (4, True)
