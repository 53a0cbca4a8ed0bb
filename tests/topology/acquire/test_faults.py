"""What goes wrong between a job and its nodes: no answer, a refusal, a signal, a process that is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pitools.core import hostlist, subprocesses
from pitools.core.errors import ClusterError, Unreachable
from pitools.slurm.client import Client
from pitools.topology.acquire import loop
from pitools.topology.acquire.options import AcquireOptions

pytestmark = pytest.mark.slurm

Bench = Any  # of conftest.py
SCRIPT = "#!/bin/sh\n#SBATCH --output=/dev/null -t 2 --exclusive\nsleep 20\n"


def bent(
    bench: Bench, bend: Callable[[int, list[str], Callable[[], subprocesses.Completed]], subprocesses.Completed]
) -> Client:
    """A client whose call i goes through `bend(i, argv, call)`."""
    count = iter(range(10_000))
    return Client(
        bench.slurm.transport, run=lambda argv, **o: bend(next(count), argv, lambda: subprocesses.run(argv, **o))
    )


class Clock:
    """Time that passes by sleeping alone."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_no_answer_at_all(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm falls silent after the submit: no error that would have the job sent again, but its id, as UNKNOWN."""
    job, clock = bench.submit("--hold"), Clock()
    monkeypatch.setattr(loop, "time", clock)

    def silent(at: int, argv: list[str], call: Callable[[], subprocesses.Completed]) -> subprocesses.Completed:
        raise Unreachable("no answer", where=argv[0])

    exit_code = loop.run_acquire_loop(
        bent(bench, silent), job, bench.fabric, AcquireOptions(timeout_s=50.0, unreachable_s=100.0)
    )
    assert (exit_code.job_id, exit_code.state, exit_code.tries, exit_code.reason) == (
        job,
        "UNKNOWN",
        0,
        "Slurm does not answer",
    )
    assert 150 <= clock.now <= 151
    assert bench.job().state == "PENDING"
    assert bench.job().excluded_nodes == ""


def test_an_answer_comes_late(bench: Bench) -> None:
    """The first looks are not answered: the job is chosen for when they are, before it begins by itself."""

    def late(at: int, argv: list[str], call: Callable[[], subprocesses.Completed]) -> subprocesses.Completed:
        if at < 3:
            raise Unreachable("no answer", where=argv[0])
        return call()

    exit_code = loop.run_acquire_loop(bent(bench, late), bench.submit(), bench.fabric, AcquireOptions(timeout_s=30))
    assert (exit_code.state, exit_code.is_within, exit_code.tries, exit_code.is_released) == ("RUNNING", True, 1, False)


@pytest.mark.parametrize("is_done", [True, False])
def test_the_update_is_not_answered(bench: Bench, is_done: bool) -> None:
    """Whether Slurm carried it out or not, the job is told once more, and starts on a choice that is known."""
    lost = []

    def once(at: int, argv: list[str], call: Callable[[], subprocesses.Completed]) -> subprocesses.Completed:
        if argv[:2] == ["scontrol", "update"] and not lost:
            lost.append(call() if is_done else None)
            raise Unreachable("no answer", where=argv[0])
        return call()

    exit_code = loop.run_acquire_loop(
        bent(bench, once), bench.submit(), bench.fabric, AcquireOptions(timeout_s=30, tries=1)
    )
    assert len(lost) == 1
    assert (exit_code.state, exit_code.is_within, exit_code.is_released) == ("RUNNING", True, False)


def test_an_update_is_refused(bench: Bench) -> None:
    """The first: the job is cancelled and the refusal raised. A later one: the job stays, and the record tells why."""

    def refused(at: int, argv: list[str], call: Callable[[], subprocesses.Completed]) -> subprocesses.Completed:
        if argv[:2] == ["scontrol", "update"] and at > after:
            return subprocesses.Completed(tuple(argv), 1, "", "slurm_update error: Access/permission denied\n")
        return call()

    after = 0
    with pytest.raises(ClusterError, match="permission denied"):
        loop.run_acquire_loop(bent(bench, refused), bench.submit("--hold"), bench.fabric, AcquireOptions())
    assert bench.job().state == "CANCELLED"
    after, bench.made = 4, []
    exit_code = loop.run_acquire_loop(
        bent(bench, refused), bench.submit("--hold"), bench.fabric, AcquireOptions(timeout_s=0.5)
    )
    assert (exit_code.state, exit_code.tries, exit_code.is_released) == ("UNKNOWN", 1, False)
    assert "permission denied" in exit_code.reason
    assert bench.job().state == "PENDING"


