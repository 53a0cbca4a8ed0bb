"""A month of 25,596 jobs replayed on three sites: how long it takes, and how much memory.

perf/run place_replay [--quick] [--rounds 3]

The trace is ../shared/data/traces/helios_venus_2020-09.csv, the sites are those of `scenario.three_unequal`, at the
load where queues are longest. Each replay is the command itself in a process of its own, from reading the trace to the
printed record: policies that bind jobs when they come (federation, -M) and ours, which decides every minute of
simulated time and learns run times meanwhile. Memory is the process' peak resident set.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from perf.harness.harness import Case, from_ratios, report
from perf.harness.workspace import REPO

TRACE = REPO.parent / "shared/data/traces/helios_venus_2020-09.csv"
POLICIES = ("ours", "federation", "slurm-m")
LOAD, TIME_S, MEMORY_MB = 1.7, 60.0, 500.0


def replay(policy: str, trace: Path) -> tuple[float, float]:
    """Seconds and MB of one replay."""
    words = [sys.executable, "-m", "pitools", "place", "simulate", str(trace), "--load", str(LOAD), "--policy", policy]
    began = time.perf_counter()
    child = os.posix_spawn(sys.executable, words, os.environ, file_actions=[(os.POSIX_SPAWN_OPEN, 1, os.devnull, 1, 0)])
    _, status, used = os.wait4(child, 0)
    if status:
        sys.exit(f"{policy}: exit status {os.waitstatus_to_exitcode(status)}")
    return time.perf_counter() - began, used.ru_maxrss * 1024 / 1e6


def cases(policy: str, rounds: int) -> list[Case]:
    """Time and memory of a policy's replays, against their limits."""
    runs = [replay(policy, TRACE) for _ in range(rounds)]
    took, held = (sorted(column) for column in zip(*runs, strict=True))
    reported = f"{policy}: 25,596 jobs on 3 sites at load x{LOAD:g}"
    return [
        from_ratios(
            f"{reported}: {TIME_S:g} s ÷ time ({took[rounds // 2]:.1f} s)",
            "limit",
            "",
            [TIME_S / item for item in took],
            target=1.0,
        ),
        from_ratios(
            f"{reported}: {MEMORY_MB:g} MB ÷ peak memory ({held[rounds // 2]:.0f} MB)",
            "limit",
            "",
            [MEMORY_MB / item for item in held],
            target=1.0,
        ),
    ]


def main() -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if not TRACE.exists():
        sys.exit(f"{TRACE} is not here")
    return report([case for policy in POLICIES for case in cases(policy, 1 if args.quick else args.rounds)])


if __name__ == "__main__":
    sys.exit(main())
