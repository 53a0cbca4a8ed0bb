"""Collect statistics of an array of vectors, for each episode, from blocks of steps in any order."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Rows sampled from an array for its quantiles.
SAMPLE_ROWS = 100_000
NO_STEP = np.iinfo(np.int64).max
Floats = NDArray[np.float64]


class EpisodeParts:
    """The episodes within a block of consecutive steps.

    episodes: their numbers. begins: first row of each in the block. counts: rows of each.
    """

    def __init__(self, offsets: NDArray[np.int64], start: int, count: int) -> None:
        low = int(np.searchsorted(offsets, start, "right")) - 1
        high = int(np.searchsorted(offsets, start + count, "left"))
        begins = np.maximum(offsets[low:high], start) - start
        ends = np.minimum(offsets[low + 1 : high + 1], start + count) - start
        nonempty = ends > begins
        self.episodes = np.arange(low, high)[nonempty]
        self.begins, self.counts = begins[nonempty], (ends - begins)[nonempty]


class NonFiniteCounts:
    """Rows with a NaN or infinite item. count: rows of each episode. first_steps: first such step of each episode."""

    def __init__(self, episodes: int) -> None:
        self.count = np.zeros(episodes, np.int64)
        self.first_steps = np.full(episodes, NO_STEP)

    def add(self, parts: EpisodeParts, start: int, rows: NDArray[np.intp]) -> None:
        """Add non-finite rows of a block. start: first step of the block."""
        episodes = parts.episodes[np.searchsorted(parts.begins, rows, "right") - 1]
        np.add.at(self.count, episodes, 1)
        np.minimum.at(self.first_steps, episodes, start + rows)


class VectorStats:
    """One array of (steps, *row). `columns` below is the product of the row, which has `axes`; a scalar is one column.

    low, high: (episodes, columns), infinite where there is no finite value. fingerprint: (episodes,), equal for
    episodes of the same bytes. rows, mean, deviation: (columns,) of all finite values. sample: some of the rows, evenly
    spread. values: all of them, where `keep_values`, NaN where they were not seen.
    """

    def __init__(
        self, name: str, offsets: NDArray[np.int64], row: tuple[int, ...], *, keep_values: bool = False
    ) -> None:
        episodes, columns = len(offsets) - 1, int(np.prod(row, dtype=np.int64))
        self.name, self.columns, self.axes, self._offsets = name, columns, len(row), offsets
        self.low, self.high = np.full((episodes, columns), np.inf), np.full((episodes, columns), -np.inf)
        self.fingerprint = np.zeros(episodes, np.uint64)
        self.non_finite = NonFiniteCounts(episodes)
        self.rows, self.mean, self._squares = np.zeros(columns), np.zeros(columns), np.zeros(columns)
        self._stride = max(1, int(offsets[-1]) // SAMPLE_ROWS)
        self._sample: dict[int, Floats] = {}
        self.values = np.full((int(offsets[-1]), columns), np.nan) if keep_values else None
        self._keys = _mix64(np.arange(1, columns + 1, dtype=np.uint64)) | np.uint64(1)
        self._lock = threading.Lock()

    @property
    def deviation(self) -> Floats:
        """Return the standard deviation of the population, by column."""
        return np.sqrt(self._squares / np.maximum(self.rows, 1))

    @property
    def sample(self) -> Floats:
        """Return the sampled rows, (n, columns), in the order of steps; values that are not finite are NaN."""
        parts = [self._sample[start] for start in sorted(self._sample)]
        return np.concatenate(parts) if parts else np.zeros((0, self.columns))

    def add_steps(self, start: int, rows: NDArray[Any]) -> None:
        """Take in a run of steps, from any thread."""
        parts = EpisodeParts(self._offsets, start, len(rows))
        flat = rows.reshape(len(rows), self.columns)
        fingerprint = np.add.reduceat(self._row_hashes(flat, start, parts), parts.begins)
        values = flat.astype(np.float64)
        finite = np.isfinite(values)
        all_finite = bool(finite.all())
        low, high = values, values
        if not all_finite:
            low, high = np.where(finite, values, np.inf), np.where(finite, values, -np.inf)
            values = np.where(finite, values, np.nan)
        low = np.minimum.reduceat(low, parts.begins, axis=0)
        high = np.maximum.reduceat(high, parts.begins, axis=0)
        with self._lock, np.errstate(over="ignore", invalid="ignore"):
            self.fingerprint[parts.episodes] += fingerprint
            self.low[parts.episodes] = np.minimum(self.low[parts.episodes], low)
            self.high[parts.episodes] = np.maximum(self.high[parts.episodes], high)
            if not all_finite:
                self.non_finite.add(parts, start, np.flatnonzero(~finite.all(axis=1)))
            self._merge(values, finite, all_finite=all_finite)
            self._sample[start] = values[(-start) % self._stride :: self._stride].copy()
            if self.values is not None:
                self.values[start : start + len(values)] = values

    def _merge(self, values: Floats, finite: NDArray[np.bool_], *, all_finite: bool) -> None:
        """Merge these values into mean and deviation (Chan, Golub and LeVeque)."""
        count = np.full(self.columns, float(len(values))) if all_finite else finite.sum(axis=0).astype(np.float64)
        some = np.maximum(count, 1)
        mean = (values if all_finite else np.where(finite, values, 0)).sum(axis=0) / some
        away = values - mean
        if not all_finite:
            away[~finite] = 0
        both = np.maximum(self.rows + count, 1)
        shift = mean - self.mean
        self._squares += np.einsum("rc,rc->c", away, away) + shift * shift * self.rows * count / both
        self.mean += shift * count / both
        self.rows += count

    def _row_hashes(self, flat: NDArray[Any], start: int, parts: EpisodeParts) -> NDArray[np.uint64]:
        """Return a hash of each row and its place in the episode: their sum identifies the steps and their order."""
        bits = np.ascontiguousarray(flat).view(f"u{flat.dtype.itemsize}").astype(np.uint64)
        place = np.arange(start, start + len(flat)) - np.repeat(self._offsets[parts.episodes], parts.counts)
        return _mix64(bits @ self._keys + _mix64(place.astype(np.uint64)))


def _mix64(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's last step: each bit depends on all."""
    numbers = (numbers + np.uint64(0x9E3779B97F4A7C15)) & np.uint64(0xFFFFFFFFFFFFFFFF)
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
