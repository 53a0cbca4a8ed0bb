"""Faults done for real to runs of the reference loops: what was found to be the cause, and what became of the run.

perf/run recover_faults [--rounds 4] [--case NAME]... [--loop jax]... [--quick]     needs root and Slurm

A cluster of its own, four nodes; each run is two ranks on two of them, 40 steps, a checkpoint every 5. Moments and
victims are drawn from a seed. A line for every fault goes to --results as soon as its run has ended; what stands there
is not done again, so that a campaign may be cut off and begun again (--fresh: begin anew). The ratios are shares, or
the most that may be over what was.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

from perf.harness.harness import Case, from_ratios, report
from perf.recover.fault_catalog import FaultKind, faults, inject
from perf.recover.fault_cluster import FaultCluster, attempts
from perf.recover.trial import InjectedFault, Shape, Trial, reset_cluster

RESULTS = Path("/var/tmp/pit-recover-faults.jsonl")
SWAPS = {("program", "node"), ("program", "gpu")}


def reference(cluster: FaultCluster, loop: str, data: Path, shape: Shape) -> tuple[float, list[str]]:
    """The loss of a run that nothing happens to, and the nodes that it got."""
    reset_cluster(cluster)
    trial = Trial(cluster, "reference", loop, data, shape, random.Random(0))
    trial.end(300)
    loss, verdict = trial.loss() if trial.has_started() else None, trial.verdict()
    if loss is None or verdict.get("state") != "succeeded":
        log = (cluster.work / f"{trial.name}.out").read_text()[-2000:]
        sys.exit(f"the run without faults did not finish: {verdict} {trial.run_dir}\n{log}")
    return loss, trial.nodes()


def run_campaign(
    cluster: FaultCluster,
    case: str,
    fault: FaultKind,
    loop: str,
    data: Path,
    shape: Shape,
    seed: int,
    loss: float,
    nodes: list[str],
) -> list[dict[str, Any]]:
    """One run under one kind of fault; a record for each that was done."""
    reset_cluster(cluster)
    dice = random.Random(f"{seed} {case} {loop}")
    steps = aims(shape, fault.times, dice)
    time_, notice_s, delay_s = fault.limit or ("10m", 60, shape.delay_s)
    shaped = shape._replace(delay_s=delay_s)
    began = time.time()
    with contextlib.ExitStack() as exit_stack:
        if fault.around:
            exit_stack.enter_context(fault.around(cluster, dice.choice(nodes)))
        trial = Trial(cluster, case, loop, data, shaped, dice, args=fault.args(steps[0]), time=time_, notice_s=notice_s)
        if fault.do:
            inject(trial, fault, steps)
        trial.end(fault.seconds)
    if not trial.hits:  # or it ended before it could be hit, which counts as well
        trial.hits = self_inflicted(trial, case, began)
    reported = [one(trial, case, fault, hit, loss) for hit in trial.hits]
    for line in reported:
        line |= {"loop": loop, "seed": seed, "took_s": round(time.time() - began, 1), "run": trial.run_dir.name}
    if not all(line["cause_ok"] and line["verdict_ok"] and line["loss_ok"] for line in reported) or not reported:
        keep(trial, case, seed)
    return reported


def aims(shape: Shape, times: int, dice: random.Random) -> list[int]:
    """Steps at which to do it: spread over the run, neither before the first checkpoint nor after the last but one."""
    first, last = shape.save_every, shape.steps - shape.save_every
    span = (last - first) // times
    return [first + i * span + dice.randrange(max(1, span - 1)) for i in range(times)]


def self_inflicted(trial: Trial, case: str, began: float) -> list[InjectedFault]:
    """Faults that nobody did at a moment: they are the ends of the attempts that they ended."""
    created = attempts(trial.run_dir) if trial.has_started() else []
    end = created[:-1] if case == "time-limit" else created[:1]
    return [InjectedFault(trial.ended(path), path.name) for path in end] or [InjectedFault(began, "0")]


def one(trial: Trial, case: str, fault: FaultKind, hit: InjectedFault, loss: float) -> dict[str, Any]:
    """What came of one fault."""
    cause, verdict = trial.cause(hit.attempt), trial.verdict()
    actual = cause.get("kind", "")
    to_next_s, lost = trial.recovery_of(hit)
    most = trial.shape.save_every if fault.lost is None else fault.lost
    end = trial.loss()
    is_over = verdict.get("state") == ("succeeded" if fault.verdict == "succeeded" else "stopped")
    return {
        "case": case,
        "injected": "/".join(fault.causes) or "none",
        "found": actual,
        "cause_ok": actual in (fault.causes or ("succeeded",)),
        "sure": cause.get("confidence", ""),
        "reason": str(cause.get("reason", ""))[:200],
        "swapped": (actual, fault.causes[0]) in SWAPS or (fault.causes[0], actual) in SWAPS if fault.causes else False,
        "verdict": f"{verdict.get('state', 'none')} {verdict.get('kind', '')}".strip(),
        "verdict_ok": is_over and verdict.get("kind") == fault.verdict,
        "loss_ok": fault.verdict != "succeeded" or end == loss,
        "loss": end,
        "lost": lost,
        "lost_most": most,
        "lost_ok": fault.verdict != "succeeded" or (lost is not None and lost <= most),
        "to_next_s": None if to_next_s is None else round(to_next_s, 2),
        "attempts": len(attempts(trial.run_dir)),
    }


def keep(trial: Trial, case: str, seed: int) -> None:
    """Copy a run that went wrong to where the cluster's end does not reach."""
    import shutil

    to = Path(f"/var/tmp/pit-recover-wrong/{case}-{trial.loop}-{seed}")
    shutil.rmtree(to, ignore_errors=True)
    to.parent.mkdir(exist_ok=True)
    if trial.has_started():
        shutil.copytree(trial.run_dir, to, symlinks=True, ignore_dangling_symlinks=True)
    else:
        to.mkdir()
    for log in (trial.cluster.work / f"{trial.name}.out", trial.cluster.work / "tick.out"):
        if log.exists():
            shutil.copy(log, to)
    print(f"{case} {trial.loop} {seed}: kept in {to}", file=sys.stderr, flush=True)


