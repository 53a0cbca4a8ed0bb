"""Preflights on a running cluster: a bad node is replaced and the run not blamed; one that breaks stops nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pitools.run import run_folder
from pitools.run.attempt_records import AttemptStart, Preflight
from pitools.slurm.client import Client

pytestmark = pytest.mark.slurm

Run = dict[str, Any]
# Leaf 1 has the four nodes that Slurm takes first, alpha01 among them; alpha08 is the only other one.
REQUEST = """\
name = "tested"
command = "echo rank $PIT_RANK"
nodes = {nodes}
exclude = "alpha[02,04,06]"
time = "5m"
snapshot = false
preflight = "quick"
[retry]
node = 0
gpu = 0
network = 0
unknown = 0
max = 1
[env]
PYTHONPATH = "{folder}:{repo}"
"""
CHECK = """\
[types.bad]
nodes = "alpha01"
[[check]]
name = "scratch"
table = "files"
where.path = "/nosuch"
key = "exists"
equals = true
types = ["bad"]
"""
# Python runs such a text in each process of the job.
CORRUPT = """\
import os, sys
if "pitools.node.bench.worker" in sys.orig_argv and os.environ["SLURMD_NODENAME"] == "alpha01":
    from pitools.node.bench.collectives import SocketCollective
    right = SocketCollective.all_reduce
    def all_reduce(self, buffer):
        buffer[7] += 1
        return right(self, buffer)
    SocketCollective.all_reduce = all_reduce
"""
HANG = """\
import sys, time
if "pitools.node.job_check" in sys.orig_argv:
    time.sleep(300)
"""


@pytest.fixture
def start(clusters: Path, alpha: Client, pit: Callable[..., Any], tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Starts a run on idle nodes. checks: the site's node.toml. python: what Python runs first in the job."""
    runs = clusters / "runs" / f"preflight-{os.getpid()}-{tmp_path.name}"
    env = {"PIT_RUNS": str(runs), "PIT_SITE_PATH": str(tmp_path / "sites")}
    started: list[str] = []

    def begin(*words: str, nodes: int = 4, checks: str = "", python: str = "") -> Run:
        (tmp_path / "sites").mkdir()
        (tmp_path / "sites" / "node.toml").write_text(checks)
        (tmp_path / "sites" / "alpha.toml").write_text('[node]\nconfig = "node.toml"\n')
        (tmp_path / "python").mkdir()
        (tmp_path / "python" / "sitecustomize.py").write_text(python)
        repo = Path(__file__).parents[2]
        (tmp_path / "t.toml").write_text(REQUEST.format(nodes=nodes, folder=tmp_path / "python", repo=repo))
        until(lambda: {(node.state, *node.flags) for node in alpha.nodes()} == {("idle",)})  # alpha01 is to be taken
        done = pit("launch", "run", "t.toml", "--site", "alpha", *words, **env)
        assert done.stdout, done.stderr
        run: Run = {**json.loads(done.stdout.splitlines()[-1]), "said": done.stderr}
        started.append(run["run_dir"])
        return run

    yield begin
    for run_dir in started:
        pit("launch", "cancel", run_dir, **env)
    until(lambda: not subprocess.run(["rm", "-rf", str(runs)], check=False).returncode)


def until(what: Callable[[], Any], timeout_s: float = 60) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (actual := what()):
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.1)
    return actual


def decisions(run: Run) -> list[tuple[str, str, list[str]]]:
    events = [json.loads(line) for line in (Path(run["run_dir"]) / "events.jsonl").read_text().splitlines()]
    details = [event["detail"] for event in events if event["event"] == "decided"]
    return [(detail["kind"], detail["action"], detail["exclude"]) for detail in details]


def preflight_of(run: Run, attempt: int = 0) -> Preflight:
    record = run_folder.read_record(Path(run["run_dir"]) / "attempts" / str(attempt) / "preflight.json", Preflight)
    assert record is not None
    return record


def preflight_process(run: Run) -> int:
    """The process of the job that waits for the nodes; 0 before it runs."""
    for folder in Path("/proc").iterdir():
        try:
            argv, env = (folder / "cmdline").read_bytes(), (folder / "environ").read_bytes()
        except OSError:
            continue
        if argv.endswith(b"\0-m\0pitools.launch.job.preflight\0") and run["run_dir"].encode() in env:
            return int(folder.name)
    return 0


