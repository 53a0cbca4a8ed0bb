"""Pairs of jobs that JAX's own rule sends to one port, started together on the same two nodes of `alpha`.

perf/run launch_collisions [--pairs 20] [--quick]       needs eval "$(scripts/devcluster up)"

Two JAX jobs meet when their ids differ by 4096 (port = id % 4096 + 61440). Ours go through `pit launch`; the peer's use
JAX's rule with an address that resolves, which is the most that auto-detection could do here. The ratio is pairs right:
ours to theirs.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import msgspec

from perf.harness.dev_cluster import alpha
from perf.harness.harness import Case, report
from pitools.launch import plan as planning
from pitools.launch.executor import PitExecutor
from pitools.launch.rank import main as worker
from pitools.launch.request import Request
from pitools.run import run_folder
from pitools.site.connect import client
from pitools.slurm.states import is_final

HERE = Path(__file__).resolve().parent
APART = 4096
NODES = "alpha01,alpha03"
SITE = alpha()
SLURM = client(SITE)
WORK = Path(SITE.paths.runs) / f".bench-collisions-{os.getpid()}"
ENV = {**os.environ, "SLURM_CONF": SITE.slurm.conf}


def ours() -> str:
    """A held job of ours; its id."""
    request = Request(
        name="membership",
        entry="membership_job:main",
        framework="jax",
        nodes=2,
        time="5m",
        nodelist=NODES,
        workdir=str(HERE),
    )
    plan = planning.make_plan(request, SITE, "bench")
    run_dir = WORK / run_folder.new_run_id("membership")
    run_dir.mkdir(parents=True)
    (run_dir / "plan.json").write_bytes(msgspec.json.encode(plan))
    send = lambda path: SLURM.submit(path=str(path), args=["--hold"]).job_id  # noqa: E731
    return str(PitExecutor(plan, SITE, run_dir, send).submit(worker.run_rank, str(run_dir / "plan.json")).job_id)


def peers() -> str:
    """The same job by JAX's rule alone; its id."""
    log = WORK / "%j.out"
    argv = ["srun", "--kill-on-bad-exit=1", "--wait=10", sys.executable, str(HERE / "membership_job.py")]
    script = f"#!/bin/bash\n{shlex.join(argv)}\n"
    args = ["--hold", "-N2", "--ntasks-per-node=1", "-t5", "-w", NODES, "-A", "lab", "-o", str(log)]
    return SLURM.submit(script, args=args).job_id


def pairs(count: int) -> list[tuple[str, str, str]]:
    """(kind, id, id + 4096): all first jobs, then, with slurmctld's counter moved on, all second ones."""
    kinds = [("ours", ours), ("peer", peers)] * count
    first = [(kind, make()) for kind, make in kinds]
    advance(int(first[0][1]) + APART)
    return [(kind, item, make()) for (kind, item), (_, make) in zip(first, kinds, strict=True)]


def advance(job_id: int) -> None:
    """Make `job_id` the next job's, by FirstJobId, which slurmctld reads again when it is above its counter."""
    conf = Path(SITE.slurm.conf)
    text = conf.read_text()
    conf.write_text(re.sub(r"(?m)^FirstJobId=.*\n", "", text) + f"FirstJobId={job_id}\n")
    try:
        subprocess.run(["scontrol", "reconfigure"], env=ENV, check=True)
        time.sleep(2)
    finally:
        conf.write_text(text)


def both_succeed(one: str, two: str) -> bool:
    """Start both at the same moment; whether both end well. A pair that hangs is ended after two minutes."""
    subprocess.run(["scontrol", "release", one, two], env=ENV, check=True)
    deadline = time.monotonic() + 120
    states: dict[str, str] = {}
    while time.monotonic() < deadline and not (states and all(map(is_final, states.values()))):
        time.sleep(1)
        states = SLURM.state_of([one, two])
    SLURM.cancel([one, two])
    return set(states.values()) == {"COMPLETED"}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    count = 2 if args.quick else args.pairs
    won = {"ours": 0, "peer": 0}
    WORK.mkdir(parents=True)
    for kind, item, two in pairs(count):
        if int(two) - int(item) != APART:
            sys.exit(f"jobs {item} and {two} do not collide: another user submitted meanwhile; run it again")
        good = both_succeed(item, two)
        won[kind] += good
        print(f"{kind}: jobs {item} and {two} {'right' if good else 'wrong'}", file=sys.stderr, flush=True)
    if won["ours"] == count:
        shutil.rmtree(WORK)  # else its logs say why
    ratio = won["ours"] / max(won["peer"], 1)
    case = Case(
        case=f"{won['ours']} of {count} colliding pairs right, peer {won['peer']}",
        peer="jax auto-detection",
        peer_version=version("jax"),
        ratio=ratio,
        ratio_min=ratio,
        ratio_max=ratio,
        n=count,
        target=1.0,
        ok=won["ours"] == count,
    )
    return report([case])


if __name__ == "__main__":
    sys.exit(main())
