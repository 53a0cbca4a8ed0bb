"""Leaf switches of K nodes on a real fabric of 847 hosts: ours against a slurmctld's topology/tree.

perf/run topology_leaves [--quick] [--csv ../shared/data/topology/lingjun_2023.csv] [--base-port 21500]

A slurmctld of its own holds the hosts as CLOUD nodes, some drained at random; `sbatch --test-only` says which of the
others it would take. Part of its loss is that it spares large pods, so ours is also held to the pods it took. What it
takes also depends on the order of the lines in topology.conf: the target is for that of names, the other is only shown.
"""

from __future__ import annotations

import argparse
import csv
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from msgspec import structs

from perf.harness.harness import Case, from_ratios, report
from perf.harness.workspace import REPO
from pitools.core import hostlist
from pitools.slurm.client import Client, Transport
from pitools.topology import discover
from pitools.topology.choose import select_nodes
from pitools.topology.fabric_model import Fabric, natural_sort_key

CSV = REPO.parent / "shared" / "data" / "topology" / "lingjun_2023.csv"
SIZES = (16, 32, 64, 128)
BUSY = (0.3, 0.5, 0.7)
FEWER, FEWER_IN_PODS = 0.25, 0.10
SCRIPT = "#!/bin/sh\ntrue\n"


def topology_conf(path: Path, *, backwards: bool) -> str:
    """The fabric as Slurm wants it, by name, or its pods the other way round; a leaf's name is unique only in its pod.

    Hosts are numbered in the order of their names, which are hashes: of those of digits alone, Slurm 22.05 loses one.
    """
    rows = sorted(csv.DictReader(path.open()), key=lambda row: row["host"])
    pods: dict[str, dict[str, list[str]]] = {}
    by_name = sorted(enumerate(rows), key=lambda item: natural_sort_key(f"{item[1]['agg_PSW']}-{item[1]['tor_ASW']}"))
    for number, row in by_name:
        leaf = f"{row['agg_PSW']}-{row['tor_ASW']}"
        pods.setdefault(row["agg_PSW"], {}).setdefault(leaf, []).append(f"h{number:04d}")
    listed = dict(reversed(pods.items())) if backwards else pods
    lines = [f"SwitchName={leaf} Nodes={','.join(names)}" for pod in listed.values() for leaf, names in pod.items()]
    lines += [f"SwitchName={pod} Switches={','.join(leaves)}" for pod, leaves in listed.items()]
    return "\n".join([*lines, f"SwitchName=core Switches={','.join(listed)}"]) + "\n"


