"""Slow ranks in healthy runs, and in those with a rank that is 5 % slower, of 50 steps: false alarms and power.

perf/run performance_stragglers [--quick]      needs nothing else. The peers themselves do not run: their rules, as
described, are written anew below and applied to the same times. nvidia-resiliency-ext's: a rank is slow if the least
median ÷ its median is below 0.75. HolisticTraceAnalysis's: as many ranks are named as it is asked for, two by default.
A ratio is the limit over our rate, or our rate over the least. Our method was improved on the noise of `KNOWN`, so its
figures tell how well it fits that; on `NEW` nothing was chosen, and falling short there is a result that stays.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np

from perf.harness.harness import Case, from_ratios, report
from perf.performance import noise
from perf.performance.null_table import simulate
from pitools.perf.stragglers import find_slow_ranks

FALSE, POWER, STEPS = 0.01, 0.9, 50


def _moving_sum(values: np.ndarray, count: int) -> np.ndarray:
    return sum(values[start : start + STEPS] for start in range(count))


Family = Callable[[np.random.Generator, int], np.ndarray]
KNOWN: dict[str, Family] = {
    "gauss 2 %": lambda rng, ranks: 0.02 * rng.standard_normal((STEPS, ranks)),
    "gauss 5 %": lambda rng, ranks: 0.05 * rng.standard_normal((STEPS, ranks)),
    "moving average of 4": lambda rng, ranks: 0.01 * _moving_sum(rng.standard_normal((STEPS + 3, ranks)), 4),
    "ar1 0.6": lambda rng, ranks: 0.015 * simulate(rng, ranks, STEPS, 0.6).T,
    "t, 3 degrees": lambda rng, ranks: 0.02 * rng.standard_t(3, (STEPS, ranks)),
    "lognormal": lambda rng, ranks: np.exp(0.03 * rng.standard_normal((STEPS, ranks))) - 1,
    "common slow steps": lambda rng, ranks: (
        0.02 * rng.standard_normal((STEPS, ranks)) + rng.exponential(0.2, (STEPS, 1))
    ),
    "stalls of single ranks": lambda rng, ranks: (
        0.02 * rng.standard_normal((STEPS, ranks)) + (rng.random((STEPS, ranks)) < 0.03)
    ),
    "nodes that differ by 1 %": lambda rng, ranks: (
        0.02 * rng.standard_normal((STEPS, ranks)) + rng.uniform(-0.01, 0.01, (1, ranks))
    ),
}
NEW: dict[str, Family] = {
    "garch": lambda rng, ranks: 0.02 * noise.garch(rng, ranks, STEPS).T,
    "growing": lambda rng, ranks: 0.02 * noise.growing(rng, ranks, STEPS).T,
    "each rank's every 10th step 20 % longer": lambda rng, ranks: 0.02 * noise.periodic(rng, ranks, STEPS, 10, 10.0).T,
    "drifts of up to 2 %": lambda rng, ranks: 0.02 * noise.drift(rng, ranks, STEPS, 1.0).T,
    "two regimes of 20 steps, 4 % apart": lambda rng, ranks: 0.02 * noise.regimes(rng, ranks, STEPS, 0.05, 2.0).T,
    "long memory": lambda rng, ranks: 0.02 * noise.long_memory(rng, ranks, STEPS).T,
    "nodes that differ by 2 %": lambda rng, ranks: (
        0.02 * rng.standard_normal((STEPS, ranks)) + rng.uniform(-0.02, 0.02, (1, ranks))
    ),
}


def nvrx(times: np.ndarray) -> set[int]:
    medians = np.median(times, axis=0)
    return {int(rank) for rank in np.flatnonzero(medians.min() / medians < 0.75)}


def hta(times: np.ndarray) -> set[int]:
    return {int(rank) for rank in np.median(times, axis=0).argsort()[-2:]}


def ours(times: np.ndarray) -> set[int]:
    return {slow.column for slow in find_slow_ranks(times, float(np.median(times)))}


def main(runs: int) -> int:
    cases: list[Case] = []
    for name, family in (KNOWN | NEW).items():
        rng = np.random.default_rng([len(name), 21])
        false = dict.fromkeys((ours, nvrx, hta), 0)
        found = dict.fromkeys((ours, nvrx, hta), 0)
        for number in range(runs):
            ranks = (4, 8, 32)[number % 3]
            times = 1 + family(rng, ranks)
            for judge in false:
                false[judge] += bool(judge(times))
            times[:, 2] *= 1.05
            for judge in found:
                found[judge] += judge(times) == {2}
        for what, counts, limit in (("false alarms", false, FALSE), ("5 % slower, alone named", found, POWER)):
            shares = ", ".join(f"{judge.__name__} {hits / runs:.3f}" for judge, hits in counts.items())
            share = counts[ours] / runs
            ratio = limit / max(share, 1e-4) if limit == FALSE else share / limit
            cases.append(
                from_ratios(
                    f"{what}, {name}{' (new)' * (name in NEW)}: {shares}", "the limit", f"{limit}", [ratio], target=1
                )
            )
    return report(cases)


if __name__ == "__main__":
    sys.exit(main(90 if "--quick" in sys.argv else 600))
