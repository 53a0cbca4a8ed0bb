"""Pack sequences of unequal length into rows of equal length.

`PackingPlan` assigns sequences to rows; `PackedSamples` are the rows as a loader's samples.

    lengths ──histogram──▶ best-fit decreasing ──▶ rows of slots ──equal lengths shuffled by (seed, epoch)──▶ sequences

    row 0  │ 1 1 1 1 1 1 1 1 1 1 1 1 │ 2 2 2 2 2 │ 3 3 3 0 │      segment ids; 0 is padding

The histogram of lengths is packed, not the sequences. So the time grows with the number of distinct lengths, and each
epoch shuffles sequences of equal length without a new plan.
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

# ((length, sequences of this length in a row), …), and the number of such rows.
Group = tuple[tuple[tuple[int, int], ...], int]


class PackingReport(Record, frozen=True, kw_only=True, tag="pit.packing-report/1"):
    """Summary of a plan. episodes: selected. cut, dropped: episodes longer than a row. sequences: packed.

    fill: fraction of the rows' steps that is not padding. longest: steps of the longest episode.
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
    cut: int
    dropped: int
    longest: int


class PackingPlan:
    """Rows of `length` steps, each with consecutive slots for sequences. rows: count. first: (rows + 1,) first slot
    of each row."""

    def __init__(self, sequences: Sequences, length: int, *, seed: int = 0) -> None:
        """Raises ConfigError for no sequences, or a sequence longer than a row."""
        lengths = sequences.lengths
        if not lengths.size:
            raise ConfigError("sequences: none to pack", where="episodes")
        if int(lengths.max()) > length:
            message = f"sequence: too long (expected at most {length} steps, got {int(lengths.max())})"
            raise ConfigError(message, where="length")
        self.sequences, self.length = sequences, length
        groups = best_fit(np.bincount(lengths, minlength=length + 1), length)
        # _ranks: (n,) for each slot, the rank of its sequence in the order of lengths.
        self.first, self._ranks = _slots(groups, lengths, length)
        self.rows = len(self.first) - 1
        self.steps = int(lengths.sum())
        # With the seed, which determines the shuffle of sequences of equal length.
        self.identity = f"{sequences.identity} {seed}"
        self._order = ShuffledOrder(dataset=f"packing {sequences.identity}", samples=len(lengths), seed=seed)
        self._cached: dict[int, Indices] = {}

    @property
    def fill(self) -> float:
        """Return the fraction of the rows' steps that is not padding."""
        return self.steps / (self.rows * self.length)

    def sequences_of_epoch(self, epoch: int) -> Indices:
        """Return the (n,) sequence of each slot, row by row. Lengths are the same in every epoch, sequences differ."""
        cached = self._cached
        if epoch not in cached:
            # Two epochs, since a batch may span two. The dict is replaced, not changed: other threads may read it.
            self._cached = cached = {
                **{key: cached[key] for key in list(cached)[-1:]},
                epoch: self._shuffle_equal_lengths(epoch),
            }
        return cached[epoch]

    def _shuffle_equal_lengths(self, epoch: int) -> Indices:
        lengths = self.sequences.lengths
        shuffled = self._order.samples_at(np.arange(len(lengths)) + epoch * len(lengths))
        sequences: Indices = shuffled[np.argsort(lengths[shuffled], kind="stable")][self._ranks]
        return sequences


def packing_report(
    reader: VersionReader, episodes: Indices, length: int, *, window: int = 1, when_too_long: WhenTooLong = "cut"
) -> PackingReport:
    """Summarise the plan for these episodes in rows of `length` steps. Raises as `cut_sequences` and `PackingPlan`."""
    sequences = cut_sequences(reader.offsets, episodes, length, window=window, when_too_long=when_too_long)
    plan = PackingPlan(sequences, length)
    return PackingReport(
        name=reader.manifest.name,
        version=reader.version,
        length=length,
        window=window,
        when_too_long=when_too_long,
        episodes=len(episodes),
        sequences=len(sequences.start),
        rows=plan.rows,
        steps=plan.steps,
        padding_steps=plan.rows * length - plan.steps,
        fill=round(plan.fill, 6),
        cut=sequences.cut,
        dropped=sequences.dropped,
        longest=int((reader.offsets[episodes + 1] - reader.offsets[episodes]).max()),
    )


