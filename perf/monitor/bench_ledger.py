"""Whether the ledger finds the losses that were injected into real runs, and sums to what Slurm says was allocated.

perf/run monitor_ledger [--only KIND]... [--keep FOLDER] [--quick]      needs root, Slurm, and the network once

A cluster of its own, two runs at a time, each two ranks on two nodes that make steps of 50 ms (`faulty_steps.py`), with
slow input, a slow rank, saves of pitools' Checkpointer, a first step that compiles, a pause, kill -9 of ranks, and
preemption by a job of a higher QOS, at which the loop saves, or does not. The loop records what each step lost by its
own clock; a ledger is made by `pit monitor goodput`. Slurm's times are whole seconds: it knows a job of 10 s to within
a second. So the states are compared with sacct's Elapsed x nodes, to which they sum, and those from the first step to
the last with the loop's clock, which has milliseconds. The ratio is the limit over the greatest error of a run.
clean requeue: a run is preempted, waits, and goes on with the next step; its goodput by the calendar, and ml-goodput's,
which gets all events that its README asks for, from both jobs. It sees an interruption only by a step that is made
again: without one, the time from the last step to the first of the next job counts as that step's.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from perf.harness.harness import Case, report
from perf.harness.workspace import PEERS, print_progress
from perf.monitor import faulty_steps
from perf.recover.fault_cluster import PIT, FaultCluster, attempts, read_json, read_json_lines
from pitools.core.timestamps import rfc3339_to_unix

PEER = "ml-goodput-measurement==0.2.3"
SUM_LIMIT, LOSS_LIMIT, REQUEUE_LIMIT = 0.001, 0.02, 0.005
CLEAN_GOODPUT = 0.225  # when the loop ends: some time passes until its job has
INSIDE = ("compile", "productive", "lost", "input", "checkpoint", "straggler", "recovery", "unaccounted")
TICK_S, LIMIT_S, PREEMPTION_S = 20.0, 240.0, 3
REQUEST = """\
name = "{name}"
entry = "faulty_steps:main"
nodes = 2
time = "10m"
workdir = "{code}"
[watch]
min_stall = "60s"
[args]
{args}
"""


class Kind(NamedTuple):
    """Runs of one kind. args: of the loop; of a pair, a number between them. kills: of a rank, each in another attempt.
    preempted_s: once, for how long. requeued: once, by scontrol. runs: their number."""

    args: dict[str, Any]
    kills: int = 0
    preempted_s: int = 0
    requeued: bool = False
    runs: int = 6


SAVES = {"steps": 85, "save_every": 20}
UNSAVED = {"steps": 85, "save_every": 40, "save_s": 0.05, "saves_at_signal": False}
KINDS = {
    "healthy": Kind({"steps": 100}, runs=2),
    "input": Kind({"steps": 80, "input_s": (0.06, 0.1)}),
    "straggler": Kind({"steps": 80, "slow_s": (0.06, 0.1)}),
    "checkpoint": Kind({**SAVES, "save_s": (0.1, 0.5)}),
    "compile": Kind({"steps": 80, "compile_s": (1, 2)}, runs=3),
    "pause": Kind({"steps": 80, "pause_s": (1, 2)}, runs=2),
    "kill": Kind({**SAVES, "save_s": 0.05}, kills=1),
    "two kills": Kind({"steps": 105, "save_every": 25, "save_s": 0.05}, kills=2, runs=2),
    "preempted": Kind({"steps": 85, "save_every": 40, "save_s": 0.2}, preempted_s=PREEMPTION_S, runs=3),
    "preempted, not saved": Kind(UNSAVED, preempted_s=PREEMPTION_S, runs=3),
    "requeued": Kind(UNSAVED, requeued=True, runs=3),
    "all at once": Kind({**SAVES, "save_s": 0.3, "compile_s": 1.5, "input_s": 0.07}, kills=1, runs=5),
}


class Judged(NamedTuple):
    """A run's ledger, and what it should be. losses: name → (injected, measured), resource-seconds."""

    kind: str
    run_id: str
    elapsed_s: float
    sum_s: float
    by_clock: tuple[float, float] | None
    losses: dict[str, tuple[float, float]]


