"""Sequences of unequal length into rows of one length: which go together, planned for all of them at once.

`PackingPlan` is the plan; `PackedSamples` are its rows as a loader's samples.

    lengths ──histogram──▶ best fit, the longest first ──▶ rows of places ──ties dealt by (seed, epoch)──▶ sequences

    row 0  │ 1 1 1 1 1 1 1 1 1 1 1 1 │ 2 2 2 2 2 │ 3 3 3 0 │      segment ids; 0 is padding

Only lengths decide what fits, so lengths are packed, not sequences: the work grows with the number of different lengths
and not of sequences, and an epoch deals sequences of one length anew without being planned again.
Source: Krell et al., Efficient Sequence Packing without Cross-contamination (2021), there with another heuristic.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pitools.core.errors import ConfigError
from pitools.core.record import Record
from pitools.loader.sampling import gather
from pitools.loader.sampling.instructions import InstructionTable
from pitools.loader.sampling.protocol import Buffers, DrawnSamples, make_field, require_within_episodes
from pitools.loader.sampling.sequences import Sequences, WhenTooLong, cut_sequences
from pitools.loader.sampling.shuffle import Indices, ShuffledOrder
from pitools.store.reader.version_reader import VersionReader

# (length, how many of it) of one row, and how many such rows there are.
Group = tuple[tuple[tuple[int, int], ...], int]


class PackingReport(Record, frozen=True, kw_only=True, tag="pit.packing-report/1"):
    """What a plan comes to. episodes: that were asked for. split, dropped: of these, since longer than a row.

    sequences: that are packed. fill: part of the rows' steps that is no padding. longest: episode, in steps.
    """

    name: str
    version: str
    length: int
    window: int
    when_too_long: WhenTooLong
    episodes: int
    sequences: int
    rows: int
    steps: int
    padding_steps: int
    fill: float
    split: int
    dropped: int
    longest: int


class PackingPlan:
    """A plan: rows of `length` steps, each with a run of places for sequences. rows: how many. fill: of their steps."""

    def __init__(self, sequences: Sequences, length: int, *, seed: int = 0) -> None:
        """Raises ConfigError where there is no sequence, or one that is too long."""
        lengths = sequences.lengths
        if not lengths.size:
            raise ConfigError("there is no sequence to pack", where="episodes")
        if int(lengths.max()) > length:
            raise ConfigError(f"a sequence of {int(lengths.max())} steps in rows of {length}", where="length")
        self.sequences, self.length = sequences, length
        groups = best_fit(np.bincount(lengths, minlength=length + 1), length)
        # first: (rows + 1,) the first place of each row. _ranks: (n,) of each place, which of the sorted sequences.
        self.first, self._ranks = _places(groups, lengths, length)
        self.rows = len(self.first) - 1
        self.steps = int(lengths.sum())
        # Of the seed, too: by it sequences of one length are dealt to rows.
        self.identity = f"{sequences.identity} {seed}"
        self._order = ShuffledOrder(dataset=f"packing {sequences.identity}", samples=len(lengths), seed=seed)
        self._kept: dict[int, Indices] = {}

    @property
    def fill(self) -> float:
        """Part of the rows' steps that is no padding."""
        return self.steps / (self.rows * self.length)

    def sequences_of_epoch(self, epoch: int) -> Indices:
        """(n,) the sequence in each place, row after row: the same lengths in every epoch, other sequences."""
        kept = self._kept
        if epoch not in kept:
            # Of two epochs, as a batch may have of two; replaced whole, as threads may look at it.
            self._kept = kept = {
                **{other: kept[other] for other in list(kept)[-1:]},
                epoch: self._shuffle_equal_lengths(epoch),
            }
        return kept[epoch]

    def _shuffle_equal_lengths(self, epoch: int) -> Indices:
        lengths = self.sequences.lengths
        shuffled = self._order.samples_at(np.arange(len(lengths)) + epoch * len(lengths))
        found: Indices = shuffled[np.argsort(lengths[shuffled], kind="stable")][self._ranks]
        return found


