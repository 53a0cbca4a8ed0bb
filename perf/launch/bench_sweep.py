"""A sweep of 24 runs over two clusters; in the middle a slurmctld is killed (-9) and a node of the other is lost.

perf/run launch_sweep [--rounds 3] [--quick]        needs root and Debian's Slurm packages

Starts two clusters of its own, north and south, of 8 nodes each. Ours: `pit launch run --set … --site north --site
south --wait`. The peer's: the same program, 24 times by `sbatch --requeue` with one srun each, with the same faults;
what sbatch says it did not take is given again. A run has finished once its program has appended its last line; the
program continues at its last saved step. Calls are slurmctld's own counts of requests from commands, jobs and steps,
without those of slurmd's registrations and epilogs, in rounds without faults: a restarted slurmctld counts from 0.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

from perf.harness.harness import from_ratios, report
from perf.harness.workspace import REPO
from perf.recover.fault_cluster import processes_of_node

PIT = str(Path(sys.executable).with_name("pit"))
ROOT = Path("/var/tmp/pit-dc-sweep")
UP = [str(REPO / "scripts/devcluster"), "up", "--root", str(ROOT), "--clusters", "north,south", "--nodes", "8"]
RUNS, MOST_CALLS = 24, 4.0
DOWN_S, RETURNING_S, LONGEST_S = 5.0, 60.0, 240.0
SITE = """\
name = "{name}"
accounts = ["lab"]
[slurm]
conf = "{root}/{name}/slurm.conf"
cluster = "{name}"
[dialect]
gpus = "none"
[defaults]
partition = "train"
account = "lab"
[paths]
runs = "{work}/runs"
[partitions.train]
nodes = 8
"""
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
if step > first:  # else an earlier attempt did all of it, and was lost before its end was known
    with open({ran!r}, "a") as file:
        file.write(number + "\\n")
"""
# What daemons report by themselves, and this benchmark's own question.
_OF_DAEMONS = ("MESSAGE_", "REQUEST_PING", "REQUEST_STATS_INFO", "RESPONSE_", "ACCOUNTING_")


class Clusters:
    """The two clusters, and the faults in them."""

    def __init__(self, base_port: int) -> None:
        self.up = [*UP, "--base-port", str(base_port)]

    def fresh(self) -> None:
        """End them, and start them with an empty state."""
        self.down()
        subprocess.run(self.up, check=True, capture_output=True, start_new_session=True)

    def down(self) -> None:
        """End them."""
        subprocess.run([self.up[0], "down", "--root", str(ROOT)], check=True, capture_output=True)

    def env(self, name: str) -> dict[str, str]:
        """For Slurm's commands to one of them."""
        return {**os.environ, "SLURM_CONF": str(ROOT / name / "slurm.conf")}

    def calls(self) -> Counter[str]:
        """Requests by type of both slurmctlds since their start."""
        total: Counter[str] = Counter()
        for name in ("north", "south"):
            text = subprocess.run(["sdiag"], env=self.env(name), capture_output=True, text=True, check=True).stdout
            section = text.partition("by message type")[2].partition("by user")[0]
            found = {kind: int(count) for kind, count in re.findall(r"(\w+)\s+\( *\d+\) count:(\d+)", section)}
            total.update({kind: count for kind, count in found.items() if not kind.startswith(_OF_DAEMONS)})
        return total

    def break_both(self) -> None:
        """Kill south's slurmctld and all of a busy node of north; start again what was killed."""
        nodes = subprocess.run(
            ["squeue", "-h", "-t", "R", "-o", "%N"], env=self.env("north"), capture_output=True, text=True, check=True
        ).stdout.split()
        node = nodes[0] if nodes else "north01"
        os.kill(int((ROOT / "south" / "slurmctld.pid").read_text()), signal.SIGKILL)
        os.kill(json.loads((ROOT / "processes" / f"slurmd-{node}.json").read_text())["pid"], signal.SIGKILL)
        for _ in range(3):
            for pid in processes_of_node(ROOT / "north" / "slurm.conf", node):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)
        time.sleep(DOWN_S)
        subprocess.run(self.up, check=True, capture_output=True, start_new_session=True)
        self._return_nodes()

    def _return_nodes(self) -> None:
        """Return nodes for a minute, as an operator would: a controller's death leaves some drained."""
        began = time.time()
        while time.time() - began < RETURNING_S:
            for name in ("north", "south"):
                sinfo = ["sinfo", "-h", "-N", "-t", "drain,down", "-o", "%N"]
                for node in set(
                    subprocess.run(
                        sinfo, env=self.env(name), capture_output=True, text=True, check=False
                    ).stdout.split()
                ):
                    update = ["scontrol", "update", f"nodename={node}", "state=resume"]
                    subprocess.run(update, env=self.env(name), capture_output=True, check=False)
            time.sleep(2)


