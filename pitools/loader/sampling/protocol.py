"""What a loader needs of its samples: which one comes at which position, and how to read it into a buffer.

    positions ──at──▶ Drawn: numbers, keys, places ──read, by threads──▶ rows of the buffers
                                                   ──inside, aside────▶ small arrays that need no reading

One loop serves windows of one dataset (`Windowed`), several datasets (`Mixture`), packs (`Packed`) and buckets
(`Bucketed`). A position is a number in an endless sequence, the same for every rank; how the sequence is cut into
global batches is the caller's choice, but for buckets, where it is part of the plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from pitools.core.errors import ConfigError, UsageError
from pitools.loader.sampling import gather
from pitools.loader.sampling.instructions import Instructions
from pitools.loader.sampling.shuffle import Indices, Keys, Order
from pitools.loader.sampling.windows import Place, Span, Windows
from pitools.store.reader.version_reader import Arrays

Buffers = Mapping[str, NDArray[Any]]


class Field(NamedTuple):
    """One array of a batch: shape of one sample, (length, *row), and type of its items."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def field_of(arrays: Arrays, name: str, length: int) -> Field:
    """What `length` steps of an array are. Raises UsageError for one that is not there or not of steps, DataError."""
    known = arrays.array(name)
    if not arrays.manifest.along_steps(name):
        what = f"{name!r} is not along steps: its shape is {known.shape}, of {arrays.manifest.steps} steps"
        raise UsageError(what, where=str(arrays.path), hint="read it whole: `Arrays.read`")
    return Field((length, *known.shape[1:]), arrays.dtype(name))


def require_of(arrays: Arrays, episode: Indices, start: Indices, stop: Indices) -> None:
    """Refuse runs of steps that are not within these episodes of this version: they would be another's steps.

    Raises UsageError, DataError.
    """
    offsets = arrays.offsets
    known = not episode.size or (episode.min() >= 0 and episode.max() < len(offsets) - 1)
    if not known or (start < offsets[episode]).any() or (stop > offsets[episode + 1]).any():
        hint = "make them of this version's `offsets`"
        raise UsageError("the windows or sequences are of another version", where=str(arrays.path), hint=hint)


class Drawn(NamedTuple):
    """Samples that were drawn and are not read yet, n of them.

    samples: (n,) numbers of the samples. keys: (n,) a random number each. fields: of these samples; where the length
    is one of a batch's own (buckets), they are smaller than the largest. places: what `read` needs to know.
    """

    samples: Indices
    keys: Keys
    fields: Mapping[str, Field]
    places: Any


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
    def where(self) -> str:
        """What to call these in errors."""

    @property
    def planned(self) -> int:
        """The least size of a global batch where these are planned (buckets); 0 where the caller says how large."""

    def batch(self, position: int, batch_size: int) -> tuple[int, int]:
        """The global batch that begins at a position: its number, and how many positions it takes.

        batch_size: the caller's; where batches are planned it does not matter.
        """

    def at(self, positions: Indices) -> Drawn:
        """The samples at (n,) positions of one global batch. Pure, and no slower for more samples."""

    def read(self, drawn: Drawn, low: int, high: int, buffers: Buffers, rows: Indices | None = None) -> None:
        """Read samples [low, high) into the buffers, by name: sample i into row i, or, of a mixture, into rows[i].

        A buffer is (n, *field.shape), C-contiguous. Threads read different samples at once. Raises DataError.
        """

    def inside(self, drawn: Drawn) -> dict[str, NDArray[np.bool_]]:
        """(n, length) by name: False where a step is not the sample's own; nothing where all always are."""

    def aside(self, drawn: Drawn) -> dict[str, NDArray[Any]]:
        """(n, …) by name: what else is known of the samples, such as `episode`, `instruction` or `segment`."""


class Windowed:
    """Windows of one dataset, in the computed order: each comes once in an epoch.

    `aside` has `episode`, the number of each sample's, and `instruction`, its number in `instructions`, -1 for none.
    """

    planned = 0

    def __init__(self, arrays: Arrays, windows: Windows, *, seed: int = 0, shuffle: bool = True) -> None:
        """Raises ConfigError where no window fits, UsageError for arrays or windows that are not its own, DataError."""
        self.where = str(arrays.path)
        if not len(windows):
            raise ConfigError("no episode is long enough for a window", where=self.where)
        require_of(arrays, *windows.episodes)
        self._arrays, self._windows, self._told = arrays, windows, Instructions(arrays)
        self.order = Order(dataset=arrays.version, samples=len(windows), seed=seed, shuffle=shuffle)
        self.identity = {
            "dataset": arrays.version,
            "samples": str(len(windows)),
            "windows": windows.identity,
            "seed": str(seed),
            "shuffle": str(shuffle),
        }
        self.fields: dict[str, Field] = {
            name: field_of(arrays, name, span.length) for name, span in windows.spans.items()
        }

    def batch(self, position: int, batch_size: int) -> tuple[int, int]:
        """As `Samples.batch`."""
        return position // batch_size, batch_size

    def at(self, positions: Indices) -> Drawn:
        """As `Samples.at`."""
        samples = self.order.at(positions)
        return Drawn(samples, self.order.keys(positions), self.fields, self._windows.locate(samples))

    def read(self, drawn: Drawn, low: int, high: int, buffers: Buffers, rows: Indices | None = None) -> None:
        """As `Samples.read`."""
        part = Place(*(field[low:high] for field in drawn.places))
        to = slice(low, high) if rows is None else rows[low:high]
        for name, span in self._windows.spans.items():
            gather.windows(self._arrays, name, buffers[name], to, part, span)

    def inside(self, drawn: Drawn) -> dict[str, NDArray[np.bool_]]:
        """As `Samples.inside`; only padded windows have steps that are not their own."""
        if not self._windows.pad:
            return {}
        return {name: _inside(drawn.places, span) for name, span in self._windows.spans.items()}

    def aside(self, drawn: Drawn) -> dict[str, NDArray[Any]]:
        """`episode` and `instruction`: (n,)."""
        episode = drawn.places.episode
        return {"episode": episode, "instruction": self._told.of(episode)}

    @property
    def instructions(self) -> tuple[str, ...]:
        """The distinct instructions of the dataset's episodes."""
        return self._told.texts


def _inside(place: Place, span: Span) -> NDArray[np.bool_]:
    steps = place.anchor[:, None] + np.arange(-span.before, span.after)
    return (steps >= place.start[:, None]) & (steps < place.stop[:, None])
