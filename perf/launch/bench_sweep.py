"""A sweep of 24 runs over two clusters; in the middle a slurmctld is killed (-9) and a node of the other is lost.

perf/run launch_sweep [--rounds 3] [--quick]        needs root and Debian's Slurm packages

Starts two clusters of its own, north and south, of 8 nodes each. Ours: `pit launch run --set … --site north --site
south --wait`. The peer's: the same program, 24 times by `sbatch --requeue` with one srun each, with the same faults;
what sbatch says it did not take is given again. Both sides have the same time, and for both the nodes that the faults
leave drained are returned. A run has finished once its program has appended its last line, and ours once pitools says
so, too; the program continues at its last saved step. Calls are slurmctld's own counts of requests from commands, jobs
and steps, without those of slurmd's registrations and epilogs, in rounds without faults.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

from msgspec.structs import replace

from perf.harness.harness import from_ratios, report
from perf.harness.two_clusters import DOWN_S, NAMES, TwoClusters, act_when
from perf.recover.fault_cluster import processes_of_node

PIT = str(Path(sys.executable).with_name("pit"))
ROOT = Path("/var/tmp/pit-dc-sweep")
RUNS, MOST_CALLS = 24, 4.0
RETURNING_S, LONGEST_S = 60.0, 240.0
REPORT_S = 2.0  # until the last job has reported its end
REQUEST = """\
name = "s"
command = "exec python {work}/code/loop.py {{lr}}-{{seed}} $PIT_RUN_DIR/progress"
cpus_per_task = 4
time = "5m"
[params]
lr = 0.1
seed = 0
"""
# Steps of 0.2 s, each of them saved.
LOOP = """\
import os, sys, time
from pathlib import Path

number, saved = sys.argv[1], Path(sys.argv[2])
step = first = int(saved.read_text()) if saved.exists() else 0
while step < {steps}:
    time.sleep(0.2)
    step += 1
    part = saved.with_suffix(f".{{os.getpid()}}")
    part.write_text(str(step))
    part.rename(saved)
with open({ran!r}, "a+") as file:
    file.seek(0)
    # Without a step of its own, an earlier attempt did all of it, and was lost before its end was known.
    if step > first or number not in file.read().split():
        file.write(number + "\\n")
