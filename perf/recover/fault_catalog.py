"""The faults, and what each should come to."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from perf.recover.fault_cluster import FaultCluster
from perf.recover.trial import Trial, kill

RESTART_AFTER_S = 25.0  # slurmctld misses a node after 15 s
PREEMPTION_S = 8
SLOW = ("10m", 60, 0.8)  # what Slurm does takes seconds: the run must not finish meanwhile


class FaultKind(NamedTuple):
    """One kind.

    causes: of which the attempt's must be one; () where the attempt is to go on unharmed. verdict: "succeeded", or the
    kind that the run is to be stopped for. times: in one run. lost: the most steps that may be made twice, None for one
    interval between checkpoints. do: does it; args: the loop's, by a step to aim at; around: what holds for the whole
    run; limit: (time, warning in seconds, seconds a step).
    """

    causes: tuple[str, ...]
    do: Callable[[Trial], None] | None = None
    verdict: str = "succeeded"
    times: int = 1
    lost: int | None = None
    args: Callable[[int], dict[str, Any]] = lambda _step: {}
    around: Callable[[FaultCluster, str], contextlib.AbstractContextManager[None]] | None = None
    limit: tuple[str, int, float] | None = None
    seconds: float = 300.0


def kill_rank(trial: Trial) -> None:
    """kill -9 of one rank."""
    kill(trial.rank_pid(trial.dice.randrange(trial.shape.nodes)))
    trial.record_fault()


def kill_node(trial: Trial) -> None:
    """kill -9 of one node's slurmd and of all its steps; it comes back later."""
    node = trial.dice.choice(trial.nodes())
    trial.record_fault()
    trial.cluster.kill_daemon(f"slurmd-{node}")
    trial.cluster.kill_steps(node)
    trial.later(RESTART_AFTER_S, trial.cluster.up)


def kill_controller(seconds: float) -> Callable[[Trial], None]:
    """kill -9 of slurmctld, which comes back after so many seconds."""

    def do(trial: Trial) -> None:
        trial.record_fault()
        trial.cluster.kill_daemon(f"{trial.cluster.name}-slurmctld")
        trial.later(seconds, trial.cluster.up)

    return do


def kill_rank_meanwhile(seconds: float) -> Callable[[Trial], None]:
    """The same, and kill -9 of one rank as soon as nobody answers: no step can be made until it is back."""

    def do(trial: Trial) -> None:
        pid = trial.rank_pid(trial.dice.randrange(trial.shape.nodes))
        kill_controller(seconds)(trial)
        kill(pid)

    return do


def kill_login(trial: Trial) -> None:
    """kill -9 of `pit launch run --wait`."""
    trial.record_fault()
    trial.login.kill()


def preempt(grace_s: int) -> Callable[[Trial], None]:
    """A job of a higher QOS that wants every node; the time that Slurm then leaves to the ranks, beside KillWait."""

    def do(trial: Trial) -> None:
        trial.cluster.run("sacctmgr", "-i", "modify", "qos", "normal", "set", f"GraceTime={grace_s}", check=False)
        time.sleep(1)  # until slurmctld has been told
        trial.record_fault()
        argv = ["--qos=high", f"-N{len(trial.cluster.nodes)}", "--exclusive", "-t1", "-o/dev/null", "-A", "lab"]
        trial.cluster.run("sbatch", *argv, "--wrap", f"sleep {PREEMPTION_S}")

    return do


def hang(trial: Trial) -> None:
    """SIGSTOP of one rank."""
    kill(trial.rank_pid(trial.dice.randrange(trial.shape.nodes)), signal.SIGSTOP)
    trial.record_fault()


def read_only(seconds: float) -> Callable[[Trial], None]:
    """The shared folder read-only for so many seconds."""

    def do(trial: Trial) -> None:
        exit_stack = contextlib.ExitStack()
        exit_stack.enter_context(trial.cluster.read_only_runs())
        trial.record_fault()
        trial.later(seconds, exit_stack.close)

    return do


def faults(*, quick: bool) -> dict[str, FaultKind]:
    """All of them, by name."""
    return {
        # From outside the program, and nobody says by whom.
        "kill-rank": FaultKind(("node", "unknown"), kill_rank, times=3),
        "kill-node": FaultKind(("node",), kill_node, seconds=400),
        "kill-slurmctld": FaultKind((), kill_controller(20 if quick else 60), lost=0, limit=SLOW),
        "kill-slurmctld-rank": FaultKind(("node", "unknown"), kill_rank_meanwhile(20 if quick else 60), seconds=400),
        "kill-login": FaultKind((), kill_login, lost=0, limit=SLOW),
        "preempt": FaultKind(("preempted",), preempt(0), lost=0, limit=SLOW),
        "preempt-grace": FaultKind(("preempted",), preempt(20), lost=0, limit=SLOW),
        "time-limit": FaultKind(("time-limit",), lost=0, limit=("2m", 30, 2.5), seconds=600),
        "hang": FaultKind(("hang",), hang, times=2),
        "memory": FaultKind(("memory",), verdict="memory", args=lambda step: {"hog_at": step}),
        "memory-kill": FaultKind(("memory",), verdict="memory", args=lambda step: {"die_at": step}),
        "program-error": FaultKind(("program",), verdict="program", args=lambda step: {"raise_at": step}),
        "nvme-full": FaultKind(("storage",), around=FaultCluster.full_nvme),
        # Who has nothing to save meanwhile does not notice.
        "read-only": FaultKind(("storage", "succeeded"), read_only(10 if quick else 30), seconds=400),
        "bad-node": FaultKind(("node",), around=FaultCluster.bad_node),
    }


def inject(trial: Trial, fault: FaultKind, dice_steps: list[int]) -> None:
    """Do the fault as often as it is to be done: each time once a step is reached that the attempt did not begin at."""
    for step in dice_steps:
        assert fault.do
        hit = len(trial.hits)
        begin = trial.attempt().name if hit else ""

        def is_there(step: int = step, begun: str = begin) -> bool:
            # After a fault that ends an attempt, the next: else it would be hit while it goes down.
            is_new = not fault.causes or trial.attempt().name != begun
            return is_new and trial.step() >= step

        if not trial.wait_until(is_there, fault.seconds):
            return
        for _ in range(50):
            with contextlib.suppress(ProcessLookupError, IndexError):
                fault.do(trial)
                break
            time.sleep(0.1)
