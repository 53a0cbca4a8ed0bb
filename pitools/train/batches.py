"""Which steps of a dataset make which batch, and those steps as frames, proprioception and actions.

The order is a function of seed and step alone. Every rank computes the same global batch and reads its share of it, so
that neither a restart nor another number of ranks changes what is learnt.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pitools.core.errors import ConfigError, DataError
from pitools.dataset.read import Dataset, open_dataset

BLOCK = 1 << 16  # rows read at once for the statistics

Floats = NDArray[np.float32]
Indices = NDArray[np.int64]


class Batch(NamedTuple):
    """b steps. images: (b, H, W, C) uint8 by camera. proprio: (b, P), action: (b, A), of mean 0 and deviation 1."""

    images: dict[str, NDArray[np.uint8]]
    proprio: Floats
    action: Floats

    @property
    def nbytes(self) -> int:
        """Bytes of all its arrays."""
        return sum(image.nbytes for image in self.images.values()) + self.proprio.nbytes + self.action.nbytes


class Scale(NamedTuple):
    """Mean and standard deviation of each column of an array."""

    mean: NDArray[np.float64]
    deviation: NDArray[np.float64]

    def apply(self, rows: NDArray[Any]) -> Floats:
        """The rows at mean 0 and deviation 1."""
        return ((rows - self.mean) / self.deviation).astype(np.float32)


class Demonstrations:
    """A dataset for behaviour cloning: its cameras and proprioception in, its actions out.

    cameras: names of the uint8 images of `obs/`. proprio: names of its float vectors. indices: the steps to learn
    from: of the episodes of the split `train`, or all where there is no such split.
    """

    def __init__(self, path: Path) -> None:
        self._data = open_dataset(path)
        observed = {name: schema for name, schema in self._data.arrays.items() if name.startswith("obs/")}
        self.cameras = [name for name, s in sorted(observed.items()) if s.dtype == "uint8" and len(s.shape) == 4]
        self.proprio = [name for name, s in sorted(observed.items()) if "float" in s.dtype and len(s.shape) == 2]
        if "action" not in self._data.arrays or not (self.cameras or self.proprio):
            hint = f"it has {', '.join(self._data.arrays)}"
            raise DataError("it needs `action`, and images or float vectors in `obs/`", where=str(path), hint=hint)
        self._scales = {name: scale(self._data, name) for name in (*self.proprio, "action")}
        self.indices = _training_steps(self._data)

    def batch(self, numbers: Indices) -> Batch:
        """The steps with these numbers among `indices`, in this order. Raises DataError for damage."""
        steps = self.indices[numbers]
        vectors = {name: known.apply(self._data.take(name, steps)) for name, known in self._scales.items()}
        proprio = [vectors[name] for name in self.proprio] or [np.zeros((len(steps), 0), np.float32)]
        images = {name: self._data.take(name, steps) for name in self.cameras}
        return Batch(images, np.concatenate(proprio, axis=1), vectors["action"])


def global_batch(seed: int, step: int, batch_size: int, samples: int) -> Indices:
    """Numbers, in [0, samples), of the global batch of a step: every sample once an epoch, reshuffled each epoch."""
    positions = np.arange(step * batch_size, (step + 1) * batch_size)
    epochs = positions // samples
    return np.concatenate([_epoch(seed, int(e), samples)[positions[epochs == e] % samples] for e in np.unique(epochs)])


def share(batch: Indices, rank: int, world_size: int) -> Indices:
    """This rank's contiguous part of a global batch; parts differ by at most one sample. Raises ConfigError."""
    if len(batch) < world_size:
        raise ConfigError(f"a batch of {len(batch)} has no sample for some of {world_size} ranks", where="batch_size")
    return batch[rank * len(batch) // world_size : (rank + 1) * len(batch) // world_size]


def scale(data: Dataset, name: str) -> Scale:
    """Mean and deviation of a (steps, columns) array over all steps; a column that never changes has deviation 1."""
    steps, columns = data.arrays[name].shape
    blocks = [(start, min(start + BLOCK, steps)) for start in range(0, steps, BLOCK)]
    mean, square = np.zeros(columns), np.zeros(columns)
    for start, stop in blocks:
        mean += data.read(name, start, stop).sum(axis=0, dtype=np.float64) / steps
    # A second pass: the difference of two large sums would lose a small deviation about a large mean.
    for start, stop in blocks:
        square += np.square(data.read(name, start, stop) - mean).sum(axis=0) / steps
    deviation = np.sqrt(square)
    return Scale(mean, np.where(deviation < 1e-6, 1.0, deviation))


def _training_steps(data: Dataset) -> Indices:
    offsets = data.episode_offsets
    episodes = data.splits.get("train") or range(len(offsets) - 1)
    return np.concatenate([np.arange(offsets[i], offsets[i + 1], dtype=np.int64) for i in sorted(episodes)])


@lru_cache(maxsize=2)  # a batch can lie in two epochs
def _epoch(seed: int, epoch: int, samples: int) -> Indices:
    return np.random.default_rng((seed, epoch)).permutation(samples)
