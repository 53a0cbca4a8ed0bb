"""What a cycle of the exporter costs with 10,000 nodes and 10,000 jobs: its time, Slurm's share, and its requests.

perf/run monitor_export [--quick] [--rounds 10]      needs root and Debian's Slurm packages

A real slurmctld with 10,000 nodes and no slurmd, in a cluster of this benchmark's own, with jobs up to its MaxJobCount
of 10,000: components of held heterogeneous jobs, and some that have nodes. A cycle asks for jobs or for nodes; each is
measured: our CPU time and the wall time of Slurm's commands, whose sum is what a cycle takes where nothing else runs.
Requests are counted by sdiag, also of those commands that the documentation of SckyzO/slurm_exporter 1.9 (July 2026)
names for jobs, nodes, GPUs, partitions and reservations. Then 10,000 running jobs of four nodes each, as text: what no
small machine can start.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from perf.harness.harness import Case, from_ratios, report
from perf.harness.workspace import REPO, arguments, print_progress, workspace
from pitools.core import subprocesses
from pitools.monitor.export import collect, jobs, state
from pitools.site.schema import Site, Slurm
from pitools.slurm import multi_query

LIMIT_S, LIMIT_REQUESTS = 1.0, 2
NODES, COMPONENTS = 10_000, 128
SLURM_EXPORTER = (
    "squeue -a -r -h -O JobID:|,Account:|,State:|,NumNodes:|,NumCPUs:|,tres-alloc:",
    "sinfo -h -o %C",
    "sinfo -h -O Gres,GresUsed,StateLong,Nodes",
    "sinfo -h -N -O NodeList,AllocMem,Memory,CPUsState,StateLong,Partition",
    "sinfo -h -o %D|%T|%b",
    "scontrol show nodes -o",
    "sinfo -h -o %R,%C",
    "squeue -a -r -h -o %P --states=PENDING",
    "squeue -h -o %P|%T|%C|%r|%u --states=all",
    "scontrol show reservation",
)


class Cycle(NamedTuple):
    """A cycle's cost. own_s: CPU time of our process. slurm_s: wall time of Slurm's commands."""

    name: str
    own_s: float
    slurm_s: float
    wall_s: float
    requests: int


def slurm(*argv: str) -> str:
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout


def requests() -> int:
    """Return how many requests slurmctld has answered, but for those of sdiag and of registrations."""
    text = slurm("sdiag").partition("by message type")[2].partition("by user")[0]
    counts = re.findall(r"(REQUEST_\w+)\s+\(.*?\) count:(\d+)", text)
    return sum(int(count) for name, count in counts if name.endswith("_INFO") and "STATS" not in name)


def fill(count: int) -> None:
    """Submit so many components of held jobs, and an array whose tasks get nodes."""
    component = ["-N2", "-n2", "--mem=100"]
    argv = ["sbatch", "-A", "lab", "-p", "dev", "--hold", "-o", "/dev/null", *component]
    for _ in range(COMPONENTS - 1):
        argv += [":", *component]
    for _ in range(count // COMPONENTS):
        subprocess.run([*argv, "/dev/stdin"], input="#!/bin/sh\ntrue\n", check=True, capture_output=True, text=True)
    slurm("sbatch", "-A", "lab", "-p", "train", "-N4", "--array=0-999", "-o", "/dev/null", "--wrap=true")
    rows, deadline = -1, time.monotonic() + 120
    while rows != (rows := len(slurm("squeue", "-h").splitlines())) and time.monotonic() < deadline:
        time.sleep(15)
    slurm("scontrol", "update", "partition=train", "state=down")  # or scheduling would be measured too
    print_progress(f"{rows} rows of squeue, {slurm('squeue', '-h', '-t', 'CF,R').count(chr(10))} of jobs with nodes")


def measure(site: Site) -> Cycle:
    """Run a cycle of the worker that asks slurmctld, with its state read and written as cron does."""
    slurm_s, path = 0.0, state.state_path(site.name, "slurm")

    def run(*args: Any, **options: Any) -> subprocesses.Completed:
        nonlocal slurm_s
        began = time.perf_counter()
        try:
            return subprocesses.run(*args, **options)
        finally:
            slurm_s += time.perf_counter() - began

    original = multi_query.run_queries
    collect.run_queries = lambda transport, commands: original(transport, commands, run=run)  # type: ignore[assignment]
    before, began, own_began = requests(), time.perf_counter(), time.process_time()
    after, lines = collect.run_cycle(site, collect.WORKERS[0], state.read_state(path))
    state.write_state(path, after)
    wall_s, own_s = time.perf_counter() - began, time.process_time() - own_began
    if lines:
        sys.exit(lines[0])
    name = max(after.queried, key=lambda one: after.queried[one].began_s)
    return Cycle(name, own_s, slurm_s, wall_s, requests() - before)


def cases(name: str, cycles: Sequence[Cycle]) -> list[Case]:
    own_s, slurm_s, wall_s = (statistics.median(column) for column in zip(*(one[1:4] for one in cycles), strict=True))
    most = max(one.requests for one in cycles)
    time_case = (
        f"a cycle of {name}: {LIMIT_S:g} s ÷ (our CPU + Slurm's commands; medians {own_s:.2f} s + {slurm_s:.2f} s; "
        f"wall {wall_s:.2f} s at a load of {os.getloadavg()[1]:.0f} on {os.cpu_count()} CPUs)"
    )
    times = [LIMIT_S / (one.own_s + one.slurm_s) for one in cycles]
    requests_case = f"a cycle of {name}: {LIMIT_REQUESTS} ÷ requests to slurmctld (most: {most})"
    counts = [LIMIT_REQUESTS / max(1, one.requests) for one in cycles]
    return [
        from_ratios(time_case, "limit", "", times, target=1.0),
        from_ratios(requests_case, "limit", "", counts, target=1.0),
    ]


def text_case(site: Site, rounds: int) -> Case:
    """Parse 10,000 running jobs of four nodes on a fabric of 313 leaves; nothing is kept from a round before."""
    sep = "|0123456789ab|"
    leaves = tuple(f"cloud[{first:05d}-{first + 31:05d}]" for first in range(1, NODES, 32))
    times = ("2026-11-27T00:00:00",) * 3 + ("2026-11-28T00:00:00",)
    tres = ("cpu=4,mem=1G,node=4,billing=4,gres/gpu=32", "gres:gpu:8", "None")
    hosts = [f"cloud[{number % 9990 + 1:05d}-{number % 9990 + 4:05d}]" for number in range(NODES)]
    rows_of_text = (
        (str(number), "RUNNING", "train", "normal", "4", host, *times, *tres, str(number))
        for number, host in enumerate(hosts)
    )
    text = "".join(f"{sep.join(row)}{sep}\n" for row in rows_of_text)
    walls = []
    for _ in range(rounds):
        jobs._leaf_ratio.cache_clear()
        jobs._leaf_index.cache_clear()
        began = time.process_time()
        rows = jobs.parse_rows(text, sep)
        jobs.job_gauges(rows, 1_795_740_000, site, leaves).bounded()
        jobs.job_counts(rows, 1_795_730_000, 1_795_740_000, site)
        walls.append(time.process_time() - began)
    median_s = statistics.median(walls)
    what = f"10,000 running jobs of 4 nodes as text: {LIMIT_S:g} s ÷ our CPU time (median {median_s:.2f} s)"
    return from_ratios(what, "limit", "", [LIMIT_S / one for one in walls], target=1.0)


def main() -> int:
    args = arguments(__doc__)
    rounds = 2 if args.quick else max(args.rounds, 10)
    with workspace(args.disk, needed=400 << 20) as home:
        root = home / "dc"
        os.environ["XDG_STATE_HOME"] = str(home / "state")
        (home / "state").mkdir(mode=0o700)
        devcluster = [str(REPO / "scripts/devcluster")]
        options = ["--root", str(root), "--clusters", "export", "--nodes", "1", "--base-port", "29500"]
        subprocess.run([*devcluster, "up", *options, "--cloud", str(NODES)], check=True, stdout=sys.stderr)
        try:
            conf = str(root / "cloud" / "slurm.conf")
            os.environ["SLURM_CONF"] = conf
            fill(COMPONENTS if args.quick else 9000)
            site = Site(name="cloud", slurm=Slurm(conf=conf, cluster="cloud"))
            cycles = [measure(site) for _ in range(2 * rounds + 1)][1:]
            before = requests()
            for command in SLURM_EXPORTER:
                slurm(*command.split())
            theirs = requests() - before
            size = state.state_path("cloud", "slurm").stat().st_size
            print_progress(f"state file: {size} bytes; requests of the other exporter's commands: {theirs}")
        finally:
            subprocess.run([*devcluster, "down", "--root", str(root)], check=True, stdout=sys.stderr)
    code = 0
    for name in ("jobs", "nodes"):
        code |= report(cases(name, [one for one in cycles if one.name == name]))
    most = max(one.requests for one in cycles)
    peer = [theirs / (2 * max(1, most))]  # jobs and nodes: two cycles of ours
    what = f"requests for one look at jobs and nodes: {theirs} of its commands ÷ ours (two cycles of {most})"
    named = from_ratios(what, "slurm_exporter's documented commands", "1.9", peer, target=1.0)
    return code | report([text_case(site, rounds), named])


if __name__ == "__main__":
    sys.exit(main())
