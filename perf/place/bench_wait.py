"""How long a job will wait: our quantiles beside the site's own, and our median beside what `sbatch --test-only` says.

perf/run place_wait [--quick]

Helios, September 2020, on three unequal sites, each job bound once as Slurm's -M does. When a job is submitted the
simulator says what Slurm would: a start by everybody's time limits. Ours is made of that number and of what happened
before that moment, online; the first jobs, of which nothing is known yet, are said what Slurm says. Judged are the jobs
that were not foretold to start at once (of the others all are right), by the pinball loss at 10, 50 and 90 %.

The site's own quantiles are those of the waits of the jobs that started there in the 14 days before: of jobs of half to
twice the size, or of all; of those that waited at least a second, or of those that were not foretold to start at once.
The best of these four counts, as if one had known which. What Slurm says is one number, and is judged as one: by its
distance to the wait, beside our median's. Of our q10 and q90 the share of waits between them is told, too. All that is
chosen in place/estimate/wait_model.py was chosen on jobs of the month's first half; these are those of the second. One
round is one seed of the time limits.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Sequence
from heapq import heappop, heappush
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from perf.harness.harness import from_ratios, report
from pitools.place.estimate.estimate import STARTS_NOW_S
from pitools.place.estimate.wait_model import LEVELS, Quantiles, WaitFeatures, WaitModel, combine
from pitools.place.simulate import engine, scenario, trace
from pitools.place.simulate.baselines import Arrival, PlannedStart

TRACE = Path(os.environ.get("PIT_BENCH_TRACE", "../shared/data/traces/helios_venus_2020-09.csv"))
LESS, TOLERANCE, SHARE = 0.25, 0.05, 0.8
DAYS_S, FEW = 14 * 86400.0, 10  # of fewer waits a site's own quantiles say nothing


class Replay:
    """Jobs of one replay that had to wait: what was foretold, and what came of it."""

    def __init__(self, load: float, seed: int) -> None:
        jobs = trace.read_trace(TRACE)
        run = engine.Simulator(
            jobs, scenario.three_unequal(load=load, seed=seed), "slurm-m", "", 60.0, None, lambda _: None
        )
        bind, foretell = run.bind, PlannedStart()
        self.raw_s, self.ahead = np.zeros(len(jobs)), np.zeros(len(jobs))
        assert bind

        def watched(arrival: Arrival) -> Sequence[int]:
            (pool,) = bind(arrival)
            site = arrival.schedulers[pool]
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
        output = np.tile(self.raw_s[:, None], 3)
        for pool in range(3):
            waits, starts = WaitModel(), list[tuple[float, int]]()
            for job in np.flatnonzero((self.pool == pool) & (self.raw_s > 0)).tolist():
                now_s = float(self.submit_s[job])
                while starts and starts[0][0] <= now_s:
                    start_s, started = heappop(starts)
                    waits.add_start(str(started), start_s)
                features = WaitFeatures(int(self.units[job]), float(self.limit_s[job]), float(self.ahead[job]))
                prediction = waits.predict(now_s, float(self.raw_s[job]), features)
                waits.add_submission(str(job), now_s, float(self.raw_s[job]), features, prediction)
                output[job] = prediction or output[job]
                heappush(starts, (now_s + float(self.wait_s[job]), job))
        return output

    def sites(self, factor: float, *, waited: bool) -> NDArray[np.float64]:
        """q10, q50, q90 of the waits at the job's site; of jobs of any size where there are few of 1 / factor to factor
        times its own; NaN where there are few of any. waited: of those that waited at least a second."""
        output = np.full((len(self.raw_s), 3), np.nan)
        for pool in range(3):
            began = np.flatnonzero((self.pool == pool) & ((self.wait_s >= 1) if waited else (self.raw_s > 0)))
            began = began[np.argsort(self.submit_s[began] + self.wait_s[began], kind="stable")]
            start_s, wait_s, units = self.submit_s[began] + self.wait_s[began], self.wait_s[began], self.units[began]
            for job in np.flatnonzero((self.pool == pool) & (self.raw_s > 0)).tolist():
                span = slice(*np.searchsorted(start_s, self.submit_s[job] + np.array([-DAYS_S, 0.0]), side="right"))
                alike = (units[span] <= factor * self.units[job]) & (self.units[job] <= factor * units[span])
                reference = wait_s[span][alike] if alike.sum() >= FEW else wait_s[span]
                if len(reference) >= FEW:
                    output[job] = np.quantile(reference, LEVELS)
        return output

    def filled(self, said: NDArray[np.float64]) -> NDArray[np.float64]:
        """With what Slurm says where nothing else is known."""
        return np.where(np.isnan(said), self.raw_s[:, None], said)

    def joined(self, learnt: NDArray[np.float64], own: NDArray[np.float64]) -> NDArray[np.float64]:
        """Ours, made one with the site's own, as `pit place plan` does of what does not start at once."""
        output = learnt.copy()
        for job in np.flatnonzero((self.raw_s > STARTS_NOW_S) & ~np.isnan(own[:, 0])):
            output[job] = combine(Quantiles(*learnt[job]), own[job])
        return output


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
        ratios, medians, inside = [], [], []
        for seed in seeds:
            replay = Replay(load, seed)
            ways = itertools.product((2.0, np.inf), (False, True))
            own = {way: replay.sites(way[0], waited=way[1]) for way in ways}
            output = replay.joined(replay.ours(), own[2.0, True])
            late = (replay.raw_s > 0) & (replay.submit_s >= replay.submit_s[-1] / 2)
            actual, ours = replay.wait_s[late], output[late]
            theirs = min(pinball(actual, replay.filled(item)[late]) for item in own.values())
            ratios.append(theirs / pinball(actual, ours))
            medians.append(float(np.abs(actual - replay.raw_s[late]).mean() / np.abs(actual - ours[:, 1]).mean()))
            inside.append(float(np.mean((ours[:, 0] <= actual) & (actual <= ours[:, 2]))))
        name, target = f"load x{load}", 1 / (1 - LESS)
        cases.append(from_ratios(f"pinball loss, {name}", "the site's own quantiles", "of 14 days", ratios, target=1.0))
        text = f"distance of the median to the wait, {name}"
        cases.append(from_ratios(text, "sbatch --test-only", "as simulated", medians, target=target))
        text = f"q10 to q90 hold {min(inside):.1%} to {max(inside):.1%} of the waits (0.05 / |share - 0.8|), {name}"
        far = [min(100.0, TOLERANCE / max(1e-9, abs(share - SHARE))) for share in inside]
        cases.append(from_ratios(text, "80 %", "", far, target=1.0))
    return report(cases)


if __name__ == "__main__":
    sys.exit(main())
