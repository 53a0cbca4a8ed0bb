"""Read a published or staged version as NumPy arrays; missing chunks are errors, where Zarr alone reads zeros."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pitools.dataset.versions import check_complete, describe_version
from pitools.store.manifest import EPISODE_PREFIX, ArraySchema
from pitools.store.reader.version_reader import VersionReader
from pitools.store.resolve import find_version

RESIDENT_BYTES = 256 << 20


class DatasetReader:
    """One version, open for reading. `name` is an array's, such as `action` or `obs/agentview_image`.

    version: its record. arrays: schema by name, without `episode_*`. In a subset, steps keep the numbers of the whole
    version, and missing ones are refused: `manifest.present_ranges(name)` lists those present.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.version, self.manifest = describe_version(path)
        check_complete(path, self.manifest)
        self.arrays: dict[str, ArraySchema] = {
            name: schema for name, schema in self.manifest.arrays.items() if not name.startswith(EPISODE_PREFIX)
        }
        self._store = VersionReader(path, resident_bytes=RESIDENT_BYTES)

    @property
    def episode_offsets(self) -> NDArray[np.int64]:
        """Return (episodes + 1,): episode i is steps [offsets[i], offsets[i + 1])."""
        return self._store.offsets

    @cached_property
    def episodes(self) -> list[dict[str, Any]]:
        """Return the recorded name, recording, steps, instruction and attributes of each episode. Raises DataError."""
        return self._store.episode_records()

    @property
    def instructions(self) -> list[str]:
        """Return the instruction of each episode, "" where it has none."""
        return [episode["instruction"] for episode in self.episodes]

    @cached_property
    def splits(self) -> dict[str, list[int]]:
        """Return the episode numbers of each split, such as `train` and `valid`. Raises DataError."""
        return self._store.splits

    def read(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Return steps [start, stop): (stop - start, *row). Raises IndexError, and DataError for damage."""
        return self._store.read(name, start, stop)

    def take(self, name: str, indices: Sequence[int] | NDArray[np.integer[Any]]) -> NDArray[Any]:
        """Return the steps at these indices, in their order, repeats allowed: (len(indices), *row). Raises as `read`.

        An array of up to 256 MiB is read once and cached; from a larger one, each run of consecutive steps is one read.
        """
        metadata = self._store.metadata_of(name)
        steps = np.asarray(indices, np.int64)
        self._check_range(name, steps)
        if (resident := self._store.resident(name)) is not None:
            return resident[steps]
        out = np.empty((len(steps), *metadata.shape[1:]), self._store.dtype(name))
        order = np.argsort(steps, kind="stable")
        for run in _contiguous_slices(steps[order]):
            positions = order[run]
            low = int(steps[positions[0]])
            out[positions] = self._store.read(name, low, int(steps[positions[-1]]) + 1)[steps[positions] - low]
        return out

    def _check_range(self, name: str, indices: NDArray[np.int64]) -> None:
        steps = self._store.metadata_of(name).shape[0]
        first, last = (int(np.min(indices)), int(np.max(indices))) if indices.size else (0, -1)
        if first < 0 or last >= steps:
            raise IndexError(f"steps {first} to {last} of {name}, which has {steps}")


def open_dataset(location: Path | str) -> DatasetReader:
    """Open one version by folder, `ROOT/NAME`, `ROOT/NAME@TAG`, or its first digits.

    Raises UsageError for an unknown tag or digits, DataError for no dataset or an incomplete one.
    """
    return DatasetReader(find_version(location) or Path(location))


def _contiguous_slices(ordered: NDArray[np.int64]) -> Iterator[slice]:
    """Yield slices of sorted indices without gaps."""
    cuts = [0, *(np.flatnonzero(np.diff(ordered) > 1) + 1).tolist(), len(ordered)]
    yield from (slice(a, b) for a, b in pairwise(cuts) if a < b)
