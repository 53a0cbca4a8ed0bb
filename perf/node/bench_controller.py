"""What a tick of the controller costs on 4,096 nodes: its time, and how often it calls Slurm.

perf/run node_controller [--quick] [--rounds 5]      needs root and Debian's Slurm packages

A real slurmctld with 4,096 nodes and no slurmd, in a cluster of this benchmark's own, and a spool with a fresh report
of each node. First all nodes are healthy; then one in 16 has failed a check, and the limits of [control] hold most of
these back. The tick that drains calls Slurm twice for each node it drains, and is not counted.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from perf.harness.harness import Case, from_ratios, report
from perf.harness.workspace import REPO, arguments, print_progress, workspace
from pitools.core import subprocesses, timestamps
from pitools.node import spool
from pitools.node.check.config import NodeConfig
from pitools.node.control.tick import Controller
from pitools.node.types import Finding, NodeReport
from pitools.slurm.client import Client
from pitools.slurm.transport import Transport

LIMIT_S, LIMIT_CALLS = 1.0, 3
NODES = 4096
EVERY = 16


class CountingRun:
    """Runs programs, and counts them."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, ...]] = []

    def __call__(self, argv: Sequence[str], **options: Any) -> subprocesses.Completed:
        """Run a program as `subprocesses.run` does."""
        self.calls.append(tuple(argv))
        return subprocesses.run(argv, **options)


def write_reports(folder: Path, names: Sequence[str], failing: int) -> None:
    """Write a fresh report of each node; every `failing`th has failed a check, 0: none."""
    now = timestamps.now_rfc3339()
    passed = tuple(f"check-{number}" for number in range(60))
    for number, name in enumerate(names):
        finding = Finding(
            node=name,
            check="gpu-count",
            state="failed",
            level="critical",
            action="drain",
            message="gpus: 7 (expected exactly 8)",
            evidence_at=now,
        )
        findings = (finding,) if failing and number % failing == 0 else ()
        node = NodeReport(node=name, boot_id="b", checked_at=now, hardware={}, findings=findings, passed=passed)
        spool.write_report(folder, node)


def tick(client_env: dict[str, str], config: NodeConfig) -> tuple[float, int, int]:
    """Tick once, and return seconds, calls of Slurm, and drains."""
    run = CountingRun()
    controller = Controller(Client(Transport(env=client_env), run), config)
    began = time.perf_counter()
    result = controller.tick(act=True)
    wall_s = time.perf_counter() - began
    return wall_s, len(run.calls), sum(row.done and row.act == "drain" for row in result.rows)


def cases(what: str, ticks: Sequence[tuple[float, int, int]]) -> list[Case]:
    walls_s = [wall_s for wall_s, _, _ in ticks]
    shown = f"{what}: {LIMIT_S:g} s ÷ a tick (median {statistics.median(walls_s):.2f} s)"
    calls = [calls for _, calls, _ in ticks]
    counted = f"{what}: {LIMIT_CALLS} ÷ calls of Slurm in a tick (most: {max(calls)})"
    return [
        from_ratios(shown, "limit", "", [LIMIT_S / wall_s for wall_s in walls_s], target=1.0),
        from_ratios(counted, "limit", "", [LIMIT_CALLS / max(count, 1) for count in calls], target=1.0),
    ]


def main() -> int:
    args = arguments(__doc__)
    with workspace(args.disk, needed=200 << 20) as home:
        root, folder = home / "dc", home / "spool"
        folder.mkdir(mode=0o755)
        devcluster = [str(REPO / "scripts/devcluster")]
        options = ["--root", str(root), "--clusters", "tick", "--nodes", "1", "--base-port", "30500"]
        subprocess.run([*devcluster, "up", *options, "--cloud", str(NODES)], check=True, stdout=sys.stderr)
        try:
            env = {"SLURM_CONF": str(root / "cloud" / "slurm.conf")}
            config = NodeConfig(spool=str(folder))
            names = [node.node for node in Client(Transport(env=env)).nodes()]
            write_reports(folder, names, 0)
            healthy = [tick(env, config) for _ in range(args.rounds)]
            write_reports(folder, names, EVERY)
            first = tick(env, config)
            print_progress(f"drained {first[2]} nodes in {first[0]:.2f} s with {first[1]} calls")
            failing = [tick(env, config) for _ in range(args.rounds)]
        finally:
            subprocess.run([*devcluster, "down", "--root", str(root)], check=True, stdout=sys.stderr)
    code = report(cases(f"{len(names):,} nodes, all healthy", healthy))
    return code | report(cases(f"{len(names):,} nodes, {first[2]} drained, more held back", failing))


if __name__ == "__main__":
    sys.exit(main())
