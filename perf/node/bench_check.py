"""What `pit node check` costs a node: CPU time of its own, and of its imports, against the limit of 150 ms each.

perf/run node_check [--quick] [--rounds 15]

The check runs as slurmd starts it: all tables, the shipped checks, with a report. Its PATH is empty, so that no tool of
the system (smartctl, nvidia-smi, scontrol) is counted; a further case has them. Time is CPU time of the whole process
tree, less that of an interpreter that does nothing, in turn. There is no peer to run: of NHC and gcm neither Debian nor
PyPI has a package.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
from pathlib import Path

from perf.harness.harness import Case, from_ratios, report
from perf.harness.workspace import ENV, REPO, arguments, print_progress, workspace

LIMIT_S = 0.150
IMPORTS = "import pitools.commands.node_check, pitools.node.check.this_node, pitools.node.check.config"


def cpu_s(*argv: str | Path, path: str) -> float:
    """Return the CPU time of a Python program and of all that it started and waited for."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    env = {**ENV, "PATH": path, "PYTHONPATH": str(REPO)}
    done = subprocess.run([sys.executable, *map(str, argv)], env=env, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):  # 1: this machine fails a critical check
        sys.exit(f"exit {done.returncode}: {argv}\n{done.stderr}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> int:
    args = arguments(__doc__)
    rounds = 3 if args.quick else max(args.rounds, 15)
    with workspace(args.disk, needed=1 << 20) as home:
        for name in ("spool", "state", "bin"):
            (home / name).mkdir(mode=0o755)
        config = home / "node.toml"
        config.write_text(f'spool = "{home}/spool"\nstate = "{home}/state"\n')
        check = ("-m", "pitools", "node", "check", "--report", "--format", "tsv", "--config", config)
        none, tools = str(home / "bin"), os.environ["PATH"]
        runs = {
            "pit node check --report, without tools: CPU": (check, none),
            "pit node check --report, with this machine's tools: CPU": (check, tools),
            "imports of pit node check: CPU": (("-c", IMPORTS), none),
        }
        bare_s: list[float] = []
        times_s: dict[str, list[float]] = {name: [] for name in runs}
        for number in range(rounds + 1):  # the first compiles
            bare = cpu_s("-c", "pass", path=none)
            taken = {name: cpu_s(*argv, path=path) - bare for name, (argv, path) in runs.items()}
            if number:
                bare_s.append(bare)
                for name, value in taken.items():
                    times_s[name].append(value)
    print_progress(f"python -c pass: {statistics.median(bare_s) * 1e3:.0f} ms")
    return report([_case(name, values) for name, values in times_s.items()])


def _case(name: str, values: list[float]) -> Case:
    shown = f"{name}: {LIMIT_S * 1e3:.0f} ms ÷ ours (median {statistics.median(values) * 1e3:.0f} ms)"
    return from_ratios(shown, "limit", "", [LIMIT_S / max(value, 1e-4) for value in values], target=1.0)


if __name__ == "__main__":
    sys.exit(main())
