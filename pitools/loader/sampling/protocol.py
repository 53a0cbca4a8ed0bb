"""What a loader needs of its samples: which one comes at which position, and how to read it into a buffer.

    positions ──draw──▶ DrawnSamples: numbers, keys, places ──read, by threads──▶ rows of the buffers
                                                   ──valid_mask, extras──▶ small arrays that need no reading

One loop serves windows of one dataset (`WindowSamples`), several datasets (`MixtureSamples`), packs (`PackedSamples`)
and buckets (`BucketedSamples`). A position is a number in an endless sequence, the same for every rank; how the
sequence is cut into global batches is the caller's choice, but for buckets, where it is part of the plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from pitools.core.errors import ConfigError, UsageError
from pitools.loader.sampling import gather
from pitools.loader.sampling.instructions import InstructionTable
from pitools.loader.sampling.shuffle import Indices, Keys, ShuffledOrder
from pitools.loader.sampling.windows import WindowLocations, Windows, WindowSpan
from pitools.store.reader.version_reader import VersionReader

Buffers = Mapping[str, NDArray[Any]]


class Field(NamedTuple):
    """One array of a batch: shape of one sample, (length, *row), and type of its items."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def make_field(arrays: VersionReader, name: str, length: int) -> Field:
    """What `length` steps of an array are. Raises UsageError for one that is not there or not of steps, DataError."""
    known = arrays.metadata_of(name)
    if not arrays.manifest.along_steps(name):
        what = f"{name!r} is not along steps: its shape is {known.shape}, of {arrays.manifest.steps} steps"
        raise UsageError(what, where=str(arrays.path), hint="read it whole: `Arrays.read`")
    return Field((length, *known.shape[1:]), arrays.dtype(name))


def require_within_episodes(arrays: VersionReader, episode: Indices, start: Indices, stop: Indices) -> None:
    """Refuse runs of steps that are not within these episodes of this version: they would be another's steps.

    Raises UsageError, DataError.
    """
    offsets = arrays.offsets
    known = not episode.size or (episode.min() >= 0 and episode.max() < len(offsets) - 1)
    if not known or (start < offsets[episode]).any() or (stop > offsets[episode + 1]).any():
        hint = "make them of this version's `offsets`"
        raise UsageError("the windows or sequences are of another version", where=str(arrays.path), hint=hint)


class DrawnSamples(NamedTuple):
    """Samples that were drawn and are not read yet, n of them.

    samples: (n,) numbers of the samples. keys: (n,) a random number each. fields: of these samples; where the length
    is one of a batch's own (buckets), they are smaller than the largest. locations: what `read` needs to know.
    """

    samples: Indices
    keys: Keys
    fields: Mapping[str, Field]
    locations: Any


class Samples(Protocol):
    """What a loader draws from."""

    @property
    def identity(self) -> Mapping[str, str]:
        """Name → value of all that decides which sample is at which position: dataset, windows, weights, seed, …

        A state is of these samples if it has the same.
        """

    @property
    def fields(self) -> Mapping[str, Field]:
        """The arrays of a sample by name, of their largest size."""

    @property
    def description(self) -> str:
        """What to call these in errors."""

    @property
    def planned_batch_size(self) -> int:
        """The least size of a global batch where these are planned (buckets); 0 where the caller says how large."""

    def batch_at(self, position: int, batch_size: int) -> tuple[int, int]:
        """The global batch that begins at a position: its number, and how many positions it takes.

        batch_size: the caller's; where batches are planned it does not matter.
        """

    def draw(self, positions: Indices) -> DrawnSamples:
        """The samples at (n,) positions of one global batch. Pure, and no slower for more samples."""

    def read(self, drawn: DrawnSamples, low: int, high: int, buffers: Buffers, rows: Indices | None = None) -> None:
        """Read samples [low, high) into the buffers, by name: sample i into row i, or, of a mixture, into rows[i].

        A buffer is (n, *field.shape), C-contiguous. Threads read different samples at once. Raises DataError.
        """

    def valid_mask(self, drawn: DrawnSamples) -> dict[str, NDArray[np.bool_]]:
        """(n, length) by name: False where a step is not the sample's own; nothing where all always are."""

    def extras(self, drawn: DrawnSamples) -> dict[str, NDArray[Any]]:
        """(n, …) by name: what else is known of the samples, such as `episode`, `instruction` or `segment`."""


class WindowSamples:
    """Windows of one dataset, in the computed order: each comes once in an epoch.

    `extras` has `episode`, the number of each sample's, and `instruction`, its number in `instructions`, -1 for none.
    """

    planned_batch_size = 0

    def __init__(self, arrays: VersionReader, windows: Windows, *, seed: int = 0, shuffle: bool = True) -> None:
        """Raises ConfigError where no window fits, UsageError for arrays or windows that are not its own, DataError."""
        self.description = str(arrays.path)
        if not len(windows):
            raise ConfigError("no episode is long enough for a window", where=self.description)
        require_within_episodes(arrays, *windows.episodes)
        self._arrays, self._windows, self._instructions = arrays, windows, InstructionTable(arrays)
        self.order = ShuffledOrder(dataset=arrays.version, samples=len(windows), seed=seed, shuffle=shuffle)
        self.identity = {
            "dataset": arrays.version,
            "samples": str(len(windows)),
            "windows": windows.identity,
            "seed": str(seed),
            "shuffle": str(shuffle),
        }
        self.fields: dict[str, Field] = {
            name: make_field(arrays, name, span.length) for name, span in windows.spans.items()
        }

    def batch_at(self, position: int, batch_size: int) -> tuple[int, int]:
        """As `Samples.batch_at`."""
        return position // batch_size, batch_size

    def draw(self, positions: Indices) -> DrawnSamples:
        """As `Samples.draw`."""
        samples = self.order.samples_at(positions)
        return DrawnSamples(samples, self.order.keys_at(positions), self.fields, self._windows.locate(samples))

    def read(self, drawn: DrawnSamples, low: int, high: int, buffers: Buffers, rows: Indices | None = None) -> None:
        """As `Samples.read`."""
        part = WindowLocations(*(field[low:high] for field in drawn.locations))
        to = slice(low, high) if rows is None else rows[low:high]
        for name, span in self._windows.spans.items():
            gather.gather_windows(self._arrays, name, buffers[name], to, part, span)

    def valid_mask(self, drawn: DrawnSamples) -> dict[str, NDArray[np.bool_]]:
        """As `Samples.valid_mask`; only padded windows have steps that are not their own."""
        if not self._windows.pad:
            return {}
        return {name: _valid_mask(drawn.locations, span) for name, span in self._windows.spans.items()}

    def extras(self, drawn: DrawnSamples) -> dict[str, NDArray[Any]]:
        """`episode` and `instruction`: (n,)."""
        episode = drawn.locations.episode
        return {"episode": episode, "instruction": self._instructions.indices_of(episode)}

    @property
    def instructions(self) -> tuple[str, ...]:
        """The distinct instructions of the dataset's episodes."""
        return self._instructions.texts


def _valid_mask(place: WindowLocations, span: WindowSpan) -> NDArray[np.bool_]:
    steps = place.anchor[:, None] + np.arange(-span.before, span.after)
    return (steps >= place.start[:, None]) & (steps < place.stop[:, None])
