"""How long `pit-healthcheck` holds a job back as Prolog and as Epilog, against the limit of 100 ms.

perf/run node_prolog [--quick] [--rounds 30]

On a healthy node, and on one whose last report drains it, where it also writes to syslog. Time is CPU time of the
script and of all that it starts, one after the other: a busy machine changes little. The time that passed is on stderr.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

from perf.harness.harness import from_ratios, report
from perf.harness.workspace import REPO, arguments, format_spread, print_progress, workspace

LIMIT_S = 0.100
CASES = {  # context, node, exit code
    "prolog, healthy node": ("prolog_slurmd", "good", 0),
    "epilog, healthy node": ("epilog_slurmd", "good", 0),
    "prolog, node to be drained": ("prolog_slurmd", "bad", 1),
}


def run(config: Path, context: str, node: str, code: int) -> tuple[float, float]:
    """Run the script as slurmd does, check its exit code, and return its CPU time and the time that passed."""
    env = {"PIT_NODE_CONFIG": str(config), "SLURM_SCRIPT_CONTEXT": context, "SLURMD_NODENAME": node}
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run([REPO / "scripts/pit-healthcheck"], env=env, capture_output=True, text=True, check=False)
    wall_s, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode != code:
        sys.exit(f"{context} on {node}: exit {done.returncode} (expected {code}): {done.stderr}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall_s


def main() -> int:
    args = arguments(__doc__)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in CASES}
    with workspace(args.disk, needed=1 << 20) as home:
        config = home / "node.toml"
        config.write_text(f'spool = "{home}"\nstate = "{home}"\n')
        (home / "bad.refuse").write_text(f"{time.time() + 3600:.0f}\ngpu-count: gpus: 7\n")
        for _ in range(5 if args.quick else max(args.rounds, 30)):
            for name, words in CASES.items():
                times[name].append(run(config, *words))
    cases = []
    for name, pairs in times.items():
        cpu_s, wall_s = zip(*pairs, strict=True)
        print_progress(f"{name}: passed {format_spread(wall_s)}")
        text = f"{name}: {LIMIT_S * 1e3:.0f} ms ÷ CPU time (median {statistics.median(cpu_s) * 1e3:.0f} ms)"
        cases.append(from_ratios(text, "limit", "", [LIMIT_S / max(each, 1e-4) for each in cpu_s], target=1.0))
    return report(cases)


if __name__ == "__main__":
    sys.exit(main())
