"""Demonstrations as a loader's samples: single steps, as frames, proprioception and actions."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pitools.core.errors import DataError
from pitools.loader.sampling.episode_filter import EpisodeFilters, filter_episodes
from pitools.loader.sampling.protocol import Buffers, DrawnSamples, Field
from pitools.loader.sampling.shuffle import Indices
from pitools.loader.sampling.window_samples import WindowSamples
from pitools.loader.sampling.windows import Windows, WindowSpan
from pitools.store.reader.version_reader import VersionReader
from pitools.store.resolve import find_version

BLOCK_ROWS = 1 << 16  # rows per read for the statistics
SINGLE_STEP = WindowSpan(0, 1)
Ranges = tuple[tuple[int, int], ...]  # of steps, [start, stop)


class Normalizer(NamedTuple):
    """Mean and standard deviation of each column of an array."""

    mean: NDArray[np.float64]
    deviation: NDArray[np.float64]

    def apply(self, rows: NDArray[Any]) -> NDArray[np.float64]:
        """The rows at mean 0 and deviation 1."""
        scaled: NDArray[np.float64] = (rows - self.mean) / self.deviation
        return scaled


class DemonstrationDataset:
    """A dataset for behaviour cloning, to be given to a `Loader`; a sample is a step.

    Its arrays: each camera, (H, W, C) uint8, by the name it has in the dataset; `proprio`, (P,), all float vectors of
    `obs/`, and `action`, (A,): float32 of mean 0 and deviation 1. Its episodes: those of the split `train`, or all
    where there is no such split, but none that is in quarantine.
    """

    planned_batch_size = 0

    def __init__(self, path: Path | str, *, seed: int = 0) -> None:
        """path: a version, in a form that `pitools.store.resolve` accepts. seed: of the order of samples.

        Raises UsageError, ConfigError, and DataError for a dataset without observations or without actions.
        """
        reader = VersionReader(find_version(path) or Path(path))
        schemas = reader.manifest.arrays
        observed = {name: schema for name, schema in sorted(schemas.items()) if name.startswith("obs/")}
        self.cameras = [name for name, s in observed.items() if s.dtype == "uint8" and len(s.shape) == 4]
        self.proprio = [name for name, s in observed.items() if "float" in s.dtype and len(s.shape) == 2]
        if "action" not in schemas or not (self.cameras or self.proprio):
            hint = f"it has {', '.join(name for name in schemas if not name.startswith('episode_'))}"
            raise DataError(
                "dataset: arrays missing (expected `action`, and images or float vectors in `obs/`)",
                where=str(path),
                hint=hint,
            )
        train = EpisodeFilters(splits=("train",) if reader.attributes.get("splits", {}).get("train") else ())
        ranges = _ranges_without_quarantine(reader)
        self._normalizers = {name: make_normalizer(reader, name, ranges) for name in (*self.proprio, "action")}
        spans = dict.fromkeys((*self.cameras, *self._normalizers), SINGLE_STEP)
        self._steps = WindowSamples(reader, Windows(reader.offsets, filter_episodes(reader, train), spans), seed=seed)
        self.description, self.identity = self._steps.description, self._steps.identity
        self.fields = {name: Field(field.shape[1:], field.dtype) for name, field in self._steps.fields.items()}
        columns = sum(self.fields.pop(name).shape[0] for name in self.proprio)
        self.fields |= {"proprio": Field((columns,), np.dtype("float32"))}
        self.fields |= {"action": Field(self.fields["action"].shape, np.dtype("float32"))}

    def batch_at(self, position: int, global_batch_size: int) -> tuple[int, int]:
        """As `Samples.batch_at`."""
        return self._steps.batch_at(position, global_batch_size)

    def draw(self, positions: Indices) -> DrawnSamples:
        """As `Samples.draw`."""
        return self._steps.draw(positions)._replace(fields=self.fields)

    def read(self, drawn: DrawnSamples, low: int, high: int, buffers: Buffers, rows: Indices | None = None) -> None:
        """As `Samples.read`: frames directly into the batch, vectors by a temporary array."""
        count, fields = len(buffers["action"]), self._steps.fields
        read = {name: buffers[name][:, None] for name in self.cameras}
        read |= {name: np.empty((count, *fields[name].shape), fields[name].dtype) for name in self._normalizers}
        self._steps.read(drawn, low, high, read, rows)
        to = slice(low, high) if rows is None else rows[low:high]
        vectors = {name: normalizer.apply(read[name][to][:, 0]) for name, normalizer in self._normalizers.items()}
        buffers["action"][to] = vectors["action"]
        if self.proprio:
            buffers["proprio"][to] = np.concatenate([vectors[name] for name in self.proprio], axis=1)

    def valid_mask(self, drawn: DrawnSamples) -> dict[str, NDArray[np.bool_]]:
        """Return {}: a single step is always within its episode."""
        return {}

    def extras(self, drawn: DrawnSamples) -> dict[str, NDArray[Any]]:
        """Return {}."""
        return {}


def _ranges_without_quarantine(reader: VersionReader) -> Ranges:
    """Return the steps of the episodes that are not in quarantine; () for a version without a quarantine."""
    episodes = filter_episodes(reader)
    if len(episodes) == len(filter_episodes(reader, EpisodeFilters(quarantined=True))):
        return ()
    return tuple((int(reader.offsets[episode]), int(reader.offsets[episode + 1])) for episode in episodes)


def make_normalizer(reader: VersionReader, name: str, ranges: Ranges = ()) -> Normalizer:
    """Return the mean and deviation of a (steps, columns) array: of these steps, else the manifest's, else computed.

    A column that never changes has deviation 1.
    """
    statistics = None if ranges else (reader.manifest.statistics or {}).get(name)
    mean, deviation = (
        (np.array(statistics.mean), np.array(statistics.deviation))
        if statistics
        else compute_moments(reader, name, ranges)
    )
    return Normalizer(mean, np.where(deviation < 1e-6, 1.0, deviation))


def compute_moments(
    reader: VersionReader, name: str, ranges: Ranges = ()
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Compute mean and deviation over these steps, or all that are local, in two passes."""
    runs = ranges or reader.manifest.present_ranges(name)
    blocks = [(low, min(low + BLOCK_ROWS, stop)) for start, stop in runs for low in range(start, stop, BLOCK_ROWS)]
    steps, columns = sum(stop - start for start, stop in runs), reader.metadata_of(name).shape[1]
    mean, square = np.zeros(columns), np.zeros(columns)
    for start, stop in blocks:
        mean += reader.read(name, start, stop).sum(axis=0, dtype=np.float64) / steps
    # A second pass: the difference of two large sums would lose a small deviation about a large mean.
    for start, stop in blocks:
        square += np.square(reader.read(name, start, stop) - mean).sum(axis=0) / steps
    return mean, np.sqrt(square)
