"""How long a choice takes, by each objective: 847 real hosts, and 10,000 nodes with k = 1024.

perf/run topology_time [--quick] [--csv ../shared/data/topology/lingjun_2023.csv]

One core. Every round chooses from another random set of free nodes, of a third to all; half of them with a cost of its
own for each node, so that no two leaves are alike. The ratio is the limit over the median.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from pathlib import Path

from msgspec import structs

from perf.harness.harness import Case, from_ratios, report
from perf.topology.bench_leaves import CSV
from pitools.topology import discover
from pitools.topology.choose import Objective, select_nodes
from pitools.topology.fabric_model import Fabric, Leaf, nodes_of

OBJECTIVES: tuple[Objective, ...] = ("pair", "ring", "level", "leaf")


def pods(number: int, leaves: int, size: int) -> Fabric:
    """So many pods of so many leaves; without pods, the leaves right below the core."""
    created = []
    for count in range(max(number, 1) * leaves):
        above = ("core", f"pod{count // leaves}") if number else ("core",)
        names = tuple(f"n{place:05d}" for place in range(count * size, (count + 1) * size))
        created.append(Leaf(path=(*above, f"leaf{count:04d}"), nodes=names))
    return Fabric(leaves=tuple(created))


def case(what: str, fabric: Fabric, k: int, objective: Objective, limit_s: float, rounds: int) -> Case:
    """The limit over the time of each round; of the fabric's index, made once, only the first round knows."""
    names = nodes_of(fabric)
    times = []
    for number in range(rounds + 1):
        rng = random.Random(number)
        free = rng.sample(names, max(k, round(len(names) * (1 - 0.7 * number / rounds))))
        value = dict(zip(free, (rng.random() for _ in free), strict=True)) if number % 2 else free
        began = time.perf_counter()
        select_nodes(fabric, value, k, objective=objective)
        times.append(time.perf_counter() - began)
    first, *times = times
    median = statistics.median(times)
    reported = f"{what}, k = {k}, {objective}: {limit_s * 1e3:.0f} ms ÷ ours (median {median * 1e3:.1f} ms, "
    reported += f"worst {max(times) * 1e3:.1f} ms, with the index {first * 1e3:.0f} ms)"
    judged = from_ratios(reported, "limit", "", [limit_s / took for took in times], target=1.0)
    return structs.replace(judged, ratio=round(limit_s / median, 3), ok=median <= limit_s)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--csv", type=Path, default=CSV)
    args = parser.parse_args()
    if not args.csv.is_file():
        sys.exit(f"{args.csv}: not there; give the fabric with --csv")
    real = discover.read_fabric(args.csv)
    large = {"79 pods of 16 leaves of 8": pods(79, 16, 8), "1,250 leaves of 8": pods(0, 1250, 8)}
    rounds, code = (10 if args.quick else 40), 0
    for objective in OBJECTIVES:
        cases = [case("847 hosts", real, k, objective, 0.005, rounds) for k in (16, 128, 250)]
        cases += [
            case(f"10,000 nodes, {what}", fabric, 1024, objective, 0.05, rounds) for what, fabric in large.items()
        ]
        code |= report(cases)
    return code


if __name__ == "__main__":
    sys.exit(main())
