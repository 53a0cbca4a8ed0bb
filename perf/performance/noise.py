"""Noise of many kinds: constants of `pitools.perf` were chosen on some, as the benchmarks say.

Those from `volatile` on were written down before they were first tried, and nothing was changed after that.
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


def long_memory(rng: np.random.Generator, count: int, n: int, d: float = 0.3) -> np.ndarray:
    """Fractional noise of order d, whose correlation falls as a power of the distance, not as AR(1)'s."""
    weights = np.cumprod(np.r_[1.0, (np.arange(1, 200) - 1 + d) / np.arange(1, 200)])
    noise = rng.standard_normal((count, n + 199))
    summed = sum(weight * noise[:, 199 - lag : 199 - lag + n] for lag, weight in enumerate(weights))
    return np.asarray(summed) / np.sqrt((weights**2).sum())


def volatile(rng: np.random.Generator, count: int, n: int) -> np.ndarray:
    """Noise whose log-deviation is AR(1) of 0.95, with a deviation of 0.5: calm and noisy weeks."""
    level = rng.standard_normal(count)
    noise = np.empty((count, n))
    for step in range(n):
        level = 0.95 * level + np.sqrt(1 - 0.95**2) * rng.standard_normal(count)
        noise[:, step] = np.exp(0.5 * level) * rng.standard_normal(count)
    return noise


def noisier(rng: np.random.Generator, count: int, n: int) -> np.ndarray:
    """Noise that is twice as large from a random point in the second half on: another load moved in beside."""
    begin = rng.integers(n // 2, n, (count, 1))
    return rng.standard_normal((count, n)) * np.where(np.arange(n) >= begin, 2.0, 1.0)


def waves(rng: np.random.Generator, count: int, n: int, period: float, height: float) -> np.ndarray:
    """Noise on a sine of so many points a period: days, or weeks."""
    phase = rng.uniform(0, 2 * np.pi, (count, 1))
    return rng.standard_normal((count, n)) + height * np.sin(2 * np.pi * np.arange(n) / period + phase)


def walk(rng: np.random.Generator, count: int, n: int, each: float) -> np.ndarray:
    """Noise on a random walk whose steps have this deviation: software that changes a little with each commit."""
    return rng.standard_normal((count, n)) + each * rng.standard_normal((count, n)).cumsum(axis=1)


def warming(rng: np.random.Generator, count: int, n: int, height: float) -> np.ndarray:
    """Noise on an exponential approach, from so much above or below, with a third of the series as its time."""
    return rng.standard_normal((count, n)) + rng.uniform(-height, height, (count, 1)) * np.exp(-3 * np.arange(n) / n)
