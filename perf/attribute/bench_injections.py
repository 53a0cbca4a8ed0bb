"""Faults put into the training loops, traced on the development cluster and judged: how many verdicts are right.

perf/run attribute_injections [--quick]     needs the cluster: eval "$(scripts/devcluster up)"

Two ranks on two nodes; 20 steps of each run are traced by `pit perf trace` and judged by `pit perf attribute`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from perf.attribute.faulty_loop import FAULTS
from perf.harness.dev_cluster import alpha
from perf.harness.harness import Case, from_ratios, report
from perf.harness.workspace import ENV, REPO, arguments, print_progress

STEPS = 20
EXPECTED = {
    "healthy": ("compute", "inconclusive"),
    "slow-input": ("input",),
    "slow-rank": ("straggler",),
    "host-stall": ("host",),
    "recompiles": ("compile",),
    "big-checkpoint": ("checkpoint",),
}
PIT = Path(sys.executable).parent / "pit"
REQUEST = """
name = "{framework}-{fault}"
entry = "perf.attribute.faulty_loop:main"
framework = "{framework}"
nodes = 2
time = "5m"
workdir = "{repo}"
snapshot = false
data = {{ demo = "{data}" }}
args = {{ framework = "{framework}", fault = "{fault}", steps = 34, global_batch_size = 128 }}
env = {{ OMP_NUM_THREADS = "1" }}
"""


def run(*argv: str | Path, env: dict[str, str], code: int = 0) -> str:
    """Run a command to its end; its stdout. Exits with its stderr if it fails."""
    done = subprocess.run(list(map(str, argv)), env=env, capture_output=True, text=True, check=False, cwd=REPO)
    if done.returncode not in (0, code):
        sys.exit(f"exit {done.returncode}: {argv}\n{done.stderr}")
    return done.stdout


def judge(framework: str, fault: str, folder: Path, data: Path, env: dict[str, str]) -> str:
    """Launch a run with a fault, trace it, and return what its verdict is, with the rank of a straggler."""
    runs = Path(tempfile.mkdtemp(dir=folder))
    env = {**env, "PIT_RUNS": str(runs)}
    request = folder / f"{framework}-{fault}.toml"
    request.write_text(REQUEST.format(framework=framework, fault=fault, repo=REPO, data=data))
    traced = run(PIT, "perf", "trace", request, "--site", "alpha", "--steps", str(STEPS), env=env)
    ranks = [json.loads(line) for line in traced.splitlines()]
    (captured,) = runs.glob("*/attempts/0/traces/*-*")
    lines = run(PIT, "perf", "attribute", captured, env=env).splitlines()
    verdict = json.loads(lines[-1])
    steps = [json.loads(line) for line in lines[:-1]]
    for step in steps:
        parts = sum(value for name, value in step.items() if name.endswith("_ms") and name not in NOT_PARTS)
        assert abs(parts - step["wall_ms"]) < 1e-3, step
    blocked = max(rank["blocked_s"] for rank in ranks)
    shares = {part: share for part, share in verdict["shares"].items() if share}
    print_progress(f"{framework} {fault}: {verdict['verdict']} {verdict['rank']} {shares} blocked {blocked} s")
    run(PIT, "launch", "cancel", captured.parents[3], "--site", "alpha", env=env, code=1)
    shutil.rmtree(runs, ignore_errors=True)  # its job may still write
    return f"{verdict['verdict']} {verdict['rank']}" if verdict["verdict"] == "straggler" else str(verdict["verdict"])


NOT_PARTS = ("wall_ms", "skew_ms", "overlapped_ms")


def main() -> int:
    args = arguments(__doc__)
    alpha()
    cases: list[Case] = []
    with tempfile.TemporaryDirectory(prefix="pit-bench-", dir=args.disk, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        env = {**ENV, "PYTHONPATH": str(REPO)}
        env |= {key: value for key in ("PIT_SITE_PATH", "SLURM_CONF") if (value := os.environ.get(key))}
        run(
            sys.executable,
            REPO / "scripts/examples/make_recording.py",
            folder / "reach.hdf5",
            "--episodes",
            "10",
            env=env,
        )
        run(PIT, "dataset", "ingest", folder / "reach.hdf5", "--to", folder / "data", "--name", "reach", env=env)
        for framework in ("torch", "jax"):
            right, total, false = 0, 0, 0
            for _ in range(1 if args.quick else args.rounds):
                for fault in FAULTS:
                    verdict = judge(framework, fault, folder, folder / "data" / "reach", env)
                    is_right = verdict.split()[0] in EXPECTED[fault] and verdict != "straggler 0"
                    right, total, false = (
                        right + is_right,
                        total + 1,
                        false + (fault == "healthy" and not is_right),
                    )
            print_progress(f"{framework}: {right} of {total} right, {false} false on healthy runs")
            cases.append(
                from_ratios(
                    f"{framework}: {total} runs, share of right verdicts", "truth", "", [right / total], target=0.95
                )
            )
            cases.append(
                from_ratios(
                    f"{framework}: healthy runs without a false verdict", "truth", "", [float(not false)], target=1.0
                )
            )
    return report(cases)


if __name__ == "__main__":
    sys.exit(main())
