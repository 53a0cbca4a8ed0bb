"""Write `pitools/perf/regression/null.csv`: how large the largest step of a series without one is.

python -m perf.performance.null_table       four minutes
"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

from pitools.perf.regression import change_points

SIZES = (12, 16, 22, 30, 42, 60, 85, 120, 180, 270, 500)
PHIS = tuple(round(0.1 * number, 1) for number in range(10))
SERIES = 40_000


def simulate(rng: np.random.Generator, count: int, n: int, phi: float) -> np.ndarray:
    """Return series of Gaussian AR(1) noise with deviation 1, (count, n)."""
    noise = rng.standard_normal((count, n))
    for step in range(1, n):
        noise[:, step] = phi * noise[:, step - 1] + np.sqrt(1 - phi**2) * noise[:, step]
    return noise


def null_row(n: int, phi: float, count: int = SERIES, seed: int = 1) -> list[float]:
    """Return the quantiles at p = 0.5, 0.1 and 0.02 of the statistic, and the mean excess over the last."""
    rng = np.random.default_rng([seed, n, round(10 * phi)])
    statistic = np.concatenate(
        [
            change_points._largest_step(change_points._clip(simulate(rng, part, n, phi) - 100.0), np.full(part, phi))[0]
            for part in [5000] * (count // 5000)
        ]
    )
    quantiles = np.quantile(statistic, [0.5, 0.9, 0.98])
    excess = statistic[statistic > quantiles[-1]] - quantiles[-1]
    return [round(float(value), 4) for value in (*quantiles, excess.mean())]


if __name__ == "__main__":
    with Path(change_points.__file__).with_name("null.csv").open("w", newline="") as file:
        write = csv.writer(file, lineterminator="\n").writerow
        write(["points", "phi", "p50", "p10", "p02", "tail"])
        for size in SIZES:
            for correlation in PHIS:
                write([size, correlation, *null_row(size, correlation)])
