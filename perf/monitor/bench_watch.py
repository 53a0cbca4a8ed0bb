"""What `pit monitor watch` costs: its CPU time, with that of the commands it starts, at one update a second.

perf/run monitor_watch [--quick]      needs root and Slurm: eval "$(scripts/devcluster up)"

It runs in a terminal of its own (a pty of 140 columns, 50 lines) and shows two real clusters and this machine, with
500 run folders on disk; this process meanwhile appends a step to the log of each running run once a second. Its CPU
time is read 15 s after its start and again after a minute, in which the ledgers of runs are made, and both controllers
are asked twice. The ratio is 5 % of that minute over the CPU time. A round in which the clock on the screen shows fewer
than 58 of the 60 seconds fails.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import sys
import tempfile
import termios
import time
from pathlib import Path

import psutil

from perf.harness.dev_cluster import alpha
from perf.harness.harness import from_ratios, report
from tests.monitor.fleet import Runs, write_site

SITES = ("alpha", "beta", "here")
RUNS, WARM_UP_S = 500, 15.0
LIMIT = 0.05  # of one core
CASES = {"60 of 500 runs make a step a second": 60, "all of 500 runs make a step a second": 500}


def fill(folder: Path, running: int) -> list[tuple[Runs, Path]]:
    """Make the sites and their runs, and return those that run."""
    sites = folder / "sites"
    sites.mkdir()
    for name in SITES:
        write_site(sites, name, folder / "runs" / name, "none" if name == "here" else "slurm")
    os.environ["PIT_SITE_PATH"] = f"{os.environ.get('PIT_SITE_PATH', '')}:{sites}"
    fleets, live = [Runs(name) for name in SITES], []
    for number in range(RUNS):
        runs = fleets[number % len(fleets)]
        state = "RUNNING" if number < running else ("COMPLETED", "FAILED", "PENDING")[number % 3]
        run_dir = runs.add(state=state, age_s=900 + number)
        if state != "PENDING":
            runs.log(run_dir, 0, 500, age_s=60)
        if state == "RUNNING":
            live.append((runs, run_dir))
    return live


def watch(live: list[tuple[Runs, Path]], seconds: float) -> tuple[float, int]:
    """Return the CPU time of the watch in these seconds, and how many of them its clock showed."""
    pid, terminal = pty.fork()
    if pid == 0:
        argv = [sys.executable, "-m", "pitools", "monitor", "watch"]
        os.execve(
            argv[0],
            argv + [word for name in SITES for word in ("--site", name)],
            {**os.environ, "TERM": "xterm-256color"},
        )
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 140, 0, 0))
    os.kill(pid, signal.SIGWINCH)
    process, output, step = psutil.Process(pid), b"", 500
    began, marks = time.monotonic(), list[float]()
    try:
        while len(marks) < 2:
            step += 1
            for runs, run_dir in live:
                runs.log(run_dir, step, step + 1)
            until = began + step - 500
            while (left := until - time.monotonic()) > 0:
                if select.select([terminal], [], [], left)[0]:
                    output += os.read(terminal, 1 << 16)
            if time.monotonic() - began >= WARM_UP_S + seconds * len(marks):
                marks.append(sum(process.cpu_times()[:4]))
                output = output if len(marks) == 2 else b""
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(terminal)
    return marks[1] - marks[0], len(set(re.findall(rb"\d\d:\d\d:\d\dZ", output)))


def main(rounds: int, seconds: float) -> int:
    alpha()  # or exit
    cases = []
    before = os.environ.get("PIT_SITE_PATH", "")
    for case, running in CASES.items():
        ratios = []
        for _ in range(rounds):
            with tempfile.TemporaryDirectory(prefix="pit-bench-", dir="/var/tmp") as name:
                os.environ["PIT_SITE_PATH"] = before
                live = fill(Path(name), running)
                cpu_s, shown = watch(live, seconds)
            print(f"{case}: {cpu_s / seconds:.2%} of a core, {shown} updates in {seconds:.0f} s", file=sys.stderr)
            ratios.append(LIMIT * seconds / cpu_s if shown >= seconds * 58 / 60 else 0.0)
        cases.append(from_ratios(case, "5 % of one core", "", ratios, target=1.0))
    return report(cases)


if __name__ == "__main__":
    quick = "--quick" in sys.argv
    sys.exit(main(1 if quick else 3, 20.0 if quick else 60.0))
