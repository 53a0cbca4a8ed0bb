"""A published or staged dataset, or a part of one, as NumPy arrays, loud where Zarr alone would read zeros."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pitools.dataset.formats.model import RESERVED
from pitools.dataset.versions import check_complete, describe
from pitools.store.manifest import ArraySchema
from pitools.store.reader.version_reader import Arrays
from pitools.store.resolve import find

RESIDENT_BYTES = 256 << 20


class Dataset:
    """One version, open for reading. `name` below is an array's, such as `action` or `obs/agentview_image`.

    version: its record. arrays: schema by name, the `episode_*` arrays left out. Of a subset, steps keep the numbers
    they have in the whole version, and those that were left out are refused: `manifest.runs(name)` says which are here.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.version, self.manifest = describe(path)
        check_complete(path, self.manifest)
        self.arrays: dict[str, ArraySchema] = {
            name: schema for name, schema in self.manifest.arrays.items() if not name.startswith(RESERVED)
        }
        self._store = Arrays(path, resident_bytes=RESIDENT_BYTES)

    @property
    def episode_offsets(self) -> NDArray[np.int64]:
        """(episodes + 1,): episode i is steps [offsets[i], offsets[i + 1])."""
        return self._store.offsets

    @cached_property
    def episodes(self) -> list[dict[str, Any]]:
        """What the recording says of each episode: name, source, steps, language, attributes."""
        text = self.read("episode_json", 0, self.manifest.arrays["episode_json"].shape[0]).tobytes()
        return [json.loads(line) for line in text.split(b"\n")[:-1]]

    @property
    def language(self) -> list[str]:
        """The instruction of each episode, "" where it has none."""
        return [episode["language"] for episode in self.episodes]

    @cached_property
    def splits(self) -> dict[str, list[int]]:
        """Numbers of the episodes of each split, such as `train` and `valid`."""
        return dict(self._store.attributes["splits"])

    def read(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Steps [start, stop): (stop - start, *row). Raises IndexError, and DataError for damage."""
        return self._store.read(name, start, stop)

    def take(self, name: str, indices: Sequence[int] | NDArray[np.integer[Any]]) -> NDArray[Any]:
        """The steps at these indices, in their order, repeats allowed: (len(indices), *row). Raises as `read`.

        An array of up to 256 MiB is read once and kept; of a larger one, runs of neighbouring chunks are read.
        """
        known = self._store.array(name)
        wanted = np.asarray(indices, np.int64)
        self._check_range(name, wanted)
        if (held := self._store.resident(name)) is not None:
            return held[wanted]
        out = np.empty((len(wanted), *known.shape[1:]), self._store.dtype(name))
        order = np.argsort(wanted, kind="stable")
        for run in _runs(wanted[order]):
            at = order[run]
            low = int(wanted[at[0]])
            out[at] = self._store.read(name, low, int(wanted[at[-1]]) + 1)[wanted[at] - low]
        return out

    def _check_range(self, name: str, wanted: NDArray[np.int64]) -> None:
        steps = self._store.array(name).shape[0]
        first, last = (int(np.min(wanted)), int(np.max(wanted))) if wanted.size else (0, -1)
        if first < 0 or last >= steps:
            raise IndexError(f"steps {first} to {last} of {name}, which has {steps}")


def open_dataset(where: Path | str) -> Dataset:
    """Open one version: its folder, `ROOT/NAME`, `ROOT/NAME@TAG`, or the first digits of it.

    Raises UsageError for a tag or digits that fit none, DataError for what is no dataset, and when a file is missing or
    has another size.
    """
    return Dataset(find(where) or Path(where))


def _runs(ordered: NDArray[np.int64]) -> Iterator[slice]:
    """Slices of sorted indices that follow each other without a gap."""
    cuts = [0, *(np.flatnonzero(np.diff(ordered) > 1) + 1).tolist(), len(ordered)]
    yield from (slice(a, b) for a, b in pairwise(cuts) if a < b)