class Round:
    """One round of one side. faults: whether something is broken once a third of the programs have ended."""

    def __init__(self, folder: Path, steps: int, *, faults: bool) -> None:
        self.folder, self.faults, self.ran = folder, faults, folder / "ran"
        (folder / "sites").mkdir(parents=True)
        (folder / "code").mkdir()
        for name in ("north", "south"):
            (folder / "sites" / f"{name}.toml").write_text(SITE.format(name=name, root=ROOT, work=folder))
        (folder / "code" / "request.toml").write_text(REQUEST.format(work=folder))
        (folder / "code" / "loop.py").write_text(LOOP.format(steps=steps, ran=str(self.ran)))

    def ended(self) -> Counter[str]:
        """Return how often each program has ended."""
        return Counter(self.ran.read_text().split()) if self.ran.exists() else Counter()

    def start_faults(self, clusters: Clusters) -> threading.Thread:
        """Break things in the middle."""

        def act() -> None:
            began = time.time()
            while self.faults and len(self.ended()) < RUNS // 3 and time.time() - began < LONGEST_S:
                time.sleep(0.2)
            if self.faults:
                clusters.break_both()

        thread = threading.Thread(target=act)
        thread.start()
        return thread

    def result(self, began: float, calls: Counter[str]) -> dict[str, object]:
        """Return the figures of the round."""
        ended = self.ended()
        return {
            "seconds": round(time.time() - began, 1),
            "finished": len(ended),
            "twice": sum(count > 1 for count in ended.values()),
            "calls_per_run": round(sum(calls.values()) / RUNS, 2),
            "calls": dict(calls.most_common()),
        }


def ours(item: Round, clusters: Clusters) -> dict[str, object]:
    env = {
        **os.environ,
        "PIT_SITE_PATH": str(item.folder / "sites"),
        "XDG_CACHE_HOME": str(item.folder / "cache"),
        "XDG_STATE_HOME": str(item.folder / "state"),
    }
    before, began = clusters.calls(), time.time()
    thread = item.start_faults(clusters)
    words = ["launch", "run", "code/request.toml", "--site", "north", "--site", "south", "--set", "lr=0.1,0.2,0.3"]
    argv = ["timeout", str(LONGEST_S), PIT, *words, "--set", "seed=0..7", "--wait", "--format", "jsonl"]
    done = subprocess.run(argv, cwd=item.folder, env=env, capture_output=True, text=True, check=False)
    thread.join()
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    completed = sum(row["state"] == "COMPLETED" for row in rows)
    if done.returncode or completed < RUNS:
        print(done.stderr[-3000:], file=sys.stderr)
        for name in ("north", "south"):
            subprocess.run("squeue; sinfo -R", shell=True, env=clusters.env(name), stdout=sys.stderr, check=False)
    return {**item.result(began, clusters.calls() - before), "completed": completed}


def peers(item: Round, clusters: Clusters) -> dict[str, object]:
    before, began = clusters.calls(), time.time()
    thread = item.start_faults(clusters)
    for number in range(RUNS):
        lr, seed = f"{0.1 * (number // 8 + 1):.1f}", number % 8
        program = f"srun python {item.folder}/code/loop.py {lr}-{seed} {item.folder}/{number}"
        argv = ["sbatch", "--requeue", "-A", "lab", "-p", "train", "-c4", "-t5", "-o", f"{item.folder}/%j.out"]
        env = {**clusters.env(("north", "south")[number % 2]), "SBATCH_EXPORT": "ALL"}
        while subprocess.run([*argv, f"--wrap={program}"], env=env, capture_output=True, check=False).returncode:
            time.sleep(1)
    while time.time() - began < LONGEST_S / 2 and len(item.ended()) < RUNS:
        time.sleep(1)
    thread.join()
    time.sleep(2)  # until the last job has reported its end
    return item.result(began, clusters.calls() - before)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--base-port", type=int, default=24000)
    args = parser.parse_args()
    rounds, steps = (1, 20) if args.quick else (args.rounds, 60)
    work = Path(tempfile.mkdtemp(prefix="pit-sweep-"))
    clusters = Clusters(args.base_port)
    finished: list[float] = []
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
                figures[name] = side(Round(folder, steps, faults=faults), clusters)
                print(json.dumps({"who": name, "round": number, **figures[name]}), file=sys.stderr, flush=True)
            finished.append(int(str(figures["ours"]["completed"])) / RUNS)
            twice += int(str(figures["ours"]["twice"]))
            own, plain = (float(str(figures[f"{who}, no faults"]["calls_per_run"])) for who in ("ours", "peer"))
            extra.append(max(0.01, own - plain))
        version = subprocess.run(
            ["sbatch", "-V"], env=clusters.env("north"), capture_output=True, text=True, check=True
        ).stdout.split()[-1]
    finally:
        clusters.down()
    shutil.rmtree(work)
    cases = [
        from_ratios(
            f"share of {RUNS} runs that finished, {twice} twice", "sbatch --requeue", version, finished, target=1.0
        ),
        from_ratios(
            f"calls to slurmctld a run beyond a plain sbatch with one srun, of at most {MOST_CALLS:g}",
            "sbatch",
            version,
            [MOST_CALLS / calls for calls in extra],
            target=1.0,
        ),
    ]
    return report(cases) or int(twice > 0)


if __name__ == "__main__":
    sys.exit(main())