def best_fit(counts: Indices, length: int) -> list[Group]:
    """Pack counts[n] sequences of n steps each into rows of `length` steps, by best-fit decreasing.

    The longest sequences first, all of one length together, each into the fullest row with enough free steps.
    """
    rooms: list[int] = []  # ascending: distinct counts of free steps
    groups_by_room: dict[int, list[Group]] = {}
    for size in np.flatnonzero(counts)[::-1].tolist():
        remaining = int(counts[size])
        while remaining:
            index = bisect_left(rooms, size)
            if index < len(rooms):
                free = rooms[index]
                contents, available = groups_by_room[free].pop()
                if not groups_by_room[free]:
                    del groups_by_room[free], rooms[index]
            else:  # new rows
                free, contents, available = length, (), -(-remaining // (length // size))
            # After an insertion that row is the fullest, and takes the next sequence if it fits.
            per = free // size
            full = min(available, remaining // per)
            rest = remaining - full * per if full < available else 0
            remaining -= full * per + rest
            for added, rows in ((per, full), (rest, int(rest > 0)), (0, available - full - int(rest > 0))):
                if rows:
                    group = ((*contents, (size, added)) if added else contents, rows)
                    if free - added * size not in groups_by_room:
                        insort(rooms, free - added * size)
                    groups_by_room.setdefault(free - added * size, []).append(group)
    return [group for free in sorted(groups_by_room) for group in groups_by_room[free]]


def _slots(groups: list[Group], lengths: Indices, length: int) -> tuple[Indices, Indices]:
    """Return the first slot of each row, and for each slot the rank of its sequence in ascending order of length."""
    next_rank = np.concatenate([[0], np.cumsum(np.bincount(lengths, minlength=length + 1))]).tolist()
    sizes, ranks = [], []
    for contents, rows in groups:
        columns = []
        for size, per in contents:
            start = next_rank[size]
            next_rank[size] += per * rows
            columns.append(np.arange(start, start + per * rows).reshape(rows, per))
        block = np.concatenate(columns, axis=1)
        sizes.append(np.full(rows, block.shape[1]))
        ranks.append(block.reshape(-1))
    return np.concatenate([[0], np.cumsum(np.concatenate(sizes))]), np.concatenate(ranks)


class _PackedRows(NamedTuple):
    """n rows of pieces. first_piece: (n + 1,) first piece of each row. episode, start, size, offset: of each piece its
    episode, first step, steps, and offset in the row."""

    first_piece: Indices
    episode: Indices
    start: Indices
    size: Indices
    offset: Indices


class PackedSamples:
    """Rows of several sequences each. `valid_mask` is False at padding; `extras` has for each step of a row:

    segment: 1, 2, … for the row's sequences, 0 at padding. position: index in its sequence. episode: -1 at padding.
    instruction: index into `instructions`, -1 for none and at padding.
    """

    planned_batch_size = 0

    def __init__(
        self,
        reader: VersionReader,
        names: Sequence[str],
        packing: PackingPlan,
        *,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        """Raises UsageError, DataError."""
        require_within_episodes(reader, *packing.sequences[:3])
        self.description, self.packing = str(reader.path), packing
        self._reader, self._instructions = reader, InstructionTable(reader)
        self.order = ShuffledOrder(dataset=reader.version, samples=packing.rows, seed=seed, shuffle=shuffle)
        self.identity = {
            "dataset": reader.version,
            "sequences": packing.identity,
            "length": str(packing.length),
            "seed": str(seed),
            "shuffle": str(shuffle),
        }
        self.fields = {name: make_field(reader, name, packing.length) for name in names}

    def batch_at(self, position: int, global_batch_size: int) -> tuple[int, int]:
        """As `Samples.batch_at`."""
        return position // global_batch_size, global_batch_size

    def draw(self, positions: Indices) -> DrawnSamples:
        """As `Samples.draw`; a sample is a row."""
        rows, first = self.order.samples_at(positions), self.packing.first
        counts = first[rows + 1] - first[rows]
        ends = np.cumsum(counts)
        begins = ends - counts
        slots = np.arange(int(ends[-1]) if ends.size else 0) - np.repeat(begins - first[rows], counts)
        # A batch may span two epochs, each with its own shuffle.
        epochs = np.repeat(positions // self.packing.rows, counts)
        members = np.empty_like(slots)
        for epoch in np.unique(epochs).tolist():
            members[epochs == epoch] = self.packing.sequences_of_epoch(epoch)[slots[epochs == epoch]]
        sequences = self.packing.sequences
        size = sequences.lengths[members]
        ends_before = np.cumsum(size) - size
        offset = ends_before - np.repeat(ends_before[begins], counts) if size.size else ends_before
        pieces = _PackedRows(
            np.concatenate([[0], ends]), sequences.episode[members], sequences.start[members], size, offset
        )
        return DrawnSamples(rows, self.order.seeds_at(positions), self.fields, pieces)

    def read(self, drawn: DrawnSamples, low: int, high: int, buffers: Buffers, rows: Indices | None = None) -> None:
        """As `Samples.read`; padding is zeros."""
        packed: _PackedRows = drawn.locations
        for name in self.fields:
            buffer = buffers[name]
            for number in range(low, high):
                out, end = buffer[number if rows is None else rows[number]], 0
                pieces = slice(packed.first_piece[number], packed.first_piece[number + 1])
                for start, size, offset in zip(*(part[pieces].tolist() for part in packed[2:]), strict=True):
                    end = offset + size
                    gather.gather_run(self._reader, name, out[offset:end], start)
                out[end:] = 0

    def valid_mask(self, drawn: DrawnSamples) -> dict[str, NDArray[np.bool_]]:
        """As `Samples.valid_mask`; one mask, the same for all arrays."""
        mask = self._spread(drawn, np.ones(len(drawn.locations.size), np.bool_), 0)
        return dict.fromkeys(self.fields, mask)

    def extras(self, drawn: DrawnSamples) -> dict[str, NDArray[Any]]:
        """Return `segment`, `position`, `episode` and `instruction`, (n, length) each."""
        packed: _PackedRows = drawn.locations
        counts = np.diff(packed.first_piece)
        number = np.arange(1, len(packed.size) + 1) - np.repeat(packed.first_piece[:-1], counts)
        position = self._spread(
            drawn, np.arange(int(packed.size.sum())) - np.repeat(_first_indices(packed.size), packed.size), 0
        )
        return {
            "segment": self._spread(drawn, number.astype(np.int32), 0),
            "position": position.astype(np.int32),
            "episode": self._spread(drawn, packed.episode, -1),
            "instruction": self._spread(drawn, self._instructions.indices_of(packed.episode), -1),
        }

    @property
    def instructions(self) -> tuple[str, ...]:
        """The distinct instructions of the dataset's episodes."""
        return self._instructions.texts

    def _spread(self, drawn: DrawnSamples, values: NDArray[Any], padding: int) -> NDArray[Any]:
        """Place values, one a piece or one a step, in an (n, length) array filled with `padding`."""
        packed: _PackedRows = drawn.locations
        out = np.full(len(drawn.sample_indices) * self.packing.length, padding, values.dtype)
        row = np.repeat(np.arange(len(drawn.sample_indices)), np.diff(packed.first_piece))
        steps = np.repeat(row * self.packing.length + packed.offset - _first_indices(packed.size), packed.size)
        steps += np.arange(len(steps))
        out[steps] = np.repeat(values, packed.size) if len(values) == len(packed.size) else values
        return out.reshape(-1, self.packing.length)


def _first_indices(sizes: Indices) -> Indices:
    first: Indices = np.cumsum(sizes) - sizes
    return first