def test_it_starts_before_it_is_told(bench: Bench) -> None:
    """Between choice and update the job starts by itself: Slurm's refusal is no error, and no constraint is claimed."""

    def overtaken(at: int, argv: list[str], call: Callable[[], subprocesses.Completed]) -> subprocesses.Completed:
        if argv[:2] == ["scontrol", "update"]:
            bench.scontrol("update", f"jobid={bench.made[0]}", "starttime=now")
            until = time.monotonic() + 20
            while bench.job().state == "PENDING" and time.monotonic() < until:
                time.sleep(0.2)
        return call()

    exit_code = loop.run_acquire_loop(
        bent(bench, overtaken), bench.submit(), bench.fabric, AcquireOptions(timeout_s=30)
    )
    assert (exit_code.state, exit_code.is_within, exit_code.tries, exit_code.is_released) == ("RUNNING", None, 0, True)
    assert hostlist.expand(exit_code.node_list)
    assert bench.job().state == "RUNNING"


def test_it_starts_in_the_last_moment(bench: Bench) -> None:
    """What has started by the time that it would be cancelled for not starting, is not."""
    polls = []

    def last(at: int, argv: list[str], call: Callable[[], subprocesses.Completed]) -> subprocesses.Completed:
        if "job" in argv and bench.said:
            polls.append(call())
            if len(polls) == 1:  # it is released right after it was seen to wait
                bench.release()
                until = time.monotonic() + 20
                while bench.job().state == "PENDING" and time.monotonic() < until:
                    time.sleep(0.2)
            return polls[-1]
        return call()

    wish = AcquireOptions(timeout_s=0.3, on_failure="cancel")
    exit_code = loop.run_acquire_loop(bent(bench, last), bench.submit("--hold"), bench.fabric, wish, bench.said.append)
    assert (exit_code.state, exit_code.is_within) == ("RUNNING", True)


def test_the_job_is_gone(bench: Bench) -> None:
    """Cancelled by somebody, and forgotten by Slurm, while it is followed: no error that would undo a run."""

    def forgotten(at: int, argv: list[str], call: Callable[[], subprocesses.Completed]) -> subprocesses.Completed:
        if "job" in argv and at > 4:
            return subprocesses.Completed(tuple(argv), 1, "", "slurm_load_jobs error: Invalid job id specified\n")
        return call()

    exit_code = loop.run_acquire_loop(
        bent(bench, forgotten), bench.submit("--hold"), bench.fabric, AcquireOptions(timeout_s=30)
    )
    assert (exit_code.state, exit_code.tries) == ("UNKNOWN", 1)
    assert exit_code.reason.endswith("not found")


def test_partitions_that_share_nothing(bench: Bench) -> None:
    """A job for either of two partitions is given nodes of one, and not of both."""
    names = [f"pit{time.time_ns()}{half}" for half in "ab"]
    try:
        for name, held in zip(names, ("alpha[01-02]", "alpha[05-06]"), strict=True):  # a leaf is odd or even
            bench.scontrol("create", f"partitionname={name}", f"nodes={held}", "state=up")
        actual = bench.get(bench.submit(f"--partition={','.join(names)}"), timeout_s=20)
    finally:
        bench.slurm.cancel(bench.made)
        until = time.monotonic() + 20
        while bench.job().state not in ("CANCELLED", "COMPLETED") and time.monotonic() < until:
            time.sleep(0.2)
        for name in names:
            bench.scontrol("delete", f"partitionname={name}")
    assert (actual.state, actual.is_within, actual.tries) == ("RUNNING", True, 1)
    assert hostlist.expand(actual.node_list) in (["alpha01", "alpha02"], ["alpha05", "alpha06"])


@pytest.fixture
def followed(interruptible: None, bench: Bench, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`pit topology run --by nodelist` of a job that somebody holds, after its first choice; and the job's id."""
    (tmp_path / "job.sh").write_text(SCRIPT.replace("-t 2", "-t 2 --hold"))
    pit = [str(Path(sys.executable).with_name("pit")), "topology", "run", str(tmp_path / "job.sh"), "--site", "alpha"]
    argv = [*pit, "--nodes", "2", "--by", "nodelist"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr
    job = process.stderr.readline().split()[2].strip(":")
    bench.made.append(job)
    assert "choice 1" in process.stderr.readline()
    yield process, job
    process.kill()
    process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_command_is_ended(bench: Bench, followed: tuple[subprocess.Popen[str], str], number: int) -> None:
    """Ctrl-C, a lost terminal, kill: the job stays in the queue, and nothing that nobody watches holds it there."""
    process, _ = followed
    assert bench.job().required_nodes
    process.send_signal(number)
    process.communicate(timeout=20)
    assert process.returncode == 130
    after = bench.job()
    assert (after.state, after.reason, after.required_nodes) == ("PENDING", "JobHeldUser", "")
