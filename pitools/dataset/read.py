"""A published or staged dataset, or a part of one, as NumPy arrays, loud where Zarr alone would read zeros."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray

from pitools.core.errors import DataError
from pitools.dataset import catalog
from pitools.dataset.grid import shard_path
from pitools.dataset.recording import RESERVED
from pitools.store.manifest import ArraySchema

RESIDENT_BYTES = 256 << 20


class Dataset:
    """One version, open for reading. `name` below is an array's, such as `action` or `obs/agentview_image`.

    version: its record. arrays: schema by name, the `episode_*` arrays left out. Of a subset, steps keep the numbers
    they have in the whole version, and those that were left out are refused: `manifest.runs(name)` says which are here.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.version, self.manifest = catalog.describe(path)
        catalog.check_complete(path, self.manifest)
        self.arrays: dict[str, ArraySchema] = {
            name: schema for name, schema in self.manifest.arrays.items() if not name.startswith(RESERVED)
        }
        self._open: dict[str, Any] = {}
        self._resident: dict[str, NDArray[Any]] = {}

    @cached_property
    def episode_offsets(self) -> NDArray[np.int64]:
        """(episodes + 1,): episode i is steps [offsets[i], offsets[i + 1])."""
        return self.read("episode_offsets", 0, self.manifest.episodes + 1)

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
        return dict(zarr.open_group(self.path, mode="r", zarr_format=3).attrs["splits"])

    def read(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Steps [start, stop): (stop - start, *row). Raises IndexError, and DataError for damage."""
        array = self._array(name)
        if not 0 <= start <= stop <= array.shape[0]:
            raise IndexError(f"steps [{start}, {stop}) of {name}, which has {array.shape[0]}")
        runs = self.manifest.runs(name)
        at = bisect_right(runs, start, key=lambda run: run[0]) - 1
        if start < stop and (at < 0 or stop > runs[at][1]):
            raise self._left_out(name, f"[{start}, {stop})")
        return self._read(name, start, stop)

    def _read(self, name: str, start: int, stop: int) -> NDArray[Any]:
        array = self._array(name)
        # A shard lost since the opening, as by an eviction, would read as zeros.
        for index in range(start // array.shards[0], -(-stop // array.shards[0])) if start < stop else ():
            if not (self.path / shard_path(name, index, array.ndim)).exists():
                raise DataError(f"shard {index} of {name} is missing", where=str(self.path), hint="stage it again")
        try:
            return np.asarray(array[start:stop])
        except (ValueError, RuntimeError, OSError) as error:
            raise DataError(
                f"steps [{start}, {stop}) of {name} are damaged: {error}", where=str(self.path), hint="stage it again"
            ) from error

    def take(self, name: str, indices: Sequence[int] | NDArray[np.integer[Any]]) -> NDArray[Any]:
        """The steps at these indices, in their order, repeats allowed: (len(indices), *row). Raises as `read`.

        An array of up to 256 MiB is read once and kept; of a larger one, runs of neighbouring chunks are read.
        """
        array = self._array(name)
        wanted = np.asarray(indices, np.int64)
        _check_range(name, wanted, array.shape[0])
        places = self._places(name, wanted)
        if array.nbytes <= RESIDENT_BYTES:
            if name not in self._resident:
                parts = [self._read(name, *run) for run in self.manifest.runs(name)]
                self._resident[name] = np.concatenate(parts) if len(parts) > 1 else parts[0]
            return self._resident[name][places]
        out = np.empty((len(wanted), *array.shape[1:]), array.dtype)
        order = np.argsort(wanted, kind="stable")
        for run in _runs(wanted[order], array.chunks[0]):
            at = order[run]
            low = int(wanted[at[0]])
            # Steps between two that are here may have been left out, but each chunk read holds one that is here.
            out[at] = self._read(name, low, int(wanted[at[-1]]) + 1)[wanted[at] - low]
        return out

    def _places(self, name: str, wanted: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where these steps are among those that are here. Raises IndexError for one that was left out."""
        if not self.manifest.subset:
            return wanted
        starts, stops = np.array(self.manifest.runs(name), np.int64).T
        run = np.searchsorted(starts, wanted, "right") - 1
        if (absent := (run < 0) | (wanted >= stops[run])).any():
            raise self._left_out(name, str(wanted[absent][0]))
        shift: NDArray[np.int64] = np.cumsum(stops - starts) - stops  # minus the steps left out before each run
        return wanted + shift[run]

    def _left_out(self, name: str, steps: str) -> IndexError:
        runs = self.manifest.runs(name)
        here = ", ".join(f"{start}:{stop}" for start, stop in runs[:8]) + (", …" if len(runs) > 8 else "")
        return IndexError(f"steps {steps} of {name} were left out of this subset, which has {here}")

    def _array(self, name: str) -> Any:
        if name not in self._open:
            if name not in self.manifest.arrays:
                raise KeyError(f"no array {name}; there are {', '.join(self.arrays)}")
            self._open[name] = zarr.open_array(self.path / name, mode="r", zarr_format=3)
        return self._open[name]


def open_dataset(path: Path) -> Dataset:
    """Open the folder of one version. Raises DataError when it is not one, or a file is missing or has another size."""
    return Dataset(path)


def _check_range(name: str, wanted: NDArray[np.int64], steps: int) -> None:
    first, last = (int(np.min(wanted)), int(np.max(wanted))) if wanted.size else (0, -1)
    if first < 0 or last >= steps:
        raise IndexError(f"steps {first} to {last} of {name}, which has {steps}")


def _runs(ordered: NDArray[np.int64], chunk: int) -> Iterator[slice]:
    """Slices of sorted indices whose chunks are the same or neighbours: one read each wastes no chunk."""
    numbers = ordered // chunk
    cuts = [0, *(np.flatnonzero(np.diff(numbers) > 1) + 1).tolist(), len(ordered)]
    yield from (slice(a, b) for a, b in pairwise(cuts) if a < b)