def cases(done: list[dict[str, Any]]) -> list[Case]:
    """What all of it adds up to."""
    count = len(done)

    def share(what: str, key: str, target: float, among: list[dict[str, Any]] = done) -> Case:
        good = sum(bool(line[key]) for line in among)
        ratio = good / max(1, len(among))
        return from_ratios(f"{what}: {good} of {len(among)}", "all", "", [ratio], target=target)

    lossy = [line for line in done if line["verdict"].startswith("succeeded")]
    going = [line for line in done if line["to_next_s"] is not None]
    created = [
        share(f"{count} faults, the right cause", "cause_ok", 0.95),
        from_ratios(
            f"program error and hardware taken for each other: {sum(line['swapped'] for line in done)}",
            "none",
            "",
            [float(not any(line["swapped"] for line in done))],
            target=1,
        ),
        share("the run finished, or stopped with the true reason", "verdict_ok", 1),
        share("final loss equal to the uninterrupted run's", "loss_ok", 1, lossy),
        share("steps lost at most one interval, none on preemption and time limit", "lost_ok", 1),
    ]
    for name in dict.fromkeys(line["case"] for line in done):
        of = [line for line in done if line["case"] == name]
        times = sorted(line["to_next_s"] for line in going if line["case"] == name)
        next_ = f", next step after {times[len(times) // 2]:g} s (median)" if times else ""
        lost = [line["lost"] for line in of if line["lost"] is not None]
        lost_ = f", at most {max(lost)} steps lost" if lost else ""
        created.append(share(f"{name}: right cause{next_}{lost_}", "cause_ok", 0.9, of))
    return created


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--case", action="append", default=[], dest="cases")
    parser.add_argument("--loop", action="append", default=[], dest="loops", choices=["jax", "torch"])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--name", default="faults", help="the cluster's; two campaigns at once need two, and ports")
    parser.add_argument("--base-port", type=int, default=29000)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--fresh", action="store_true", help="forget what --results holds")
    parser.add_argument("--quick", action="store_true", help="one round, the torch loop alone, shorter outages")
    args = parser.parse_args()
    rounds = 1 if args.quick else args.rounds
    loops = args.loops or (["torch"] if args.quick else ["jax", "torch"])
    known = faults(quick=args.quick)
    if unknown := set(args.cases) - set(known):
        parser.error(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    if args.fresh:
        args.results.unlink(missing_ok=True)
    done = [json.loads(line) for line in args.results.read_text().splitlines()] if args.results.exists() else []
    expected = [(name, loop, args.seed + i) for i in range(rounds) for name in (args.cases or known) for loop in loops]
    target = {(line["case"], line["loop"], line["seed"]) for line in done}
    shape = Shape()
    if todo := [item for item in expected if item not in target]:
        with FaultCluster(name=args.name, base_port=args.base_port) as cluster:
            data = cluster.dataset()
            references = {loop: reference(cluster, loop, data, shape) for loop in loops}
            for name, loop, seed in todo:
                for line in run_campaign(cluster, name, known[name], loop, data, shape, seed, *references[loop]):
                    done.append(line)
                    with args.results.open("a") as file:
                        file.write(json.dumps(line) + "\n")
                    print(json.dumps(line), file=sys.stderr, flush=True)
    return report(cases([line for line in done if (line["case"], line["loop"], line["seed"]) in expected]))


if __name__ == "__main__":
    sys.exit(main())
