"""Nodes for a job that waits in a real Slurm: chosen, lost, chosen again, or left to Slurm."""

from __future__ import annotations

import json
import math
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pitools.core import hostlist, subprocesses
from pitools.core.errors import ClusterError, Unreachable, UsageError
from pitools.slurm.client import Client
from pitools.topology.acquire import loop
from pitools.topology.acquire.options import AcquireOptions
from pitools.topology.fabric_model import Fabric

pytestmark = pytest.mark.slurm

Pit = Callable[..., subprocess.CompletedProcess[str]]
Bench = Any  # of conftest.py


def test_a_job_starts_on_its_choice(bench: Bench) -> None:
    """One call frees it and names its leaves; it starts below one leaf, long before it would by itself."""
    actual = bench.get(bench.submit("--begin=now+1000"))  # it is followed for 60 s
    assert (actual.state, actual.is_within, actual.tries, actual.leaves, actual.is_released) == (
        "RUNNING",
        True,
        1,
        1,
        False,
    )
    assert bench.leaf(hostlist.expand(actual.node_list)) == bench.leaf(hostlist.expand(actual.chosen))


def test_a_drained_node_has_a_stand_in(bench: Bench) -> None:
    """A chosen node is drained before the job starts: the leaf's others are left to it, and no new choice is needed."""
    job = bench.submit("--hold")
    actual = bench.get(job, lambda: (bench.drain(bench.chosen()[0]), bench.release()))
    assert (actual.state, actual.is_within, actual.tries) == ("RUNNING", True, 1)
    assert bench.drained[0] not in hostlist.expand(actual.node_list)


def test_a_drained_node_without_one(bench: Bench) -> None:
    """By nodelist there is none: it is chosen again, under the same id and since the same time."""
    job = bench.submit("--hold")
    submitted = bench.slurm.job(job)[0]
    actual = bench.get(job, lambda: bench.drain(bench.chosen()[0]), bench.release, by="nodelist")
    assert (actual.state, actual.is_within, actual.tries, actual.job_id) == ("RUNNING", True, 2, submitted.job_id)
    assert bench.drained[0] not in hostlist.expand(actual.node_list)
    assert f"{bench.drained[0]} lost" in actual.reason


def test_nodes_to_avoid_are_left_out(bench: Bench) -> None:
    """Neither chosen, nor left to Slurm in a chosen leaf; where the others do not suffice, they are taken."""
    job = bench.submit("--hold")
    actual = bench.get(job, bench.release, avoid={"alpha01": 5.0, "alpha02": math.inf, "nosuch": math.inf})
    assert actual.state == "RUNNING"
    assert {"alpha01", "alpha02"}.isdisjoint(hostlist.expand(actual.node_list))
    assert {"alpha01", "alpha02"} <= set(hostlist.expand(bench.job().excluded_nodes))
    bench.slurm.cancel([job])
    every = {f"alpha{number:02}": math.inf for number in range(1, 9)}
    assert bench.get(bench.submit(), avoid=every).state == "RUNNING"


def test_a_lost_race(bench: Bench) -> None:
    """Somebody else's job takes a chosen node: the next choice is without it."""
    job = bench.submit("--hold")
    actual = bench.get(job, lambda: bench.take(bench.chosen()[0]), bench.release, by="nodelist")
    (first, *_) = (text for text in bench.said if "choice 1" in text)
    assert (actual.state, actual.is_within, actual.tries) == ("RUNNING", True, 2)
    assert actual.chosen not in first


@pytest.mark.parametrize(("on_failure", "nodelist"), [("release", ""), ("keep", "chosen"), ("cancel", "")])
def test_the_last_try(bench: Bench, on_failure: str, nodelist: str) -> None:
    """After the stated number of tries the constraint is lifted, kept or the job cancelled; its own exclusion stays."""
    job = bench.submit("--hold", "--exclude=alpha08")
    actual = bench.get(job, lambda: bench.drain(bench.chosen()[0]), by="nodelist", tries=1, on_failure=on_failure)
    after = bench.job()
    assert (actual.state, actual.tries) == ("CANCELLED" if on_failure == "cancel" else "PENDING", 1)
    assert actual.is_released == (on_failure == "release")
    assert " lost" in actual.reason
    if on_failure != "cancel":
        assert after.excluded_nodes == "alpha08"
        assert hostlist.expand(after.required_nodes or "x") == hostlist.expand(actual.chosen if nodelist else "x")


