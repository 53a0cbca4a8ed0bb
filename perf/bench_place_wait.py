"""How long a job will wait: our quantiles beside the single start that `sbatch --test-only` foretells.

perf/run place_wait [--quick]

Helios, September 2020, on three unequal sites, each job bound once as Slurm's -M does. When a job is submitted the
simulator says what Slurm would: a start by everybody's time limits. Ours is made of that number and of what happened
before that moment, online; the first jobs, of which nothing is known yet, are said what Slurm says. Judged are the jobs
that were not foretold to start at once (of the others both are right): pinball loss at 10, 50 and 90 %, and the share
of waits between q10 and q90. The constants of place/estimate/wait.py were chosen on jobs of the month's first half;
these are those of the second. One round is one seed of the time limits.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from heapq import heappop, heappush
from pathlib import Path

import numpy as np
from bench import judge, report
from numpy.typing import NDArray

from pitools.place.estimate.wait import LEVELS, Features, Waits
from pitools.place.simulate import engine, scenario, trace
from pitools.place.simulate.binders import Arrival, Planned

TRACE = Path(os.environ.get("PIT_BENCH_TRACE", "../shared/data/traces/helios_venus_2020-09.csv"))
LESS, TOLERANCE, SHARE = 0.25, 0.05, 0.8


class Replay:
    """Jobs of one replay that had to wait: what was foretold, and what came of it."""

    def __init__(self, load: float, seed: int) -> None:
        jobs = trace.read(TRACE)
        run = engine.Engine(
            jobs, scenario.three_unequal(load=load, seed=seed), "slurm-m", "", 60.0, None, lambda _: None
        )
        bind, foretell = run.bind, Planned()
        self.raw_s, self.ahead = np.zeros(len(jobs)), np.zeros(len(jobs))
        assert bind

        def watched(arrival: Arrival) -> Sequence[int]:
            (pool,) = bind(arrival)
            site = arrival.sites[pool]
            self.raw_s[arrival.job] = foretell(arrival, pool) - arrival.now_s
            self.ahead[arrival.job] = sum(entry[3] for entry in site.queue) / site.units
            return (pool,)

        run.bind = watched
        result = run.replay()
        self.submit_s, self.pool = np.array(result.submit_s), np.array(result.pool)
        self.wait_s = np.array(result.start_s) - self.submit_s
        self.units, self.limit_s = np.array(jobs.gpus), np.array(run.work.limit_s)

    def ours(self) -> NDArray[np.float64]:
        """q10, q50, q90 of every job, each said at its submission."""
        said = np.tile(self.raw_s[:, None], 3)
        for pool in range(3):
            waits, starts = Waits(), list[tuple[float, int]]()
            for job in np.flatnonzero((self.pool == pool) & (self.raw_s > 0)).tolist():
                now_s = float(self.submit_s[job])
                while starts and starts[0][0] <= now_s:
                    start_s, started = heappop(starts)
                    waits.started(str(started), start_s)
                features = Features(int(self.units[job]), float(self.limit_s[job]), float(self.ahead[job]))
                told = waits.quantiles(now_s, float(self.raw_s[job]), features)
                waits.asked(str(job), now_s, float(self.raw_s[job]), features, told)
                said[job] = told or said[job]
                heappush(starts, (now_s + float(self.wait_s[job]), job))
        return said


def pinball(actual: NDArray[np.float64], said: NDArray[np.float64]) -> float:
    """Mean loss over LEVELS. said: shape (jobs, 3)."""
    over = actual[:, None] - said
    levels = np.array(LEVELS)
    return float(np.maximum(levels * over, (levels - 1) * over).mean())


def main() -> int:
    """Run, and print the cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed instead of five")
    seeds = range(1 if parser.parse_args().quick else 5)
    cases = []
    for load in (1.4, 1.7):
        ratios, inside = [], []
        for seed in seeds:
            replay = Replay(load, seed)
            said = replay.ours()
            late = (replay.raw_s > 0) & (replay.submit_s >= replay.submit_s[-1] / 2)
            actual, ours, raw = replay.wait_s[late], said[late], np.tile(replay.raw_s[late][:, None], 3)
            ratios.append(pinball(actual, raw) / pinball(actual, ours))
            inside.append(float(np.mean((ours[:, 0] <= actual) & (actual <= ours[:, 2]))))
        name, peer = f"load x{load}", "sbatch --test-only"
        cases.append(judge(f"pinball loss, {name}", peer, "as simulated", ratios, reach=1 / (1 - LESS)))
        text = f"q10 to q90 hold {min(inside):.1%} to {max(inside):.1%} of the waits (0.05 / |share - 0.8|), {name}"
        far = [min(100.0, TOLERANCE / max(1e-9, abs(share - SHARE))) for share in inside]
        cases.append(judge(text, "80 %", "", far, reach=1.0))
    return report(cases)


if __name__ == "__main__":
    sys.exit(main())