def packing_report(
    arrays: VersionReader, episodes: Indices, length: int, *, window: int = 1, long: WhenTooLong = "split"
) -> PackingReport:
    """The plan for these episodes of a version in rows of `length` steps. Raises as `sequences` and `PackingPlan`."""
    known = cut_sequences(arrays.offsets, episodes, length, window=window, long=long)
    plan = PackingPlan(known, length)
    return PackingReport(
        name=arrays.manifest.name,
        version=arrays.version,
        length=length,
        window=window,
        when_too_long=long,
        episodes=len(episodes),
        sequences=len(known.start),
        rows=plan.rows,
        steps=plan.steps,
        padding_steps=plan.rows * length - plan.steps,
        fill=round(plan.fill, 6),
        split=known.split,
        dropped=known.dropped,
        longest=int((arrays.offsets[episodes + 1] - arrays.offsets[episodes]).max()),
    )


def best_fit(counts: Indices, length: int) -> list[Group]:
    """Rows of `length` for counts[n] sequences of n steps each: the longest first, each to the fullest row it fits.

    It is best-fit decreasing, done for all sequences of one length together.
    """
    room: list[int] = []  # ascending: the steps that are left in some rows
    there: dict[int, list[Group]] = {}
    for size in np.flatnonzero(counts)[::-1].tolist():
        todo = int(counts[size])
        while todo:
            at = bisect_left(room, size)
            if at < len(room):
                left = room[at]
                held, many = there[left].pop()
                if not there[left]:
                    del there[left], room[at]
            else:  # new rows, as many as it takes
                left, held, many = length, (), -(-todo // (length // size))
            # A row that has just got one is now the fullest, and gets the next if that fits too.
            per = left // size
            full = min(many, todo // per)
            rest = todo - full * per if full < many else 0
            todo -= full * per + rest
            for got, rows in ((per, full), (rest, int(rest > 0)), (0, many - full - int(rest > 0))):
                if rows:
                    group = ((*held, (size, got)) if got else held, rows)
                    if left - got * size not in there:
                        insort(room, left - got * size)
                    there.setdefault(left - got * size, []).append(group)
    return [group for left in sorted(there) for group in there[left]]


def _places(groups: list[Group], lengths: Indices, length: int) -> tuple[Indices, Indices]:
    """First place of each row, and of each place the rank of its sequence among all, the shortest first."""
    next_rank = np.concatenate([[0], np.cumsum(np.bincount(lengths, minlength=length + 1))]).tolist()
    sizes, ranks = [], []
    for held, many in groups:
        columns = []
        for size, per in held:
            start = next_rank[size]
            next_rank[size] += per * many
            columns.append(np.arange(start, start + per * many).reshape(many, per))
        block = np.concatenate(columns, axis=1)
        sizes.append(np.full(many, block.shape[1]))
        ranks.append(block.reshape(-1))
    return np.concatenate([[0], np.cumsum(np.concatenate(sizes))]), np.concatenate(ranks)


class _PackedRows(NamedTuple):
    """n rows. first_piece: (n + 1,) the first piece of each. Of each piece: episode, first step, size, place in its
    row."""

    first_piece: Indices
    episode: Indices
    start: Indices
    size: Indices
    offset: Indices


class PackedSamples:
    """Rows of several sequences each. `valid_mask` is where a step is one; `extras` has for each step of a row

    segment: 1, 2, … of its sequence, 0 for padding. position: its number in that sequence. episode: -1 for padding.
    instruction: its number in `instructions`, -1 for none and for padding.
    """

    planned_batch_size = 0

    def __init__(
        self,
        arrays: VersionReader,
        names: Sequence[str],
        packing: PackingPlan,
        *,
        seed: int = 0,
        shuffle: bool = True,
        deal: bool = True,
    ) -> None:
        """deal: each epoch, other sequences of the same lengths share a row. Raises UsageError, DataError."""
        require_within_episodes(arrays, *packing.sequences[:3])
        self.description, self.packing = str(arrays.path), packing
        self._arrays, self._deal, self._instructions = arrays, deal, InstructionTable(arrays)
        self.order = ShuffledOrder(dataset=arrays.version, samples=packing.rows, seed=seed, shuffle=shuffle)
        self.identity = {
            "dataset": arrays.version,
            "sequences": packing.identity,
            "length": str(packing.length),
            "seed": str(seed),
            "shuffle": str(shuffle),
            "deal": str(deal),
        }
        self.fields = {name: make_field(arrays, name, packing.length) for name in names}

    def batch_at(self, position: int, batch_size: int) -> tuple[int, int]:
        """As `Samples.batch_at`."""
        return position // batch_size, batch_size

    def draw(self, positions: Indices) -> DrawnSamples:
        """As `Samples.draw`; a sample is a row."""
        rows, first = self.order.samples_at(positions), self.packing.first
        counts = first[rows + 1] - first[rows]
        ends = np.cumsum(counts)
        begins = ends - counts
        places = np.arange(int(ends[-1]) if ends.size else 0) - np.repeat(begins - first[rows], counts)
        # A batch may end one epoch and begin the next, and each has its own deal.
        epochs = np.repeat(positions // self.packing.rows if self._deal else np.zeros_like(rows), counts)
        which = np.empty_like(places)
        for epoch in np.unique(epochs).tolist():
            which[epochs == epoch] = self.packing.sequences_of_epoch(epoch)[places[epochs == epoch]]
        known = self.packing.sequences
        size = known.lengths[which]
        upto = np.cumsum(size) - size
        at = upto - np.repeat(upto[begins], counts) if size.size else upto
        found = _PackedRows(np.concatenate([[0], ends]), known.episode[which], known.start[which], size, at)
        return DrawnSamples(rows, self.order.keys_at(positions), self.fields, found)

    def read(self, drawn: DrawnSamples, low: int, high: int, buffers: Buffers, rows: Indices | None = None) -> None:
        """As `Samples.read`; padding is zeros."""
        found: _PackedRows = drawn.locations
        for name in self.fields:
            buffer = buffers[name]
            for number in range(low, high):
                out, end = buffer[number if rows is None else rows[number]], 0
                pieces = slice(found.first_piece[number], found.first_piece[number + 1])
                for start, size, at in zip(*(part[pieces].tolist() for part in found[2:]), strict=True):
                    end = at + size
                    gather.gather_run(self._arrays, name, out[at:end], start)
                out[end:] = 0

    def valid_mask(self, drawn: DrawnSamples) -> dict[str, NDArray[np.bool_]]:
        """As `Samples.valid_mask`; one mask, the same for all arrays."""
        mask = self._spread(drawn, np.ones(len(drawn.locations.size), np.bool_), 0)
        return dict.fromkeys(self.fields, mask)

    def extras(self, drawn: DrawnSamples) -> dict[str, NDArray[Any]]:
        """`segment`, `position`, `episode`, `instruction`: (n, length) each."""
        found: _PackedRows = drawn.locations
        counts = np.diff(found.first_piece)
        number = np.arange(1, len(found.size) + 1) - np.repeat(found.first_piece[:-1], counts)
        position = self._spread(
            drawn, np.arange(int(found.size.sum())) - np.repeat(_first_indices(found.size), found.size), 0
        )
        return {
            "segment": self._spread(drawn, number.astype(np.int32), 0),
            "position": position.astype(np.int32),
            "episode": self._spread(drawn, found.episode, -1),
            "instruction": self._spread(drawn, self._instructions.indices_of(found.episode), -1),
        }

    @property
    def instructions(self) -> tuple[str, ...]:
        """The distinct instructions of the dataset's episodes."""
        return self._instructions.texts

    def _spread(self, drawn: DrawnSamples, values: NDArray[Any], padding: int) -> NDArray[Any]:
        """A value for each piece, or for each of its steps, as (n, length)."""
        found: _PackedRows = drawn.locations
        out = np.full(len(drawn.samples) * self.packing.length, padding, values.dtype)
        row = np.repeat(np.arange(len(drawn.samples)), np.diff(found.first_piece))
        steps = np.repeat(row * self.packing.length + found.offset - _first_indices(found.size), found.size)
        steps += np.arange(len(steps))
        out[steps] = np.repeat(values, found.size) if len(values) == len(found.size) else values
        return out.reshape(-1, self.packing.length)


def _first_indices(sizes: Indices) -> Indices:
    found: Indices = np.cumsum(sizes) - sizes
    return found