def test_too_few_free_nodes(bench: Bench) -> None:
    """Eight nodes while one is drained: the job waits like any other, and the record says how many are free."""
    bench.drain("alpha08")
    job = bench.submit("--hold", "--nodes=8")
    actual = bench.get(job, timeout_s=1)
    assert (actual.state, actual.tries, actual.is_released, actual.node_list) == ("PENDING", 0, True, "")
    assert "of 8 nodes are free" in actual.reason
    assert bench.job().excluded_nodes == ""
    assert bench.job().reason == "JobHeldUser"  # and no longer BeginTime: it is the hold alone that it waits for


def test_a_job_that_cannot_start_where_it_seems_to(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes that look free and that Slurm does not give are not tried twice, and nothing is waited for in vain."""
    monkeypatch.setattr(loop, "_NOT_STARTED_S", 1.0)
    name = f"pit-test-{time.time_ns()}"
    bench.scontrol(
        "create",
        "reservation",
        f"reservationname={name}",
        "starttime=now+60",
        "duration=1",
        "nodes=alpha08",
        "users=root",
        "flags=FLEX",
    )
    try:
        job = bench.submit("--exclude=alpha[01-06]")  # 2 minutes: what is left is idle, but not for so long
        actual = bench.get(job, timeout_s=4)
    finally:
        bench.scontrol("delete", f"reservationname={name}")
    assert (actual.state, actual.is_released, actual.tries) == ("PENDING", True, 1)
    assert "0 of 2 nodes are free" in actual.reason
    assert any("not started" in text for text in bench.said)
    assert bench.job().excluded_nodes == "alpha[01-06]"


def test_a_short_reservation(bench: Bench) -> None:
    """The chosen nodes are nobody else's until the job has them; then the reservation ends, and the job goes on."""
    observed: list[str] = []

    def look() -> None:
        observed.append(subprocesses.run(["scontrol", "-o", "show", "reservation"], timeout_s=20, env=bench.env).stdout)
        bench.release()

    actual = bench.get(bench.submit("--hold"), look, by="reservation")
    assert (actual.state, actual.is_within) == ("RUNNING", True)
    own_part = next(line for line in observed[0].splitlines() if f"pit-{actual.job_id}-" in line)
    assert "FLEX" in own_part
    assert "NO_HOLD_JOBS_AFTER" in own_part
    until = time.monotonic() + 15
    while f"pit-{actual.job_id}-" in (now := _active(bench)) and time.monotonic() < until:
        time.sleep(0.3)
    assert f"pit-{actual.job_id}-" not in now
    assert bench.slurm.state_of([actual.job_id])[actual.job_id] == "RUNNING"


def _active(bench: Bench) -> str:
    lines = subprocesses.run(["scontrol", "-o", "show", "reservation"], timeout_s=20, env=bench.env).stdout.splitlines()
    return "\n".join(line for line in lines if "State=ACTIVE" in line)


def test_reservations_are_for_operators(bench: Bench) -> None:
    """Refused by a real Slurm, for a user who is none: it says so, and no job is left behind."""

    def as_nobody(argv: list[str], **options: Any) -> subprocesses.Completed:
        plain = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
        return subprocesses.run([*(plain if "reservation" in argv else []), *argv], **options)

    slurm = Client(bench.slurm.transport, run=as_nobody)
    job = bench.submit()
    with pytest.raises(ClusterError, match="--by reservation") as caught:
        loop.run_acquire_loop(slurm, job, bench.fabric, AcquireOptions(by="reservation"))
    assert "--by exclude" in caught.value.hint
    assert bench.job().state == "CANCELLED"


def test_interrupted_it_is_left_to_slurm(bench: Bench) -> None:
    """Ctrl-C after the choice: the job stays, and nothing that nobody watches holds it."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    job = bench.submit("--hold", "--exclude=alpha07")
    with pytest.raises(KeyboardInterrupt):
        bench.get(job, interrupt, by="nodelist")
    after = bench.job()
    assert (after.state, after.reason) == ("PENDING", "JobHeldUser")
    assert (after.excluded_nodes, after.required_nodes) == ("alpha07", "")


def test_a_silent_slurm_is_waited_through(bench: Bench) -> None:
    """While no answer comes nothing is lost; the choice is followed once Slurm answers again."""
    calls: list[str] = []

    def at_times(argv: list[str], **options: Any) -> subprocesses.Completed:
        calls.append(argv[0])
        if 6 < len(calls) < 10:
            raise Unreachable("no answer", where=argv[0])
        return subprocesses.run(argv, **options)

    exit_code = loop.run_acquire_loop(
        Client(bench.slurm.transport, run=at_times), bench.submit("--hold"), bench.fabric, AcquireOptions(timeout_s=3)
    )
    assert (exit_code.state, exit_code.tries, exit_code.is_released) == ("PENDING", 1, True)


def test_what_cannot_be_chosen_for(bench: Bench) -> None:
    """A job that names its nodes is refused and cancelled; a flat fabric is said to be none."""
    with pytest.raises(UsageError, match=r"job \d+ has its own nodes"):
        bench.get(bench.submit("--nodelist=alpha[01-02]"))
    assert bench.job().state == "CANCELLED"
    with pytest.raises(ClusterError, match="flat"):
        loop.run_acquire_loop(bench.slurm, bench.made[0], Fabric(), AcquireOptions())


def test_the_command(bench: Bench, pit: Pit, tmp_path: Path) -> None:
    """A script of the user's: one record; or its nodes, folded; and what it says of where it runs is refused."""
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/sh\n#SBATCH --output=/dev/null --exclusive -t 2\nsleep 20\n")
    done = pit("topology", "run", str(script), "--site", "alpha", "--nodes", "2")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    bench.made.append(record["job_id"])
    assert (record["schema"], record["state"], record["is_within"], record["leaves"]) == (
        "pit.acquired/1",
        "RUNNING",
        True,
        1,
    )
    done = pit("topology", "run", "-", "--site", "alpha", "--nodes", "1", "-H", stdin=script.read_text())
    bench.made.append(done.stderr.split("job ")[1].split(":")[0])
    assert hostlist.expand(done.stdout.strip()) == hostlist.expand(bench.slurm.job(bench.made[-1])[0].node_list)
    script.write_text("#!/bin/sh\n#SBATCH -w alpha01\nsleep 20\n")
    done = pit("topology", "run", str(script), "--site", "alpha")
    assert done.returncode == 2
    assert "--nodelist" in done.stderr


REQUEST = 'name = "t-nodes"\ncommand = "true"\nnodes = 2\ntime = "2m"\ntopology = "{by}"\n'


def test_a_run_on_chosen_nodes(bench: Bench, pit: Pit, tmp_path: Path) -> None:
    """`topology = "exclude"` in a request: the run is on the chosen leaf, and its events tell how it got there."""
    request = tmp_path / "request.toml"
    request.write_text(REQUEST.format(by="exclude"))
    done = pit("launch", "run", str(request), "--site", "alpha", PIT_RUNS=str(tmp_path / "runs"))
    assert done.returncode == 0, done.stderr
    run = json.loads(done.stdout)
    bench.made.append(run["job_id"])
    events = [json.loads(line) for line in (Path(run["run_dir"]) / "events.jsonl").read_text().splitlines()]
    (reported,) = (event["detail"] for event in events if event["event"] == "topology")
    assert (reported["is_within"], reported["is_released"], reported["leaves"]) == (True, False, 1)
    request.write_text(REQUEST.format(by="exclude") + 'nodelist = "alpha01"\n')
    done = pit("launch", "plan", str(request), "--site", "alpha")
    assert (done.returncode, "both choose nodes" in done.stderr) == (3, True)
    request.write_text(REQUEST.format(by="tree"))
    assert pit("launch", "plan", str(request), "--site", "alpha").returncode == 3
