"""Healthy nodes with the noise of real ones, for 10,000 node-hours: the shipped checks and the controller drain none.

perf/run node_false_drains [--quick]      ten minutes or more; with --quick 192 node-hours

The nodes, their noise and the weather are those of tests/node/simulated.py and test_false_drains.py; the limits of
[control] are off. The case is node-hours until the first drain over those aimed at.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

from perf.harness.harness import from_ratios, report
from perf.harness.workspace import arguments, print_progress
from pitools.core import timestamps
from tests.node.test_false_drains import STEPS_PER_HOUR, Weather, make

NODES = 64
FIRST_SEED = 100  # the tests' are 0 to 3


def hours_without_drain(folder: Path, seed: int, node_hours: float) -> float:
    """Return the node-hours until the first drain, or all of them."""
    cluster = make(folder, NODES, seed)
    weather = Weather(cluster)
    steps = round(node_hours * STEPS_PER_HOUR / NODES)
    with (
        mock.patch.object(os, "fsync"),  # no machine here loses power
        mock.patch.object(timestamps, "now_rfc3339", side_effect=lambda: timestamps.to_rfc3339(cluster.now)),
    ):
        for step in range(steps):
            weather.step()
            cluster.tick()
            if cluster.slurm.drains:
                print_progress(f"seed {seed}: {cluster.slurm.drains}")
                return step * NODES / STEPS_PER_HOUR
    return steps * NODES / STEPS_PER_HOUR


def main() -> int:
    quick = arguments(__doc__).quick
    seeds, each_h = (range(FIRST_SEED, FIRST_SEED + (1 if quick else 4)), 192 if quick else 2500)
    ratios = []
    for seed in seeds:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            lived_h = hours_without_drain(Path(folder), seed, each_h)
        ratios.append(lived_h / each_h)
        print_progress(f"seed {seed}: {lived_h:.0f} node-hours in {time.monotonic() - began:.0f} s")
    text = f"healthy node-hours without a drain ÷ {each_h:,}, least of {len(ratios)} seeds"
    return report([from_ratios(text, "target", "", [min(ratios)], target=0.99)])  # whole steps of all nodes


if __name__ == "__main__":
    sys.exit(main())