@contextmanager
def referee(conf: str, base_port: int) -> Iterator[Client]:
    """A slurmctld with these switches, gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="pit-leaves-", dir="/var/tmp") as folder:
        topology, root = Path(folder) / "topology.conf", Path(folder) / "root"
        topology.write_text(conf)
        up = ["--clusters", "x", "--nodes", "1", "--cloud-topology", topology, "--base-port", str(base_port)]
        call = lambda *words: subprocess.run(  # noqa: E731
            [REPO / "scripts" / "devcluster", *words, "--root", root], check=True, stdout=sys.stderr
        )
        try:
            call("up", *up)
            yield Client(Transport(env={"SLURM_CONF": str(root / "cloud" / "slurm.conf")}, timeout_s=60))
        finally:
            call("down")


def taken(slurm: Client, count: int) -> set[str]:
    """The nodes that Slurm would take now for so many."""
    answer = slurm.test_only(SCRIPT, [f"-N{count}", "-p", "train"])
    assert abs(datetime.fromisoformat(answer.start).timestamp() - time.time()) < 60, "not now"
    actual = set(hostlist.expand(answer.node_list))
    assert len(actual) == count, "not so many"
    return actual


def occupy(slurm: Client, busy: set[str], was: set[str]) -> None:
    """Drain what is busy, and give back what was."""
    for names, state in ((busy - was, "drain"), (was - busy, "undrain")):
        if names:
            case = [f"nodename={hostlist.fold(names)}", f"state={state}", "reason=bench"]
            subprocess.run(
                ["scontrol", "update", *case], env={**slurm.transport.env, "PATH": "/usr/bin:/bin"}, check=True
            )


def leaves_of(fabric: Fabric, nodes: Collection[str], depth: int) -> set[str]:
    """Switches at this depth from the leaf, 0 the leaf itself, that the nodes are under."""
    chosen = set(nodes)
    return {leaf.path[-1 - depth] for leaf in fabric.leaves if chosen.intersection(leaf.nodes)}


def race(slurm: Client, rounds: int) -> dict[int, list[tuple[int, int, int]]]:
    """For each size and occupancy, the leaves of Slurm's choice, of ours, and of ours within Slurm's pods."""
    fabric = discover.query_fabric(slurm)
    every = sorted(node for leaf in fabric.leaves for node in leaf.nodes)
    pod_of = {node: leaf.path[-2] for leaf in fabric.leaves for node in leaf.nodes}
    actual: dict[int, list[tuple[int, int, int]]] = {size: [] for size in SIZES}
    was: set[str] = set()
    for number in range(rounds):
        busy = set(random.Random(number).sample(every, round(len(every) * BUSY[number % len(BUSY)])))
        occupy(slurm, busy, was)
        was, free = busy, set(every) - busy
        assert taken(slurm, len(free)) == free, "both sides must choose from the same nodes"
        for size in SIZES:
            theirs = taken(slurm, size)
            assert theirs <= free
            selection = select_nodes(fabric, free, size, objective="leaf")
            pods = leaves_of(fabric, theirs, 1)
            within = select_nodes(fabric, {node for node in free if pod_of[node] in pods}, size, objective="leaf")
            actual[size].append((len(leaves_of(fabric, theirs, 0)), selection.leaves, within.leaves))
            assert selection.leaves == len(leaves_of(fabric, selection.nodes, 0))
        print(
            f"occupancy {number + 1} of {rounds}", [rows[-1] for rows in actual.values()], file=sys.stderr, flush=True
        )
    return actual


def cases(found: dict[int, list[tuple[int, int, int]]], listing: str, version: str, *, judged: bool) -> Iterator[Case]:
    """judged: the means must reach what was promised; else they only must not be worse."""
    rows = [row for size in SIZES for row in found[size]]
    command = f"sbatch --test-only -N K, TopologyPlugin=topology/tree, {listing}"
    what = f"{listing}: leaves, K = {', '.join(map(str, SIZES))}, Slurm's ÷ ours each time"
    never = from_ratios(what, "Slurm", version, [a / b for a, b, _ in rows], target=1.0, command=command)
    yield structs.replace(never, ok=never.ratio_min >= 1)
    for column, fewer, what in ((1, FEWER, "any pods"), (2, FEWER_IN_PODS, "the pods that Slurm took")):
        means = {size: [sum(row[i] for row in found[size]) / len(found[size]) for i in (0, column)] for size in SIZES}
        reported = ", ".join(f"K={size}: {theirs:.2f} → {ours:.2f}" for size, (theirs, ours) in means.items())
        many = [size for size in SIZES if size >= 64]
        ratios = [row[0] / row[column] for size in many for row in found[size]]
        target = 1 / (1 - fewer) if judged else 1.0
        case = from_ratios(
            f"{listing}: mean leaves, K ≥ 64, {what} ({reported})", "Slurm", version, ratios, target=target
        )
        ratio = sum(means[size][0] for size in many) / sum(means[size][1] for size in many)
        yield structs.replace(case, ratio=round(ratio, 3), ok=ratio >= target, command=command)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--csv", type=Path, default=CSV)
    parser.add_argument("--base-port", type=int, default=21500)
    args = parser.parse_args()
    if not args.csv.is_file():
        sys.exit(f"{args.csv}: not there; give the fabric with --csv (columns host, agg_PSW, tor_ASW)")
    code = 0
    for backwards, listing in ((False, "listed by name"), (True, "pods listed backwards")):
        with referee(topology_conf(args.csv, backwards=backwards), args.base_port) as slurm:
            actual = race(slurm, 6 if args.quick else 40)
            version = ".".join(map(str, slurm.version()))
        code |= report(list(cases(actual, listing, version, judged=not backwards)))
    return code


if __name__ == "__main__":
    sys.exit(main())
