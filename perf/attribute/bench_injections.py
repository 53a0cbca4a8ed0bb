"""Faults put into the training loops, traced on a development cluster and judged: how many verdicts are right.

perf/run attribute_injections [--rounds N] [--quick]     needs root, Debian's Slurm packages, and iproute2

A round is a run of each fault in each framework: two ranks on two nodes, with some traced steps. Traces are kept
in DISK/pit-injections, and what is there is not run again: after an interruption, or with more rounds, the same command
goes on. The cluster has a network of its own, where the traffic of one address is throttled. To begin anew, remove that
folder.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from perf.attribute.faulty_loop import FAULTS, THROTTLED
from perf.harness.harness import Case, from_ratios, report
from perf.harness.workspace import ENV, REPO, arguments, execute, print_progress
from pitools.perf.attribute.buckets import split_steps
from pitools.perf.attribute.verdict import judge
from pitools.perf.read.files import find_files
from pitools.perf.read.read import read_table
from pitools.run.traces import read_traces

FRAMEWORKS = ("torch", "jax")
EXPECTED = {
    "healthy": ("compute", "inconclusive"),
    "slow-input": ("input",),
    "slow-rank": ("straggler 1",),
    "slow-link": ("communication",),
    "host-stall": ("host",),
    "recompiles": ("compile",),
    "big-checkpoint": ("checkpoint",),
}
PIT = Path(sys.executable).parent / "pit"
# Names of hosts are resolved only where an address beside the loopback's is up.
NETWORK = f"""
ip link set lo up
ip link add pit type bridge
ip addr add 198.51.100.1/30 dev pit
ip link set pit up
tc qdisc add dev lo root handle 1: htb
tc class add dev lo parent 1: classid 1:1 htb rate 20mbit burst 64k
tc class add dev lo parent 1: classid 1:2 htb rate 20mbit burst 64k
tc filter add dev lo parent 1: protocol ip u32 match ip src {THROTTLED}/32 flowid 1:1
tc filter add dev lo parent 1: protocol ip u32 match ip dst {THROTTLED}/32 flowid 1:2
"""
CLONE_NEWNET = 0x40000000
REQUEST = """
name = "{framework}"
entry = "perf.attribute.faulty_loop:main"
framework = "{framework}"
nodes = 2
time = "2h"
workdir = "{repo}"
snapshot = false
data = {{ demo = "{folder}/data/reach" }}
args = {{ framework = "{framework}", folder = "{folder}", runs = {runs} }}
env = {{ OMP_NUM_THREADS = "1" }}
retry = {{ unknown = 0, node = 0, network = 0, max = 1 }}
watch = {{ min_stall = "0" }}
"""


def is_traced(run: Path) -> bool:
    """Return whether the traces of both ranks are there."""
    statuses = [each.state for folder in run.glob("attempts/0/traces/*-*") for each in read_traces(folder).values()]
    return statuses == ["done", "done"]


def enter_network() -> None:
    """Leave the machine's network for one of this process, which ends with it, and throttle an address of its loopback.

    Exits without root.
    """
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
        sys.exit(f"no network of its own: {os.strerror(ctypes.get_errno())} (expected root)")
    for line in NETWORK.strip().splitlines():
        execute(*line.split())


def gather(folder: Path, left: dict[str, list[str]]) -> None:
    """Do runs, FAULT-NUMBER of each framework, in one job a framework, on a cluster of their own."""
    enter_network()
    devcluster, root = (sys.executable, REPO / "scripts/devcluster"), folder / "cluster"
    execute(*devcluster, "down", "--root", root)  # of a benchmark that was killed
    try:
        execute(*devcluster, "up", "--root", root, "--clusters", "alpha", "--nodes", "2")
        sites = {"PIT_SITE_PATH": f"{root}/sites", "SLURM_CONF": f"{root}/alpha/slurm.conf"}
        if not (folder / "data").exists():
            execute(sys.executable, REPO / "scripts/examples/make_recording.py", folder / "a.hdf5", "--episodes", "10")
            execute(PIT, "dataset", "ingest", folder / "a.hdf5", "--to", folder / "data", "--name", "reach")
        for framework, runs in left.items():
            for run in runs:  # a part of it
                shutil.rmtree(folder / f"{framework}-{run}", ignore_errors=True)
            request = folder / f"{framework}.toml"
            request.write_text(REQUEST.format(framework=framework, repo=REPO, folder=folder, runs=runs))
            began = time.monotonic()
            subprocess.run(
                [PIT, "launch", "run", request, "--site", "alpha", "--wait"],
                env={**ENV, "PYTHONPATH": str(REPO), **sites},
                stdout=subprocess.DEVNULL,
                check=False,
                cwd=REPO,
            )
            each_s, load = (time.monotonic() - began) / len(runs), os.getloadavg()[1]
            print_progress(f"{framework}: {len(runs)} runs, {each_s:.1f} s each, at a load of {load:.0f}")
    finally:
        execute(*devcluster, "down", "--root", root)


def verdict_of(run: Path) -> str:
    """Return the verdict of a run, with the rank of a straggler."""
    table = read_table(find_files([run]))
    buckets = split_steps(table)
    assert (buckets.parts_ns.sum(axis=1) == buckets.wall_ns).all(), run
    verdict = judge(buckets, table.notes)
    return verdict.verdict if verdict.rank is None else f"{verdict.verdict} {verdict.rank}"


def main() -> int:
    args = arguments(__doc__)
    folder = args.disk / "pit-injections"
    folder.mkdir(exist_ok=True)
    runs = [f"{fault}-{number}" for number in range(args.rounds) for fault in FAULTS]
    left = {name: [run for run in runs if not is_traced(folder / f"{name}-{run}")] for name in FRAMEWORKS}
    if any(left.values()):
        gather(folder, {name: missing for name, missing in left.items() if missing})
    cases: list[Case] = []
    for name in FRAMEWORKS:
        verdicts: dict[str, Counter[str]] = {fault: Counter() for fault in FAULTS}
        for run in runs:
            path = folder / f"{name}-{run}"
            verdicts[run.rpartition("-")[0]][verdict_of(path) if is_traced(path) else "no trace"] += 1
        right = {fault: sum(found[verdict] for verdict in EXPECTED[fault]) for fault, found in verdicts.items()}
        for fault, found in verdicts.items():
            print_progress(f"{name} {fault}: {', '.join(f'{count} {verdict}' for verdict, count in found.items())}")
        shares = {"runs": sum(right.values()) / len(runs), "healthy runs": right["healthy"] / args.rounds}
        for what, target in (("runs", 0.95), ("healthy runs", 1.0)):
            count = len(runs) if what == "runs" else args.rounds
            cases.append(
                from_ratios(
                    f"{name}: {count} {what}, share of right verdicts", "truth", "", [shares[what]], target=target
                )
            )
    return report(cases)


if __name__ == "__main__":
    sys.exit(main())