class FaultyRun:
    """One run, from its launch to its end."""

    def __init__(self, cluster: FaultCluster, name: str, args: dict[str, Any], dice: random.Random) -> None:
        self.cluster, self.dice = cluster, dice
        request = cluster.work / f"{name}.toml"
        lines = "\n".join(f"{key} = {json.dumps(value)}" for key, value in args.items())
        request.write_text(REQUEST.format(name=name, code=cluster.work / "code", args=lines))
        (record,) = cluster.pit("launch", "run", str(request), "--site", cluster.name)
        self.run_dir = Path(record["run_dir"])

    def truth(self, rank: int) -> list[list[dict[str, Any]]]:
        """What a rank recorded in each attempt that has steps."""
        paths = (attempt / "truth" / f"{rank}.jsonl" for attempt in attempts(self.run_dir))
        return [lines for path in paths if (lines := read_json_lines(path))]

    def wait_for_steps(self, attempt: int, count: int) -> bool:
        """Wait until the n-th attempt with steps has made so many; False if the run ended first."""

        def made() -> bool:
            done = self.truth(0)
            return len(done) > attempt and len(done[attempt]) >= count

        return self._wait(made)

    def wait(self) -> None:
        """Wait for the end of the run."""
        if not self._wait(lambda: False) and not (self.run_dir / "verdict.json").exists():
            self.cluster.run(PIT, "launch", "cancel", str(self.run_dir), "--site", self.cluster.name, check=False)
            raise SystemExit(f"{self.run_dir}: no verdict in {LIMIT_S:g} s")

    def _wait(self, ready: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            if ready():
                return True
            if (self.run_dir / "verdict.json").exists():
                return False
            time.sleep(0.1)
        return False

    def kill_rank(self) -> None:
        """kill -9 of one rank of the newest attempt."""
        attempt = attempts(self.run_dir)[-1]
        pid = int(read_json(attempt / "ranks" / f"{self.dice.randrange(2)}.json")["pid"])
        if str(self.run_dir).encode() in Path(f"/proc/{pid}/environ").read_bytes():
            os.kill(pid, signal.SIGKILL)

    def preempt(self, seconds: int, *, all_nodes: bool = False) -> None:
        """A job of a higher QOS that wants the run's nodes, or all, for so many seconds."""
        nodes = self.cluster.nodes if all_nodes else (attempts(self.run_dir)[-1] / "hostfile").read_text().split()
        where = [f"--nodes={len(nodes)}", f"--nodelist={','.join(nodes)}"]
        argv = ["--qos=high", *where, "--exclusive", "-t2", "-o/dev/null", "-A", "lab"]
        self.cluster.run("sbatch", *argv, "--wrap", f"sleep {seconds}")


def one_run(cluster: FaultCluster, number: int, name: str, seed: int) -> FaultyRun:
    """Make one run of a kind, with its faults."""
    kind, dice = KINDS[name], random.Random(seed)
    args = {key: dice.uniform(*value) if isinstance(value, tuple) else value for key, value in kind.args.items()}
    args["slow_rank"] = dice.randrange(2)
    run = FaultyRun(cluster, f"{name.replace(',', '').replace(' ', '-')}-{number}", args, dice)
    for attempt in range(kind.kills):
        if run.wait_for_steps(attempt, dice.randint(24, 38)):
            run.kill_rank()
    if kind.preempted_s and run.wait_for_steps(0, dice.randint(45, 60)):
        run.preempt(kind.preempted_s)
    if kind.requeued and run.wait_for_steps(0, dice.randint(45, 60)):
        cluster.run("scontrol", "requeue", job_ids(run.run_dir)[-1])
    run.wait()
    print_progress(f"{number}: {name}: {read_json(run.run_dir / 'verdict.json').get('kind')}")
    return run


def allocation_of(attempt: Path) -> tuple[str, int]:
    start = read_json(attempt / "start.json")
    return str(start.get("job_id")), int(start.get("restart_count", 0))


def judge(cluster: FaultCluster, run: FaultyRun, kind: str) -> Judged:
    """Compare a run's ledger with what its ranks recorded, and with sacct."""
    (ledger,) = cluster.pit("monitor", "goodput", str(run.run_dir))
    seconds: dict[str, float] = ledger["seconds"]
    injected = dict.fromkeys(("input", "straggler", "checkpoint", "compile", "unaccounted", "lost", "recovery"), 0.0)
    inside, has_last_save, survivors = 0.0, False, []
    for rank in (0, 1):
        made = [
            (allocation_of(each), read_json_lines(each / "truth" / f"{rank}.jsonl")) for each in attempts(run.run_dir)
        ]
        made = [(allocation, lines) for allocation, lines in made if lines]
        surviving: dict[int, dict[str, Any]] = {}
        spans: dict[tuple[str, int], tuple[float, float]] = {}
        previous: tuple[tuple[str, int], float] | None = None
        for allocation, lines in made:
            for line in lines:
                if line["step"] in surviving:
                    old = surviving.pop(line["step"])
                    injected["lost"] += old["end"] - old["begin"]
                surviving[line["step"]] = line
            if previous and previous[0] == allocation:
                injected["recovery"] += lines[0]["begin"] - previous[1]
            previous = (allocation, lines[-1]["end"])
            spans[allocation] = (spans.get(allocation, (lines[0]["begin"], 0.0))[0], lines[-1]["end"])
            has_last_save |= "save" in lines[-1]
            gaps = [b["begin"] - a["end"] for a, b in itertools.pairwise(lines)]
            injected["unaccounted"] += sum(gap for gap in gaps if gap > 0.5)
        for line in surviving.values():
            injected["input"] += line.get("input", 0.0)
            injected["checkpoint"] += line.get("save", 0.0)
            injected["compile"] += line.get("compile", 0.0)
        survivors.append(surviving)
        inside += sum(end - begin for begin, end in spans.values())
    if any(name in line for surviving in survivors for line in surviving.values() for name in ("slow", "input")):
        pairs = [(line, survivors[1][step]) for step, line in survivors[0].items()]
        injected["straggler"] = sum(_waited(*pair) + _waited(*pair[::-1]) for pair in pairs)
    if has_last_save:  # waited for after the last step, whose end the loop does not see
        injected["checkpoint"] = 0.0
    injected["lost and recovery"] = injected["lost"] + injected.pop("recovery") if injected["recovery"] else 0.0
    measured = {**seconds, "lost and recovery": seconds["lost"] + seconds["recovery"]}
    clock = None if has_last_save else (inside, sum(seconds[name] for name in INSIDE))
    rows = cluster.run("sacct", "-X", "-D", "-P", "-n", "-o", "ElapsedRaw,NNodes", "-j", ",".join(job_ids(run.run_dir)))
    elapsed = sum(int(a) * int(b) for a, b in (row.split("|") for row in rows.splitlines()))
    losses = {name: (value, measured[name]) for name, value in injected.items() if value > 0}
    return Judged(kind, run.run_dir.name, elapsed, sum(seconds.values()), clock, losses)


def job_ids(run_dir: Path) -> list[str]:
    return sorted({str(read_json(path)["job_id"]) for path in run_dir.glob("jobs/*/job.json")})


class CleanRequeue(NamedTuple):
    """Shares of the time from a run's begin to its end. true_*: by the loop's own clock, of the same span."""

    ours: float
    ours_true: float
    peer: float
    peer_true: float
    version: str


def clean_requeue(cluster: FaultCluster) -> CleanRequeue:
    """A run that is preempted for long, and goes on where it stopped."""
    args = {"steps": 100_000, "until_goodput": CLEAN_GOODPUT}
    run = FaultyRun(cluster, "clean-requeue", args, random.Random(0))
    if not run.wait_for_steps(0, 120):
        sys.exit("the run that is to be preempted has ended")
    run.preempt(30, all_nodes=True)
    run.wait()
    (ledger,) = cluster.pit("monitor", "goodput", str(run.run_dir))
    first, second = made = run.truth(0)
    if second[0]["step"] != first[-1]["step"] + 1:
        sys.exit(f"{run.run_dir}: not a clean requeue: step {first[-1]['step']}, then {second[0]['step']}")
    pairs = [pair for mine, other in zip(made, run.truth(1), strict=True) for pair in zip(mine, other, strict=False)]
    productive = sum(_productive(*pair) + _productive(*pair[::-1]) for pair in pairs) / 2
    starts = [read_json(each / "start.json")["started"] for each in attempts(run.run_dir) if (each / "truth").exists()]
    began = [rfc3339_to_unix(text) or 0.0 for text in starts]
    events = [event for t, lines in zip(began, made, strict=True) for event in events_of_job(t, lines)]
    script = Path(__file__).with_name("goodput_peer.py")
    done = subprocess.run(
        [peer_python(), str(script)], input=json.dumps(events), capture_output=True, text=True, check=True
    )
    peer = json.loads(done.stdout)
    rows = cluster.run(
        "sacct", "-X", "-D", "-P", "-n", "-o", "Start,End", "-j", ",".join(job_ids(run.run_dir))
    ).splitlines()
    times = [time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S")) for row in rows for text in row.split("|")]
    result = CleanRequeue(
        ledger["calendar_goodput"],
        productive / (max(times) - min(times)),
        peer["goodput"] / 100,
        productive / (second[-1]["end"] - began[0]),
        peer["version"],
    )
    print_progress(f"clean requeue: {result}; the peer's badput in percent: {peer['badput']}")
    return result


def events_of_job(began: float, lines: Sequence[dict[str, Any]]) -> list[tuple[str, float, int]]:
    """The events of a job for ml-goodput: its loop has no device to initialize, and prepares until its first step."""
    events = [("job_start", began, 0), ("tpu_init_start", began, 0), ("tpu_init_end", began, 0)]
    events += [("training_preparation_start", began, 0), ("training_preparation_end", lines[0]["begin"], 0)]
    for line in lines:
        loaded = line["begin"] + line.get("input", 0.0)
        events += [("data_loading_start", line["begin"], 0), ("data_loading_end", loaded, 0)]
        events.append(("step_start", loaded, line["step"]))
    return [*events, ("job_end", lines[-1]["end"], 0)]


def _productive(mine: dict[str, Any], other: dict[str, Any]) -> float:
    """The seconds of a rank's step without its save and without its wait for the other rank."""
    return float(mine["end"] - mine["begin"] - mine.get("save", 0.0) - _waited(mine, other))


def _waited(mine: dict[str, Any], other: dict[str, Any]) -> float:
    """The seconds for which a rank waited for the other one in a step: that one came later, slowed or not."""
    return float(max(0.0, other["arrived"] - mine["arrived"]))


def peer_python() -> str:
    """The environment that has ml-goodput, installed where it is missing."""
    python = PEERS / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", PEERS], check=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", PEER], check=True)
    return str(python)


