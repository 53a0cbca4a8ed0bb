"""The `Samples` protocol of the loader: map positions to samples, and read samples into buffers.

    positions ──draw──▶ DrawnSamples: numbers, seeds, locations ──read, by threads──▶ rows of the buffers
                                                      ──valid_mask, extras──▶ small arrays, without reads

Implemented by windows of one dataset (`WindowSamples`), several datasets (`MixtureSamples`), packed rows
(`PackedSamples`) and buckets (`BucketedSamples`). A position is an index into an endless sequence, the same on every
rank. The loader's batch size cuts the sequence into global batches, except for buckets, which plan their batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from pitools.core.errors import UsageError
from pitools.loader.sampling.shuffle import Indices, Keys
from pitools.store.reader.version_reader import VersionReader

Buffers = Mapping[str, NDArray[Any]]


class Field(NamedTuple):
    """An array of a batch. shape: of one sample, (length, *row). dtype: of its items."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def make_field(reader: VersionReader, name: str, length: int) -> Field:
    """Return the field of `length` steps of an array. Raises UsageError if it is missing or not along steps,
    DataError."""
    metadata = reader.metadata_of(name)
    if not reader.manifest.along_steps(name):
        message = f"{name!r}: not along steps (expected shape ({reader.manifest.steps}, …), got {metadata.shape})"
        raise UsageError(message, where=str(reader.path), hint="read the whole array: `VersionReader.read`")
    return Field((length, *metadata.shape[1:]), reader.dtype(name))


def require_within_episodes(reader: VersionReader, episode: Indices, start: Indices, stop: Indices) -> None:
    """Raise UsageError if a range of steps is outside its episode in this version. Raises DataError."""
    offsets = reader.offsets
    in_range = not episode.size or (episode.min() >= 0 and episode.max() < len(offsets) - 1)
    if not in_range or (start < offsets[episode]).any() or (stop > offsets[episode + 1]).any():
        hint = "construct them from this version's `offsets`"
        raise UsageError("windows or sequences: of another version", where=str(reader.path), hint=hint)


class DrawnSamples(NamedTuple):
    """n samples that are drawn but not read.

    sample_indices: (n,) numbers of the samples. sample_seeds: (n,) random numbers. fields: of these samples; in buckets
    their length depends on the batch. locations: the data for `read`; the type depends on the class of samples.
    """

    sample_indices: Indices
    sample_seeds: Keys
    fields: Mapping[str, Field]
    locations: Any


class Samples(Protocol):
    """The samples of a loader."""

    @property
    def identity(self) -> Mapping[str, str]:
        """Return all values that determine the order of samples, by name: dataset, windows, weights, seed, …

        A state can be loaded only where the identity is equal.
        """

    @property
    def fields(self) -> Mapping[str, Field]:
        """Return the arrays of a sample by name, of their maximal size."""

    @property
    def description(self) -> str:
        """Return a description for errors."""

    @property
    def planned_batch_size(self) -> int:
        """Return the least size of a planned global batch (buckets); 0 where the loader chooses the size."""

    def batch_at(self, position: int, global_batch_size: int) -> tuple[int, int]:
        """Return the number and the size of the global batch that starts at a position.

        global_batch_size: the loader's; ignored where batches are planned.
        """

    def draw(self, positions: Indices) -> DrawnSamples:
        """Return the samples at (n,) positions of one global batch. Pure; the time
        does not depend on the number of samples in the dataset.
        """

    def read(self, drawn: DrawnSamples, low: int, high: int, buffers: Buffers, rows: Indices | None = None) -> None:
        """Read samples [low, high) into the buffers, by name: sample i into row i, or in a mixture into rows[i].

        A buffer is (n, *field.shape), C-contiguous. Threads read different samples concurrently. Raises DataError.
        """

    def valid_mask(self, drawn: DrawnSamples) -> dict[str, NDArray[np.bool_]]:
        """Return (n, length) masks by name, False at padded steps; empty where samples are never padded."""

    def extras(self, drawn: DrawnSamples) -> dict[str, NDArray[Any]]:
        """Return (n, …) metadata of the samples by name, such as `episode`, `instruction` or `segment`."""
