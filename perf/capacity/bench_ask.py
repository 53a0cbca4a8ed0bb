"""Five what-ifs for a quarter of some 10^5 jobs, each with five seeds: how long they take, and how much memory.

perf/run capacity_ask [--quick] [--rounds 3]

The workload is that of ../shared/data/traces/helios_venus_2020-09.csv: 84 thousand jobs for today's 91 days and the
week before them, and 100 thousand for the what-ifs, in which all submit a fifth more: on more GPUs, with a pool away,
or down, with a shorter limit, and with a rented pool. Measured is the command itself, from reading the trace to the
last record: 30 replays on all cores, on a pool where few wait and on one with long queues. The limit of two minutes
is one by the clock; beside it are the processor time of all processes, and the machine's load just before, which is
other work that shares the cores. Memory is the peak resident set of the largest process, times their number.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from perf.harness.harness import Case, from_ratios, report
from perf.harness.workspace import REPO, workspace

TRACE = Path(os.environ.get("PIT_BENCH_TRACE", REPO.parent / "shared/data/traces/helios_venus_2020-09.csv"))
CHANGES = ("gpus near +64", "away near 20d 2d", "down near 20d 2d", "limit 12h", "rent cloud 128 3.5")
GPUS = {"few wait": 1100, "long queues": 900}
TIME_S, MEMORY_MB, CORES = 120.0, 1000.0, len(os.sched_getaffinity(0))


def ask(scenario: Path) -> tuple[float, float, float, float]:
    """Wall seconds, processor seconds, load before and MB of today and the what-ifs."""
    words = [sys.executable, "-m", "pitools", "capacity", "ask", str(TRACE), "--scenario", str(scenario)]
    for change in CHANGES:
        words += ["--if", f"load x1.2, {change}"]
    load, began = os.getloadavg()[0], time.perf_counter()
    quiet = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_WRONLY, 0) for number in (1, 2)]
    child = os.posix_spawn(sys.executable, words, os.environ, file_actions=quiet)
    _, status, used = os.wait4(child, 0)  # of the largest of it and its workers
    if status:
        sys.exit(f"{scenario.name}: exit status {os.waitstatus_to_exitcode(status)}")
    took = time.perf_counter() - began
    return took, used.ru_utime + used.ru_stime, load, (1 + CORES) * used.ru_maxrss * 1024 / 1e6


def cases(home: Path, load: str, rounds: int) -> Iterator[Case]:
    """Time and memory, against their limits."""
    scenario = home / "today.toml"
    scenario.write_text(f"[pools.near]\ngpus = {GPUS[load]}\nprice_per_gpu_hour = 2.0\n")
    runs = [ask(scenario) for _ in range(rounds)]
    took, used, others, held = (sorted(column) for column in zip(*runs, strict=True))
    what, middle = f"91 days, five what-ifs, five seeds, {load}", rounds // 2
    times = f"{took[middle]:.0f} s on {CORES} cores with a load of {others[middle]:.1f} before"
    text = f"{what}: {TIME_S:g} s ÷ time by the clock ({times}; processor time {used[middle]:.0f} s)"
    yield from_ratios(text, "limit", "", [TIME_S / item for item in took], target=1.0)
    text = f"{what}: {MEMORY_MB:g} MB ÷ peak memory of all processes ({held[middle]:.0f} MB)"
    yield from_ratios(text, "limit", "", [MEMORY_MB / item for item in held], target=1.0)


def main() -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if not TRACE.exists():
        sys.exit(f"{TRACE} is not here")
    with workspace(Path("/var/tmp"), needed=1 << 20) as home:
        return report([case for load in GPUS for case in cases(home, load, 1 if args.quick else args.rounds)])


if __name__ == "__main__":
    sys.exit(main())