def case(name: str, peer: str, version: str, ratios: Sequence[float]) -> Case:
    """A case that every run has to reach."""
    least = round(min(ratios), 3)
    return Case(
        case=name, peer=peer, peer_version=version, ratio=least, ratio_min=least, ratio_max=round(max(ratios), 3),
        n=len(ratios), target=1.0, ok=least >= 1.0,
    )  # fmt: skip


def error(truth: float, measured: float) -> float:
    """The relative error, not less than 1e-5."""
    return max(abs(measured - truth) / truth, 1e-5)


def make_cases(judged: Sequence[Judged], slurm: str) -> list[Case]:
    """The comparisons of all runs."""
    clocks = [run.by_clock for run in judged if run.by_clock]
    cases = [
        case(
            f"all states sum to Elapsed x nodes, of {len(judged)} runs: 0.1 % over the error", "sacct", slurm,
            [SUM_LIMIT / error(run.elapsed_s, run.sum_s) for run in judged],
        ),
        case(
            f"states from the first step to the last, of {len(clocks)} runs: 0.1 % over the error", "the loop's clock",
            "", [SUM_LIMIT / error(*clock) for clock in clocks],
        ),
    ]  # fmt: skip
    for name in sorted({name for run in judged for name in run.losses}):
        pairs = [run.losses[name] for run in judged if name in run.losses]
        text = f"injected {name}, {min(pairs)[0]:.2g} to {max(pairs)[0]:.2g} node-s a run: 2 % over the error"
        cases.append(case(text, "the injector", "", [LOSS_LIMIT / error(*pair) for pair in pairs]))
    return cases


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--base-port", type=int, default=21000)
    parser.add_argument("--only", action="append", choices=list(KINDS), default=[])
    parser.add_argument("--keep", type=Path, help="copy the folders of runs there at the end")
    parser.add_argument("--no-requeue", action="store_true", help="without the clean requeue")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    names = [name for name in args.only or KINDS for _ in range(1 if args.quick else KINDS[name].runs)]
    with FaultCluster(name="ledger", base_port=args.base_port) as cluster:
        shutil.copy(faulty_steps.__file__, cluster.work / "code")
        cluster.run("sacctmgr", "-i", "modify", "qos", "normal", "set", "GraceTime=20", check=False)
        is_done = threading.Event()
        ticker = threading.Thread(target=tick, args=(cluster, is_done))
        ticker.start()
        try:
            with ThreadPoolExecutor(2) as pool:
                runs = list(pool.map(lambda each: one_run(cluster, each[0], each[1], each[0]), enumerate(names)))
            time.sleep(3)  # until slurmdbd has the last end
            judged = [judge(cluster, run, name) for run, name in zip(runs, names, strict=True)]
            for one in judged:
                print_progress(json.dumps(one._asdict()))
            cases = make_cases(judged, cluster.run("sbatch", "-V").split()[-1])
            if not args.no_requeue:
                clean = clean_requeue(cluster)
                name = (
                    f"clean requeue: goodput is {clean.ours_true:.1%}, ours {clean.ours:.1%}, peer's of all its events "
                )
                name += f"{clean.peer:.1%} ({clean.peer_true:.1%} of their time)"
                ours = max(abs(clean.ours - clean.ours_true), 1e-4)
                cases.append(
                    case(f"{name}: 0.5 points over the error", "ml-goodput", clean.version, [REQUEUE_LIMIT / ours])
                )
                theirs = abs(clean.peer - clean.peer_true)
                cases.append(case(f"{name}: the peer's error over ours", "ml-goodput", clean.version, [theirs / ours]))
        finally:
            is_done.set()
            ticker.join()
            if args.keep:
                with contextlib.suppress(OSError):
                    shutil.copytree(cluster.runs, args.keep, dirs_exist_ok=True, symlinks=True)
    return report(cases)


def tick(cluster: FaultCluster, is_done: threading.Event) -> None:
    """`pit launch tick`, as cron calls it, only more often."""
    while not is_done.wait(TICK_S):
        cluster.run(PIT, "launch", "tick", "--site", cluster.name, check=False)


if __name__ == "__main__":
    sys.exit(main())
