"""How soon a run makes steps again after a fault, and how many it makes with a fault every minute, beside its peers.

perf/run recover_requeue [--rounds 3] [--minutes 5] [--only CASE]... [--quick]     needs root and Slurm

A cluster of its own; the same torch loop on two of four nodes, the same checkpoints, the same faults in turn.
next step: kill -9 of one rank, three times a run; the peer is a script that calls `scontrol requeue` when srun fails,
with `AuthInfo=cred_expire=10` where Slurm's default is 120 s, all of which Slurm lets a requeued job wait.
goodput: steps safe at the window's end, with a fault every minute; the peer is submitit with a checkpointing callable.
preempt: a job of a higher QOS wants all nodes; submitit's job is requeued by Slurm, so this is told for both delays.
kill: kill -9 of one rank, after which submitit's job fails for good.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from perf.harness.harness import Case, from_ratios, report
from perf.recover.fault_catalog import kill_rank, preempt
from perf.recover.fault_cluster import FaultCluster, attempts, read_json_lines
from perf.recover.recover_peers import PeerRun
from perf.recover.trial import Shape, Trial, reset_cluster

LONG = Shape(steps=100_000, save_every=50, delay_s=0.1)
EVERY_S = 60.0
SLURMS_S, KIND_S = 120, 10  # what a requeued job waits: by Slurm's default, and where a site has been kind to requeues
# Fault, requeue delay, target. Where the delay is small a preempted job of either side is back as soon as it has room.
GOODPUT = {
    "preempt-kind": ("preempt", KIND_S, 1.0),
    "kill": ("kill", KIND_S, 1.5),
    "preempt": ("preempt", SLURMS_S, 1.5),
}
Run = Trial | PeerRun


def inject_fault(run: Run, fault: Callable[..., None], aim: int) -> None:
    """Do a fault once the newest start has made so many steps of its own."""

    def is_there() -> bool:
        is_new = not run.hits or run.attempt().name != run.hits[-1].attempt
        return is_new and _own_steps(run.attempt()) >= aim

    if run.wait_until(is_there, 180):
        for _ in range(50):
            with contextlib.suppress(ProcessLookupError):
                fault(run)
                return
            time.sleep(0.1)


def _own_steps(attempt: Path) -> int:
    return len(read_json_lines(attempt / "steps" / "0.jsonl"))


def killed(run: Run, dice: random.Random) -> None:
    """kill -9 of one rank of either side."""
    run.dice = dice  # type: ignore[union-attr]
    kill_rank(run)  # type: ignore[arg-type]


def next_steps(cluster: FaultCluster, side: str, data: Path, seed: int, times: int) -> list[float]:
    """Seconds from each fault of a run to its next step."""
    reset_cluster(cluster)
    dice = random.Random(seed)
    run: Run = (
        Trial(cluster, "next", "torch", data, LONG, dice, time="30m")
        if side == "ours"
        else PeerRun(cluster, "sbatch", "next-peer", data, LONG)
    )
    actual: list[float] = []
    for _ in range(times):
        inject_fault(run, lambda one: killed(one, dice), dice.randint(20, 80))
        position = run.hits[-1] if run.hits else None
        if position is None or not run.wait_until(lambda at=position: _next(run, at) is not None, 240):
            break
        actual.append(_next(run, position) or 0.0)
    run.end(1) if isinstance(run, Trial) else run.end()
    if len(actual) < times:
        sys.exit(f"{side}: {len(actual)} of {times} faults were recovered from: {run.run_dir}")
    return actual


def _next(run: Run, at: object) -> float | None:
    return run.recovery_of(at)[0] if isinstance(run, Trial) else run.seconds_to_next_step(at)  # type: ignore[arg-type]


def goodput(cluster: FaultCluster, side: str, data: Path, fault: str, window_s: float, seed: int) -> int:
    """Steps that a run has made at the end of a window that begins with its first step."""
    reset_cluster(cluster)
    dice = random.Random(seed)
    run: Run = (
        Trial(cluster, f"good-{fault}", "torch", data, LONG, dice, time="30m")
        if side == "ours"
        else PeerRun(cluster, "submitit", f"good-{fault}-peer", data, LONG)
    )
    if not run.wait_until(lambda: run.step() >= 0, 120):
        sys.exit(f"{side}: no first step: {run.run_dir}")
    began = time.monotonic()
    due = EVERY_S / 2
    while (now := time.monotonic() - began) < window_s:
        if now >= due:
            due += EVERY_S
            with contextlib.suppress(ProcessLookupError):  # it is down anyway: this fault is wasted
                killed(run, dice) if fault == "kill" else preempt(20)(run)  # type: ignore[arg-type]
        if isinstance(run, Trial):
            run.tick()
        time.sleep(0.2)
    safe = max(
        (int(path.name.removeprefix("step_")) for path in (run.run_dir / "checkpoints").glob("step_*")), default=0
    )
    starts = len(attempts(run.run_dir))
    run.end(1) if isinstance(run, Trial) else run.end()
    print(f"goodput {fault} {side}: {safe} steps, {starts} starts", file=sys.stderr, flush=True)
    return safe


def compare_next_step(args: argparse.Namespace, cluster: FaultCluster, data: Path, slurm: str) -> Case:
    """The next step after a fault, ours and the peer in turn."""
    took: dict[str, list[float]] = {"ours": [], "peer": []}
    for number in range(args.rounds):
        for side, times_s in took.items():
            times_s += next_steps(cluster, side, data, number, args.times)
            print(f"next step {side}: {[round(times_, 1) for times_ in times_s]}", file=sys.stderr, flush=True)
    pairs = [theirs / ours for ours, theirs in zip(took["ours"], took["peer"], strict=True)]
    return from_ratios("from kill -9 of a rank to the next step", "sbatch --requeue", slurm, pairs, target=2)


def window(
    args: argparse.Namespace, cluster: FaultCluster, data: Path, fault: str, delay_s: int, target: float
) -> Case:
    """Safe steps of a window, ours and the peer in turn."""
    ratios = []
    for number in range(args.rounds):
        ours, theirs = (goodput(cluster, side, data, fault, 60 * args.minutes, number) for side in ("ours", "peer"))
        ratios.append(ours / max(1, theirs))
    case = f"safe steps in {args.minutes:g} min, a fault ({fault}) every minute, cred_expire={delay_s}"
    return from_ratios(case, "submitit", version("submitit"), ratios, target=target)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--times", type=int, default=3, help="faults a run, for the next step")
    parser.add_argument("--base-port", type=int, default=29000)
    parser.add_argument("--only", action="append", default=[], choices=["next", *GOODPUT])
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.minutes, args.times = 1, 2.0, 2
    created: list[Case] = []
    expected = args.only or ["next", *GOODPUT]
    for delay_s in (KIND_S, SLURMS_S):
        raced_here = "next" in expected and delay_s == KIND_S
        windows = [GOODPUT[name] for name in GOODPUT if name in expected and GOODPUT[name][1] == delay_s]
        if not raced_here and not windows:
            continue
        with FaultCluster(name="requeue", base_port=args.base_port, requeue_delay_s=delay_s) as cluster:
            data = cluster.dataset()
            if raced_here:
                created.append(compare_next_step(args, cluster, data, cluster.run("sbatch", "-V").split()[-1]))
            created += [window(args, cluster, data, fault, delay_s, target) for fault, _, target in windows]
    return report(created)


if __name__ == "__main__":
    sys.exit(main())
