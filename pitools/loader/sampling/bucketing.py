"""Batches of sequences of similar length, padded to the longest that their bucket takes.

    bucket 0  │ ≤ 32 steps  │ 64 a batch │ its own order ─┐
    bucket 1  │ ≤ 64 steps  │ 32 a batch │ its own order ─┤  round r: of each bucket the batches that r + 1 times
    bucket 2  │ ≤ 128 steps │ 16 a batch │ its own order ─┘  all its sequences fill, less those before; shuffled

All batches are full: what a round leaves of a bucket begins its next batch. So every sequence comes equally often, to
one, and where a batch begins is computed from the sizes of the buckets alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pitools.core.errors import ConfigError
from pitools.loader.sampling import gather
from pitools.loader.sampling.instructions import InstructionTable
from pitools.loader.sampling.protocol import Buffers, DrawnSamples, Field, make_field, require_within_episodes
from pitools.loader.sampling.sequences import Sequences
from pitools.loader.sampling.shuffle import Indices, ShuffledOrder
from pitools.store.reader.version_reader import VersionReader


class _Bucket(NamedTuple):
    """length: that its sequences are padded to. size: of its batches. sequences: (n,) numbers of its sequences."""

    length: int
    size: int
    sequences: Indices
    order: ShuffledOrder


class _Round(NamedTuple):
    """The batches of one round, in their order. first: number of the first. first_positions: (m + 1,) first positions.

    bucket, number: (m,) which batch of which bucket.
    """

    first: int
    first_positions: Indices
    bucket: Indices
    number: Indices


class BucketedSamples:
    """Sequences in batches of similar length; `fields` are those of the longest."""

    def __init__(
        self,
        arrays: VersionReader,
        names: Sequence[str],
        sequences: Sequences,
        edges: Sequence[int],
        *,
        steps: int = 0,
        batch_size: int = 0,
        multiple: int = 8,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        """edges: greatest lengths of the buckets, ascending; see `quantiles`. steps: at most in a batch, padding
        counted; or batch_size: of each. multiple: batch sizes are multiples of it, so that ranks share evenly.

        Raises ConfigError for edges and sizes that do not suit, UsageError, DataError.
        """
        lengths = sequences.lengths
        require_within_episodes(arrays, *sequences[:3])
        _check(lengths, edges, steps, batch_size, multiple)
        self.description, self._arrays, self._sequences = str(arrays.path), arrays, sequences
        self._instructions = InstructionTable(arrays)
        self.identity = {
            "dataset": arrays.version,
            "sequences": sequences.identity,
            "edges": " ".join(map(str, edges)),
            "steps": str(steps),
            "batch_size": str(batch_size),
            "multiple": str(multiple),
            "seed": str(seed),
            "shuffle": str(shuffle),
        }
        of = np.searchsorted(np.asarray(edges), lengths)
        self._order = ShuffledOrder(dataset=f"{arrays.version} buckets", samples=1, seed=seed, shuffle=shuffle)
        self._buckets = [
            _Bucket(
                edge,
                batch_size or steps // edge // multiple * multiple,
                which,
                ShuffledOrder(
                    dataset=f"{arrays.version} bucket {number}", samples=len(which), seed=seed, shuffle=shuffle
                ),
            )
            for number, edge in enumerate(edges)
            if len(which := np.flatnonzero(of == number))
        ]
        self.planned_batch_size = min(bucket.size for bucket in self._buckets)
        self.fields = {name: make_field(arrays, name, self._buckets[-1].length) for name in names}
        self._kept: dict[int, _Round] = {}

    @property
    def fill(self) -> float:
        """Part of the batches' steps that is no padding."""
        padded = sum(len(bucket.sequences) * bucket.length for bucket in self._buckets)
        return float(self._sequences.lengths.sum()) / padded

    def batch_at(self, position: int, batch_size: int = 0) -> tuple[int, int]:
        """As `Samples.batch_at`: as planned. Raises ConfigError for a position where none begins."""
        found, at = self._find(position)
        if found.first_positions[at] != position:
            raise ConfigError(f"no batch begins at position {position}", where="position")
        return found.first + at, int(found.first_positions[at + 1] - position)

    def draw(self, positions: Indices) -> DrawnSamples:
        """As `Samples.draw`; a sample is a sequence. Raises ValueError for positions of more than one batch."""
        found, at = self._find(int(positions[0]))
        if not found.first_positions[at] <= positions.min() <= positions.max() < found.first_positions[at + 1]:
            raise ValueError(f"positions {positions.min()} to {positions.max()} are of more than one batch")
        bucket = self._buckets[found.bucket[at]]
        places = positions - found.first_positions[at] + found.number[at] * bucket.size
        which = bucket.sequences[bucket.order.samples_at(places)]
        return DrawnSamples(which, self._order.keys_at(positions), self._fields(bucket.length), which)

    def read(self, drawn: DrawnSamples, low: int, high: int, buffers: Buffers, rows: Indices | None = None) -> None:
        """As `Samples.read`; padding is zeros."""
        which = drawn.samples[low:high]
        starts, stops = self._sequences.start[which].tolist(), self._sequences.stop[which].tolist()
        to = range(low, high) if rows is None else rows[low:high].tolist()
        for name in self.fields:
            for row, start, stop in zip(to, starts, stops, strict=True):
                out = buffers[name][row]
                gather.gather_run(self._arrays, name, out[: stop - start], start)
                out[stop - start :] = 0

    def valid_mask(self, drawn: DrawnSamples) -> dict[str, NDArray[np.bool_]]:
        """As `Samples.valid_mask`; one mask, the same for all arrays."""
        length = next(iter(drawn.fields.values())).shape[0]
        return dict.fromkeys(self.fields, np.arange(length) < self._sequences.lengths[drawn.samples][:, None])

    def extras(self, drawn: DrawnSamples) -> dict[str, NDArray[Any]]:
        """`episode`, `instruction` (its number in `instructions`, -1 for none) and `length` of each sequence: (n,)."""
        episode = self._sequences.episode[drawn.samples]
        return {
            "episode": episode,
            "instruction": self._instructions.indices_of(episode),
            "length": self._sequences.lengths[drawn.samples],
        }

    @property
    def instructions(self) -> tuple[str, ...]:
        """The distinct instructions of the dataset's episodes."""
        return self._instructions.texts

    def _fields(self, length: int) -> dict[str, Field]:
        return {name: Field((length, *field.shape[1:]), field.dtype) for name, field in self.fields.items()}

    def _find(self, position: int) -> tuple[_Round, int]:
        """The round that a position is in, and which of its batches."""
        if position < 0:
            raise ValueError("a position below 0")
        number = position // sum(len(bucket.sequences) for bucket in self._buckets)
        while self._before(number + 1)[1] <= position:  # seldom more than once: a round is short of a batch a bucket
            number += 1
        found = self._round(number)
        return found, int(np.searchsorted(found.first_positions, position, "right")) - 1

    def _before(self, number: int) -> tuple[int, int]:
        """Batches and samples of all rounds before this one."""
        counts = [number * len(bucket.sequences) // bucket.size for bucket in self._buckets]
        return sum(counts), sum(count * bucket.size for count, bucket in zip(counts, self._buckets, strict=True))

    def _round(self, number: int) -> _Round:
        found = self._kept.get(number)
        if found is None:
            found = self._make_round(number)
            self._kept = {**{other: self._kept[other] for other in list(self._kept)[-1:]}, number: found}
        return found

    def _make_round(self, number: int) -> _Round:
        ranges = [
            np.arange(
                number * len(bucket.sequences) // bucket.size, (number + 1) * len(bucket.sequences) // bucket.size
            )
            for bucket in self._buckets
        ]
        of = np.repeat(np.arange(len(ranges)), [len(numbers) for numbers in ranges])
        numbers, first = np.concatenate(ranges), self._before(number)
        order = ShuffledOrder(
            dataset=self._order.dataset, samples=len(of), seed=self._order.seed, shuffle=self._order.shuffle
        )
        turn = order.samples_at(np.arange(len(of)) + number * len(of)) if len(of) else of
        sizes = np.array([bucket.size for bucket in self._buckets])[of[turn]]
        return _Round(first[0], first[1] + np.concatenate([[0], np.cumsum(sizes)]), of[turn], numbers[turn])


def quantile_edges(lengths: Indices, buckets: int) -> list[int]:
    """Edges of at most so many buckets that hold about equally many sequences; the last is the greatest length."""
    cuts = np.quantile(lengths, np.linspace(0, 1, buckets + 1)[1:], method="higher")
    return [int(edge) for edge in np.unique(cuts)]


def _check(lengths: Indices, edges: Sequence[int], steps: int, batch_size: int, multiple: int) -> None:
    if not lengths.size:
        raise ConfigError("there is no sequence to put in buckets", where="episodes")
    if not edges or edges[0] < 1 or any(low >= high for low, high in pairwise(edges)):
        raise ConfigError(f"edges {list(edges)} do not ascend from 1", where="edges")
    if int(lengths.max()) > edges[-1]:
        what = f"a sequence has {int(lengths.max())} steps, the last bucket's edge is {edges[-1]}"
        raise ConfigError(what, where="edges", hint="add an edge, or cut long episodes: see `sequences`")
    if multiple < 1 or bool(steps) == bool(batch_size) or batch_size % multiple:
        what = f"steps={steps}, batch_size={batch_size}, multiple={multiple}"
        raise ConfigError(what, where="batch_size", hint="give steps or batch_size, which must be a multiple")
    if steps and steps < edges[-1] * multiple:
        what = f"{steps} steps do not hold {multiple} sequences of {edges[-1]}"
        raise ConfigError(what, where="steps", hint=f"{edges[-1] * multiple} do; or take a smaller multiple")
