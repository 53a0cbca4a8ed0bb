"""Noise that the constants of `pitools.perf` were not chosen on: it was written down first, and nothing changed after.

Each function returns healthy series around 0, (count, n), a standard deviation of about 1 to be scaled by the caller.
"""

from __future__ import annotations

import numpy as np


def garch(rng: np.random.Generator, count: int, n: int) -> np.ndarray:
    """Calm and noisy times: a variance that follows its last values and squares, GARCH(1, 1) of 0.15 and 0.8."""
    noise = rng.standard_normal((count, n + 50))
    variance = np.ones(count)
    for step in range(n + 50):
        noise[:, step] *= np.sqrt(variance)
        variance = 0.05 + 0.15 * noise[:, step] ** 2 + 0.8 * variance
    return noise[:, 50:]


def growing(rng: np.random.Generator, count: int, n: int) -> np.ndarray:
    """Noise whose deviation grows from 0.5 to 2."""
    return np.linspace(0.5, 2.0, n) * rng.standard_normal((count, n))


def periodic(rng: np.random.Generator, count: int, n: int, every: int, height: float) -> np.ndarray:
    """Noise, and each so many points a higher one, from a random one on: garbage collection, or weekends."""
    begin = rng.integers(0, every, (count, 1))
    return rng.standard_normal((count, n)) + height * ((np.arange(n) + begin) % every == 0)


def drift(rng: np.random.Generator, count: int, n: int, most: float) -> np.ndarray:
    """Noise on a straight line that rises or falls by at most so much from the first point to the last."""
    return rng.standard_normal((count, n)) + rng.uniform(-most, most, (count, 1)) * np.linspace(-0.5, 0.5, n)


def regimes(rng: np.random.Generator, count: int, n: int, change: float, height: float) -> np.ndarray:
    """Noise on one of two levels, from point to point changed with a probability: two kinds of nodes, or of loads."""
    level = (rng.random((count, 1)) < 0.5) ^ (np.cumsum(rng.random((count, n)) < change, axis=1) % 2 == 1)
    return rng.standard_normal((count, n)) + height * level


def long_memory(rng: np.random.Generator, count: int, n: int) -> np.ndarray:
    """Fractional noise of d = 0.3, whose correlation falls as a power of the distance, not as AR(1)'s."""
    weights = np.cumprod(np.r_[1.0, (np.arange(1, 200) - 1 + 0.3) / np.arange(1, 200)])
    noise = rng.standard_normal((count, n + 199))
    summed = sum(weight * noise[:, 199 - lag : 199 - lag + n] for lag, weight in enumerate(weights))
    return np.asarray(summed) / np.sqrt((weights**2).sum())
