"""Batch sequences of similar length, padded to the upper edge of their bucket.

    bucket 0  │ ≤ 32 steps  │ 64 a batch │ its own order ─┐
    bucket 1  │ ≤ 64 steps  │ 32 a batch │ its own order ─┤  round r: batches ⌊r·n/b⌋ … ⌊(r+1)·n/b⌋ - 1 of each
    bucket 2  │ ≤ 128 steps │ 16 a batch │ its own order ─┘  bucket (n sequences, b a batch), in shuffled order

All batches are full: the remainder of a bucket in a round starts its next batch. So the counts of any two sequences
differ by at most one, and the start of a batch is computed from the sizes of the buckets.
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
    """length: of its padded sequences. size: of its batches. sequences: (n,) numbers of its sequences."""

    length: int
    size: int
    sequences: Indices
    order: ShuffledOrder


class _Round(NamedTuple):
    """The m batches of one round, in order. first: number of the first batch. first_positions: (m + 1,) of batches.

    bucket: (m,) bucket of each batch. number: (m,) number of the batch in its bucket.
    """

    first: int
    first_positions: Indices
    bucket: Indices
    number: Indices


class BucketedSamples:
    """Sequences in batches of similar length; `fields` have the length of the last bucket."""

    def __init__(
        self,
        reader: VersionReader,
        names: Sequence[str],
        sequences: Sequences,
        edges: Sequence[int],
        *,
        max_batch_steps: int = 0,
        global_batch_size: int = 0,
        multiple: int = 8,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        """edges: maximal lengths of the buckets, ascending; see `quantile_edges`. max_batch_steps: of a batch, with
        padding; or global_batch_size: of all batches. multiple: divides every batch, so that ranks get equal parts.

        Raises ConfigError for invalid edges or sizes, UsageError, DataError.
        """
        lengths = sequences.lengths
        require_within_episodes(reader, *sequences[:3])
        _check(lengths, edges, max_batch_steps, global_batch_size, multiple)
        self.description, self._reader, self._sequences = str(reader.path), reader, sequences
        self._instructions = InstructionTable(reader)
        self.identity = {
            "dataset": reader.version,
            "sequences": sequences.identity,
            "edges": " ".join(map(str, edges)),
            "max_batch_steps": str(max_batch_steps),
            "global_batch_size": str(global_batch_size),
            "multiple": str(multiple),
            "seed": str(seed),
            "shuffle": str(shuffle),
        }
        bucket_of = np.searchsorted(np.asarray(edges), lengths)
        self._order = ShuffledOrder(dataset=f"{reader.version} buckets", samples=1, seed=seed, shuffle=shuffle)
        self._buckets = [
            _Bucket(
                edge,
                global_batch_size or max_batch_steps // edge // multiple * multiple,
                members,
                ShuffledOrder(
                    dataset=f"{reader.version} bucket {number}", samples=len(members), seed=seed, shuffle=shuffle
                ),
            )
            for number, edge in enumerate(edges)
            if len(members := np.flatnonzero(bucket_of == number))
        ]
        self.planned_batch_size = min(bucket.size for bucket in self._buckets)
        self.fields = {name: make_field(reader, name, self._buckets[-1].length) for name in names}
        self._rounds: dict[int, _Round] = {}

    @property
    def fill(self) -> float:
        """Return the fraction of the batches' steps that is not padding."""
        padded = sum(len(bucket.sequences) * bucket.length for bucket in self._buckets)
        return float(self._sequences.lengths.sum()) / padded

    def batch_at(self, position: int, global_batch_size: int = 0) -> tuple[int, int]:
        """As `Samples.batch_at`. Raises ConfigError for a position that is not the start of a batch."""
        round_, index = self._locate(position)
        if round_.first_positions[index] != position:
            raise ConfigError(f"position {position}: not the start of a batch", where="position")
        return round_.first + index, int(round_.first_positions[index + 1] - position)

    def draw(self, positions: Indices) -> DrawnSamples:
        """As `Samples.draw`; a sample is a sequence. Raises ValueError for positions of more than one batch."""
        round_, index = self._locate(int(positions[0]))
        if not round_.first_positions[index] <= positions.min() <= positions.max() < round_.first_positions[index + 1]:
            raise ValueError(f"positions {positions.min()} to {positions.max()}: not of a single batch")
        bucket = self._buckets[round_.bucket[index]]
        slots = positions - round_.first_positions[index] + round_.number[index] * bucket.size
        sequences = bucket.sequences[bucket.order.samples_at(slots)]
        return DrawnSamples(sequences, self._order.seeds_at(positions), self._fields(bucket.length), sequences)

    def read(self, drawn: DrawnSamples, low: int, high: int, buffers: Buffers, rows: Indices | None = None) -> None:
        """As `Samples.read`; padding is zeros."""
        sequences = drawn.sample_indices[low:high]
        starts, stops = self._sequences.start[sequences].tolist(), self._sequences.stop[sequences].tolist()
        targets = range(low, high) if rows is None else rows[low:high].tolist()
        for name in self.fields:
            for row, start, stop in zip(targets, starts, stops, strict=True):
                out = buffers[name][row]
                gather.gather_run(self._reader, name, out[: stop - start], start)
                out[stop - start :] = 0

    def valid_mask(self, drawn: DrawnSamples) -> dict[str, NDArray[np.bool_]]:
        """As `Samples.valid_mask`; one mask, the same for all arrays."""
        length = next(iter(drawn.fields.values())).shape[0]
        return dict.fromkeys(self.fields, np.arange(length) < self._sequences.lengths[drawn.sample_indices][:, None])

    def extras(self, drawn: DrawnSamples) -> dict[str, NDArray[Any]]:
        """Return `episode`, `instruction` (index into `instructions`, -1 for none) and `length`, (n,) each."""
        episode = self._sequences.episode[drawn.sample_indices]
        return {
            "episode": episode,
            "instruction": self._instructions.indices_of(episode),
            "length": self._sequences.lengths[drawn.sample_indices],
        }

    @property
    def instructions(self) -> tuple[str, ...]:
        """The distinct instructions of the dataset's episodes."""
        return self._instructions.texts

    def _fields(self, length: int) -> dict[str, Field]:
        return {name: Field((length, *field.shape[1:]), field.dtype) for name, field in self.fields.items()}

    def _locate(self, position: int) -> tuple[_Round, int]:
        """Return the round of a position, and the index of its batch in the round."""
        if position < 0:
            raise ValueError(f"position: below 0: {position}")
        number = position // sum(len(bucket.sequences) for bucket in self._buckets)
        while self._counts_before(number + 1)[1] <= position:  # seldom twice: a round lacks at most a batch a bucket
            number += 1
        round_ = self._get_round(number)
        return round_, int(np.searchsorted(round_.first_positions, position, "right")) - 1

    def _counts_before(self, number: int) -> tuple[int, int]:
        """Return the counts of batches and of samples in all rounds before this one."""
        counts = [number * len(bucket.sequences) // bucket.size for bucket in self._buckets]
        return sum(counts), sum(count * bucket.size for count, bucket in zip(counts, self._buckets, strict=True))

    def _get_round(self, number: int) -> _Round:
        round_ = self._rounds.get(number)
        if round_ is None:
            round_ = self._make_round(number)
            self._rounds = {**{key: self._rounds[key] for key in list(self._rounds)[-1:]}, number: round_}
        return round_

    def _make_round(self, number: int) -> _Round:
        ranges = [
            np.arange(
                number * len(bucket.sequences) // bucket.size, (number + 1) * len(bucket.sequences) // bucket.size
            )
            for bucket in self._buckets
        ]
        bucket_of = np.repeat(np.arange(len(ranges)), [len(numbers) for numbers in ranges])
        numbers, first = np.concatenate(ranges), self._counts_before(number)
        order = ShuffledOrder(
            dataset=self._order.dataset, samples=len(bucket_of), seed=self._order.seed, shuffle=self._order.shuffle
        )
        turn = order.samples_at(np.arange(len(bucket_of)) + number * len(bucket_of)) if len(bucket_of) else bucket_of
        sizes = np.array([bucket.size for bucket in self._buckets])[bucket_of[turn]]
        return _Round(first[0], first[1] + np.concatenate([[0], np.cumsum(sizes)]), bucket_of[turn], numbers[turn])


def quantile_edges(lengths: Indices, buckets: int) -> list[int]:
    """Return the edges of at most `buckets` buckets with about equal counts; the last is the maximal length."""
    cuts = np.quantile(lengths, np.linspace(0, 1, buckets + 1)[1:], method="higher")
    return [int(edge) for edge in np.unique(cuts)]


def _check(lengths: Indices, edges: Sequence[int], max_batch_steps: int, global_batch_size: int, multiple: int) -> None:
    if not lengths.size:
        raise ConfigError("sequences: none to put in buckets", where="episodes")
    if not edges or edges[0] < 1 or any(low >= high for low, high in pairwise(edges)):
        raise ConfigError(f"edges: expected ascending numbers from 1, got {list(edges)}", where="edges")
    if int(lengths.max()) > edges[-1]:
        message = f"sequence: longer than the last edge (expected at most {edges[-1]} steps, got {int(lengths.max())})"
        raise ConfigError(message, where="edges", hint="add an edge, or cut long episodes: see `cut_sequences`")
    if multiple < 1 or bool(max_batch_steps) == bool(global_batch_size) or global_batch_size % multiple:
        message = "batch size: expected max_batch_steps or global_batch_size, and a multiple of `multiple`, "
        message += f"got max_batch_steps={max_batch_steps}, global_batch_size={global_batch_size}, multiple={multiple}"
        raise ConfigError(message, where="global_batch_size")
    if max_batch_steps and max_batch_steps < edges[-1] * multiple:
        message = f"max_batch_steps={max_batch_steps}: too few for {multiple} sequences of {edges[-1]} "
        message += f"(expected {edges[-1] * multiple})"
        raise ConfigError(message, where="max_batch_steps", hint="increase it, or choose a smaller multiple")