"""
_OF_DAEMONS = ("MESSAGE_", "REQUEST_PING", "RESPONSE_", "ACCOUNTING_")  # what daemons report by themselves


def calls(clusters: TwoClusters) -> Counter[str]:
    """Return the requests by type that no daemon makes by itself."""
    return Counter({kind: n for kind, n in clusters.requests().items() if not kind.startswith(_OF_DAEMONS)})


def break_both(clusters: TwoClusters) -> None:
    """Kill south's slurmctld and all of a busy node of north; start again what was killed, and return the nodes."""
    nodes = clusters.output("north", "squeue", "-h", "-t", "R", "-o", "%N").split()
    node = nodes[0] if nodes else "north01"
    clusters.kill_controller("south")
    slurmd = json.loads((ROOT / "processes" / f"slurmd-{node}.json").read_text())
    os.kill(slurmd["pid"], signal.SIGKILL)
    for _ in range(3):
        for pid in processes_of_node(ROOT / "north" / "slurm.conf", node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
    time.sleep(DOWN_S)
    clusters.start()
    return_nodes(clusters)


def return_nodes(clusters: TwoClusters) -> None:
    """Return nodes for a minute, as an operator would: a controller's death leaves some drained."""
    began = time.time()
    while time.time() - began < RETURNING_S:
        for name in NAMES:
            env = clusters.env(name)
            sinfo = ["sinfo", "-h", "-N", "-t", "drain,down", "-o", "%N"]
            drained = subprocess.run(sinfo, env=env, capture_output=True, text=True, check=False).stdout.split()
            for node in set(drained):
                update = ["scontrol", "update", f"nodename={node}", "state=resume"]
                subprocess.run(update, env=env, capture_output=True, check=False)
        time.sleep(2)


class Round:
    """One round of one side. faults: whether something is broken once a third of the programs have ended."""

    def __init__(self, folder: Path, clusters: TwoClusters, steps: int, *, faults: bool) -> None:
        self.folder, self.faults, self.ran = folder, faults, folder / "ran"
        (folder / "sites").mkdir(parents=True)
        (folder / "code").mkdir()
        clusters.write_sites(folder / "sites", runs=folder / "runs", with_cluster_name=True)
        (folder / "code" / "request.toml").write_text(REQUEST.format(work=folder))
        (folder / "code" / "loop.py").write_text(LOOP.format(steps=steps, ran=str(self.ran)))

    def ended(self) -> Counter[str]:
        """Return how often each program has ended."""
        return Counter(self.ran.read_text().split()) if self.ran.exists() else Counter()

    def start_faults(self, clusters: TwoClusters) -> threading.Thread:
        """Break things in the middle."""
        return act_when(
            lambda: not self.faults or len(self.ended()) >= RUNS // 3,
            lambda: break_both(clusters) if self.faults else None,
            limit_s=LONGEST_S,
        )

    def result(self, seconds: float, calls: Counter[str]) -> dict[str, object]:
        """Return the figures of the round. seconds: until the last run had ended."""
        ended = self.ended()
        return {
            "seconds": round(seconds, 1),
            "finished": len(ended),
            "twice": sum(count > 1 for count in ended.values()),
            "calls_per_run": round(sum(calls.values()) / RUNS, 2),
            "calls": dict(calls.most_common()),
        }


def ours(item: Round, clusters: TwoClusters) -> dict[str, object]:
    env = {
        **os.environ,
        "PIT_SITE_PATH": str(item.folder / "sites"),
        "XDG_CACHE_HOME": str(item.folder / "cache"),
        "XDG_STATE_HOME": str(item.folder / "state"),
    }
    before, began = calls(clusters), time.time()
    thread = item.start_faults(clusters)
    words = ["launch", "run", "code/request.toml", "--site", "north", "--site", "south", "--set", "lr=0.1,0.2,0.3"]
    argv = ["timeout", str(LONGEST_S), PIT, *words, "--set", "seed=0..7", "--wait", "--format", "jsonl"]
    done = subprocess.run(argv, cwd=item.folder, env=env, capture_output=True, text=True, check=False)
    seconds = time.time() - began
    thread.join()
    time.sleep(REPORT_S)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    completed = sum(row["state"] == "COMPLETED" for row in rows)
    if done.returncode or completed < RUNS:
        print(done.stderr[-3000:], file=sys.stderr)
        for name in NAMES:
            subprocess.run("squeue; sinfo -R", shell=True, env=clusters.env(name), stdout=sys.stderr, check=False)
    return {**item.result(seconds, calls(clusters) - before), "completed": completed}


def peers(item: Round, clusters: TwoClusters) -> dict[str, object]:
    before, began = calls(clusters), time.time()
    thread = item.start_faults(clusters)
    for number in range(RUNS):
        lr, seed = f"{0.1 * (number // 8 + 1):.1f}", number % 8
        program = f"srun python {item.folder}/code/loop.py {lr}-{seed} {item.folder}/{number}"
        argv = ["sbatch", "--requeue", "-A", "lab", "-p", "train", "-c4", "-t5", "-o", f"{item.folder}/%j.out"]
        env = {**clusters.env(NAMES[number % 2]), "SBATCH_EXPORT": "ALL"}
        while subprocess.run([*argv, f"--wrap={program}"], env=env, capture_output=True, check=False).returncode:
            time.sleep(1)
    while time.time() - began < LONGEST_S and len(item.ended()) < RUNS:
        time.sleep(1)
    seconds = time.time() - began
    thread.join()
    time.sleep(REPORT_S)
    return item.result(seconds, calls(clusters) - before)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--base-port", type=int, default=24000)
    args = parser.parse_args()
    rounds, steps = (1, 20) if args.quick else (args.rounds, 60)
    work = Path(tempfile.mkdtemp(prefix="pit-sweep-"))
    clusters = TwoClusters(ROOT, args.base_port)
    finished: list[float] = []
    peers_finished: list[int] = []
    extra: list[float] = []
    twice = 0
    try:
        for number in range(rounds):
            figures = {}
            for name, side, faults in (
                ("ours", ours, True),
                ("peer", peers, True),
                ("ours, no faults", ours, False),
                ("peer, no faults", peers, False),
            ):
                clusters.fresh()
                folder = work / f"{name.replace(', ', '-').replace(' ', '-')}-{number}"
                figures[name] = side(Round(folder, clusters, steps, faults=faults), clusters)
                print(json.dumps({"who": name, "round": number, **figures[name]}), file=sys.stderr, flush=True)
            finished.append(min(int(str(figures["ours"][count])) for count in ("completed", "finished")) / RUNS)
            peers_finished.append(int(str(figures["peer"]["finished"])))
            twice += int(str(figures["ours"]["twice"]))
            own, plain = (float(str(figures[f"{who}, no faults"]["calls_per_run"])) for who in ("ours", "peer"))
            extra.append(max(0.01, own - plain))
        version = clusters.version()
    finally:
        clusters.down()
    shutil.rmtree(work)
    share = f"share of {RUNS} runs that finished, {twice} twice; of the peer's {min(peers_finished)} or more did"
    case = from_ratios(share, "sbatch --requeue", version, finished, target=1.0)
    cases = [
        replace(case, ok=case.ok and not twice),
        from_ratios(
            f"calls to slurmctld a run beyond a plain sbatch with one srun, of at most {MOST_CALLS:g}",
            "sbatch",
            version,
            [MOST_CALLS / calls for calls in extra],
            target=1.0,
        ),
    ]
    return report(cases)


if __name__ == "__main__":
    sys.exit(main())
