"""Packed rows as a loader's samples: arrays, segment ids and positions of whole rows, each row once in an epoch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pitools.loader.sampling import gather
from pitools.loader.sampling.instructions import Instructions
from pitools.loader.sampling.packing import Packing
from pitools.loader.sampling.protocol import Buffers, Drawn, field_of, require_of
from pitools.loader.sampling.shuffle import Indices, Order
from pitools.store.reader.version_reader import Arrays


class _Rows(NamedTuple):
    """n rows. first: (n + 1,) the first piece of each. Of each piece: episode, first step, size, place in its row."""

    first: Indices
    episode: Indices
    start: Indices
    size: Indices
    at: Indices


class Packed:
    """Rows of several sequences each. `inside` is where a step is one; `aside` has for each step of a row

    segment: 1, 2, … of its sequence, 0 for padding. position: its number in that sequence. episode: -1 for padding.
    instruction: its number in `instructions`, -1 for none and for padding.
    """

    planned = 0

    def __init__(
        self, arrays: Arrays, names: Sequence[str], packing: Packing, *, seed: int = 0, shuffle: bool = True,
        deal: bool = True,
    ) -> None:  # fmt: skip
        """deal: each epoch, other sequences of the same lengths share a row. Raises UsageError, DataError."""
        require_of(arrays, *packing.sequences[:3])
        self.where, self.packing = str(arrays.path), packing
        self._arrays, self._deal, self._told = arrays, deal, Instructions(arrays)
        self.order = Order(dataset=arrays.version, samples=packing.rows, seed=seed, shuffle=shuffle)
        self.identity = {
            "dataset": arrays.version, "sequences": packing.identity, "length": str(packing.length),
            "seed": str(seed), "shuffle": str(shuffle), "deal": str(deal),
        }  # fmt: skip
        self.fields = {name: field_of(arrays, name, packing.length) for name in names}

    def batch(self, position: int, batch_size: int) -> tuple[int, int]:
        """As `Samples.batch`."""
        return position // batch_size, batch_size

    def at(self, positions: Indices) -> Drawn:
        """As `Samples.at`; a sample is a row."""
        rows, first = self.order.at(positions), self.packing.first
        counts = first[rows + 1] - first[rows]
        ends = np.cumsum(counts)
        begins = ends - counts
        places = np.arange(int(ends[-1]) if ends.size else 0) - np.repeat(begins - first[rows], counts)
        # A batch may end one epoch and begin the next, and each has its own deal.
        epochs = np.repeat(positions // self.packing.rows if self._deal else np.zeros_like(rows), counts)
        which = np.empty_like(places)
        for epoch in np.unique(epochs).tolist():
            which[epochs == epoch] = self.packing.dealt(epoch)[places[epochs == epoch]]
        known = self.packing.sequences
        size = known.lengths[which]
        upto = np.cumsum(size) - size
        at = upto - np.repeat(upto[begins], counts) if size.size else upto
        found = _Rows(np.concatenate([[0], ends]), known.episode[which], known.start[which], size, at)
        return Drawn(rows, self.order.keys(positions), self.fields, found)

    def read(self, drawn: Drawn, low: int, high: int, buffers: Buffers, rows: Indices | None = None) -> None:
        """As `Samples.read`; padding is zeros."""
        found: _Rows = drawn.places
        for name in self.fields:
            buffer = buffers[name]
            for number in range(low, high):
                out, end = buffer[number if rows is None else rows[number]], 0
                pieces = slice(found.first[number], found.first[number + 1])
                for start, size, at in zip(*(part[pieces].tolist() for part in found[2:]), strict=True):
                    end = at + size
                    gather.run(self._arrays, name, out[at:end], start)
                out[end:] = 0

    def inside(self, drawn: Drawn) -> dict[str, NDArray[np.bool_]]:
        """As `Samples.inside`; one mask, the same for all arrays."""
        mask = self._spread(drawn, np.ones(len(drawn.places.size), np.bool_), 0)
        return dict.fromkeys(self.fields, mask)

    def aside(self, drawn: Drawn) -> dict[str, NDArray[Any]]:
        """`segment`, `position`, `episode`, `instruction`: (n, length) each."""
        found: _Rows = drawn.places
        counts = np.diff(found.first)
        number = np.arange(1, len(found.size) + 1) - np.repeat(found.first[:-1], counts)
        position = self._spread(drawn, np.arange(int(found.size.sum())) - np.repeat(_begins(found.size), found.size), 0)
        return {
            "segment": self._spread(drawn, number.astype(np.int32), 0),
            "position": position.astype(np.int32),
            "episode": self._spread(drawn, found.episode, -1),
            "instruction": self._spread(drawn, self._told.of(found.episode), -1),
        }

    @property
    def instructions(self) -> tuple[str, ...]:
        """The distinct instructions of the dataset's episodes."""
        return self._told.texts

    def _spread(self, drawn: Drawn, values: NDArray[Any], padding: int) -> NDArray[Any]:
        """A value for each piece, or for each of its steps, as (n, length)."""
        found: _Rows = drawn.places
        out = np.full(len(drawn.samples) * self.packing.length, padding, values.dtype)
        row = np.repeat(np.arange(len(drawn.samples)), np.diff(found.first))
        steps = np.repeat(row * self.packing.length + found.at - _begins(found.size), found.size)
        steps += np.arange(len(steps))
        out[steps] = np.repeat(values, found.size) if len(values) == len(found.size) else values
        return out.reshape(-1, self.packing.length)


def _begins(sizes: Indices) -> Indices:
    found: Indices = np.cumsum(sizes) - sizes
    return found
