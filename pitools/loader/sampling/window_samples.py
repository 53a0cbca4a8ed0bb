"""Samples that are windows of one dataset."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pitools.core.errors import ConfigError
from pitools.loader.sampling import gather
from pitools.loader.sampling.instructions import InstructionTable
from pitools.loader.sampling.protocol import Buffers, DrawnSamples, Field, make_field, require_within_episodes
from pitools.loader.sampling.shuffle import Indices, ShuffledOrder
from pitools.loader.sampling.windows import WindowLocations, Windows, WindowSpan
from pitools.store.reader.version_reader import VersionReader


class WindowSamples:
    """Windows of one dataset in the computed order, each once an epoch.

    `extras`: `episode`, the episode number; `step`, the anchor's within the episode; and `instruction`, an index into
    `instructions` or -1.
    """

    planned_batch_size = 0

    def __init__(self, reader: VersionReader, windows: Windows, *, seed: int = 0, shuffle: bool = True) -> None:
        """Raises ConfigError if no window fits, UsageError for missing arrays or another version's windows,
        DataError."""
        self.description = str(reader.path)
        if not len(windows):
            raise ConfigError("windows: none (every episode is shorter than a window)", where=self.description)
        require_within_episodes(reader, *windows.episodes)
        self._reader, self._windows, self._instructions = reader, windows, InstructionTable(reader)
        self.order = ShuffledOrder(dataset=reader.version, samples=len(windows), seed=seed, shuffle=shuffle)
        self.identity = {
            "dataset": reader.version,
            "samples": str(len(windows)),
            "windows": windows.identity,
            "seed": str(seed),
            "shuffle": str(shuffle),
        }
        self.fields: dict[str, Field] = {
            name: make_field(reader, name, span.length) for name, span in windows.spans.items()
        }

    def batch_at(self, position: int, global_batch_size: int) -> tuple[int, int]:
        """As `Samples.batch_at`."""
        return position // global_batch_size, global_batch_size

    def draw(self, positions: Indices) -> DrawnSamples:
        """As `Samples.draw`."""
        samples = self.order.samples_at(positions)
        return DrawnSamples(samples, self.order.seeds_at(positions), self.fields, self._windows.locate(samples))

    def read(self, drawn: DrawnSamples, low: int, high: int, buffers: Buffers, rows: Indices | None = None) -> None:
        """As `Samples.read`."""
        part = WindowLocations(*(field[low:high] for field in drawn.locations))
        to = slice(low, high) if rows is None else rows[low:high]
        for name, span in self._windows.spans.items():
            gather.gather_windows(self._reader, name, buffers[name], to, part, span)

    def valid_mask(self, drawn: DrawnSamples) -> dict[str, NDArray[np.bool_]]:
        """As `Samples.valid_mask`."""
        return {name: _valid_mask(drawn.locations, span) for name, span in self._windows.spans.items()}

    def extras(self, drawn: DrawnSamples) -> dict[str, NDArray[Any]]:
        """Return `episode`, `step` and `instruction`, (n,) each."""
        episode, step = drawn.locations.episode, drawn.locations.anchor - drawn.locations.start
        return {"episode": episode, "step": step, "instruction": self._instructions.indices_of(episode)}

    @property
    def instructions(self) -> tuple[str, ...]:
        """The distinct instructions of the dataset's episodes."""
        return self._instructions.texts


def _valid_mask(locations: WindowLocations, span: WindowSpan) -> NDArray[np.bool_]:
    steps = locations.anchor[:, None] + np.arange(-span.before, span.after)
    return (steps >= locations.start[:, None]) & (steps < locations.stop[:, None])