@pytest.mark.parametrize("fault", ["check", "all-reduce"])
def test_a_bad_node_is_replaced(start: Callable[..., Run], pit: Callable[..., Any], fault: str) -> None:
    """The run finishes on other nodes though no retry is allowed; every view of it names the node and the fault."""
    run = start("--wait", **({"checks": CHECK} if fault == "check" else {"python": CORRUPT}))
    assert (run["state"], run["attempts"]) == ("COMPLETED", 2), run["said"]
    assert decisions(run) == [("preflight", "resubmit", ["alpha01"]), ("succeeded", "done", [])]
    first, second = preflight_of(run), preflight_of(run, 1)
    name = "scratch" if fault == "check" else "all-reduce"
    assert [(failure.node, failure.check) for failure in first.failures] == [("alpha01", name)]
    assert (first.answered, second.answered, second.failures) == (4, 4, ())
    assert min(first.wall_s, second.wall_s) > 0
    assert second.problem == ""
    attempts = Path(run["run_dir"]) / "attempts"
    start_record = run_folder.read_record(attempts / "1" / "start.json", AttemptStart)
    assert start_record is not None
    assert start_record.node_list == "alpha[03,05,07-08]"
    assert not list((attempts / "0" / "ranks").glob("*"))
    (line,) = [line for line in run["said"].splitlines() if "attempt 0: preflight (" in line]
    assert {"alpha01:", f"{name}:"} <= set(line.split())
    why = pit("launch", "why", run["run_dir"], "--site", "alpha", PIT_RUNS=str(attempts.parents[1])).stdout
    cause = json.loads(why.splitlines()[0])
    assert (cause["kind"], cause["nodes"], cause["evidence"][0]["node"]) == ("preflight", ["alpha01"], "alpha01")


def test_two_nodes_with_wrong_data_are_both_replaced(start: Callable[..., Run]) -> None:
    """No rank starts on either of them, as nobody can tell which it is; here only one may be excluded at a time."""
    run = start("--wait", nodes=2, python=CORRUPT)
    assert run["state"] == "COMPLETED", run["said"]
    assert run["attempts"] in (2, 3)
    bad = [failure.node for failure in preflight_of(run).failures]
    assert bad == decisions(run)[0][2]
    assert ("alpha01" in bad, len(bad)) == (True, 2)
    assert not list((Path(run["run_dir"]) / "attempts" / "0" / "ranks").glob("*"))


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_broken_file_of_checks_stops_nothing(start: Callable[..., Run], nodes: int) -> None:
    """The job's log and the record say what is wrong; a single node has no all-reduce."""
    run = start("--wait", nodes=nodes, checks='nosuch = "key"\n')
    assert (run["state"], run["attempts"]) == ("COMPLETED", 1), run["said"]
    record = preflight_of(run)
    assert (record.answered, record.failures) == (0, ())
    assert "nosuch" in record.problem
    (log,) = Path(run["run_dir"]).glob("slurm-*.out")
    assert "nosuch" in log.read_text()


def test_a_preflight_that_is_killed_stops_nothing(start: Callable[..., Run], pit: Callable[..., Any]) -> None:
    """The ranks start at once, though the nodes still hang in their checks."""
    run = start(nodes=2, python=HANG)
    os.kill(until(lambda: preflight_process(run)), signal.SIGKILL)
    done = pit("launch", "watch", run["run_dir"], "--site", "alpha", PIT_RUNS=str(Path(run["run_dir"]).parent))
    assert done.returncode == 0, done.stderr
    assert decisions(run) == [("succeeded", "done", [])]


def test_a_cancel_in_the_middle_blames_no_node(start: Callable[..., Run], pit: Callable[..., Any]) -> None:
    """It ends the job without waiting for nodes that hang, and nothing is excluded."""
    run = start(nodes=2, python=HANG)
    until(lambda: preflight_process(run))
    pit("launch", "cancel", run["run_dir"], PIT_RUNS=str(Path(run["run_dir"]).parent))
    until(lambda: (Path(run["run_dir"]) / "verdict.json").exists())
    assert json.loads((Path(run["run_dir"]) / "verdict.json").read_text())["kind"] == "cancelled"
    until(lambda: not preflight_process(run))
    assert all(not exclude for _, _, exclude in decisions(run))


def test_nodes_that_hang_are_waited_for_so_long_and_no_longer(start: Callable[..., Run]) -> None:
    """Then the ranks start, and the record names the nodes."""
    run = start("--wait", nodes=2, python=HANG)
    assert (run["state"], run["attempts"]) == ("COMPLETED", 1), run["said"]
    assert preflight_of(run).answered == 0
    assert "alpha[" in preflight_of(run).problem
