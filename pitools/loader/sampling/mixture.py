"""Mix several datasets into one sequence of samples, in proportion to weights.

    position ──cycle of turns──▶ dataset, its own position ──its own order──▶ sample
               weighted_turns.py

A position maps to its sample in constant time in any process. So the sequence is the same for any number of ranks, and
resumes from a position.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pitools.core.errors import ConfigError, suggest
from pitools.loader.sampling.protocol import Buffers, DrawnSamples, Field, Samples
from pitools.loader.sampling.shuffle import Indices, ShuffledOrder
from pitools.loader.sampling.weighted_turns import integer_weights, make_cycle


class _MemberDraw(NamedTuple):
    """One dataset's part of a batch. number: of the dataset. rows: (m,) ascending. drawn: its samples."""

    number: int
    rows: Indices
    drawn: DrawnSamples


class MixtureSamples:
    """Samples of several datasets in proportion to weights. `extras` has `dataset`: (n,) number of the dataset.

    `instructions`: the concatenated instructions of all datasets.
    """

    planned_batch_size = 0

    def __init__(
        self,
        members: Sequence[Samples],
        weights: Sequence[float],
        *,
        rename: Mapping[int, Mapping[str, str]] = {},
        seed: int = 0,
    ) -> None:
        """weights: proportions of samples, in any unit. rename: dataset number → its array name → the common name.

        Raises ConfigError for invalid weights, or datasets whose arrays differ.
        """
        if len(members) != len(weights):
            message = f"weights: one per dataset (expected {len(members)}, got {len(weights)})"
            raise ConfigError(message, where="weights")
        self._members, self._turns = list(members), make_cycle(integer_weights(weights))
        self._names = [_name_map(member, rename.get(number, {})) for number, member in enumerate(members)]
        self.fields = _common_fields(self._members, self._names)
        self.description = ", ".join(member.description for member in members)
        self.identity = {
            "weights": " ".join(map(str, self._turns.parts.tolist())),
            "seed": str(seed),
            "datasets": str(len(members)),
            **{
                f"{number} {key}": value
                for number, member in enumerate(members)
                for key, value in member.identity.items()
            },
        }
        digest = hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()[:32]
        self._order = ShuffledOrder(dataset=f"mixture {digest}", samples=1, seed=seed, shuffle=False)  # for its seeds

    def batch_at(self, position: int, global_batch_size: int) -> tuple[int, int]:
        """As `Samples.batch_at`."""
        return position // global_batch_size, global_batch_size

    def draw(self, positions: Indices) -> DrawnSamples:
        """As `Samples.draw`; `samples` are numbers within each dataset."""
        cycle = len(self._turns.member)
        members, positions_within = self._turns.locate(positions % cycle, positions // cycle)
        samples = np.empty(len(positions), np.int64)
        parts = []
        for number in np.unique(members).tolist():
            rows = np.flatnonzero(members == number)
            drawn = self._members[number].draw(positions_within[rows])
            samples[rows] = drawn.sample_indices
            parts.append(_MemberDraw(number, rows, drawn))
        return DrawnSamples(samples, self._order.seeds_at(positions), self.fields, parts)

    def read(self, drawn: DrawnSamples, low: int, high: int, buffers: Buffers, rows: Indices | None = None) -> None:
        """As `Samples.read`."""
        for part in drawn.locations:
            first, last = np.searchsorted(part.rows, [low, high]).tolist()
            member_buffers = {name: buffers[common_name] for name, common_name in self._names[part.number].items()}
            targets = part.rows if rows is None else rows[part.rows]
            self._members[part.number].read(part.drawn, first, last, member_buffers, targets)

    def valid_mask(self, drawn: DrawnSamples) -> dict[str, NDArray[np.bool_]]:
        """As `Samples.valid_mask`; True for datasets without a mask."""
        masks: dict[str, NDArray[np.bool_]] = {}
        for part in drawn.locations:
            for member_name, mask in self._members[part.number].valid_mask(part.drawn).items():
                name = self._names[part.number][member_name]
                full_mask = masks.setdefault(name, np.ones((len(drawn.sample_indices), *mask.shape[1:]), np.bool_))
                full_mask[part.rows] = mask
        return masks

    def extras(self, drawn: DrawnSamples) -> dict[str, NDArray[Any]]:
        """Return `dataset` and the datasets' extras; 0, or -1 for `episode` and `instruction`, where one has none."""
        columns: dict[str, NDArray[Any]] = {"dataset": np.empty(len(drawn.sample_indices), np.int64)}
        for part in drawn.locations:
            columns["dataset"][part.rows] = part.number
            for name, values in self._members[part.number].extras(part.drawn).items():
                if name == "instruction":
                    offset = sum(map(len, self._texts()[: part.number]))
                    values = np.where(values < 0, values, values + np.int32(offset))
                if name != "dataset":  # of a nested mixture: here `dataset` is the outer number
                    _assign_rows(columns, name, values, part.rows, len(drawn.sample_indices))
        return columns

    @property
    def instructions(self) -> tuple[str, ...]:
        """The distinct instructions of each dataset, one dataset after another."""
        return tuple(itertools.chain.from_iterable(self._texts()))

    def _texts(self) -> list[tuple[str, ...]]:
        return [getattr(member, "instructions", ()) for member in self._members]


def _assign_rows(columns: dict[str, NDArray[Any]], name: str, values: NDArray[Any], rows: Indices, count: int) -> None:
    """Set some rows of an extra of all datasets; broadcast per-sample values (windows) to per-step ones (packs)."""
    column = columns.get(name)
    if column is None or column.ndim < values.ndim:
        wider = np.full((count, *values.shape[1:]), -1 if name in ("episode", "instruction") else 0, values.dtype)
        if column is not None:
            wider[:] = column[:, None]
        columns[name] = column = wider
    column[rows] = values if values.ndim == column.ndim else values[:, None]


def _name_map(member: Samples, rename: Mapping[str, str]) -> dict[str, str]:
    """Return the dataset's array names → the common names. Raises ConfigError for buckets and wrong names."""
    if member.planned_batch_size:
        message = "samples: planned batches cannot be mixed (expected windows or packed rows)"
        raise ConfigError(message, where=member.description)
    for name in rename:
        if name not in member.fields:
            hint = suggest(name, member.fields)
            raise ConfigError(f"rename: no array {name!r}", where=member.description, hint=hint)
    names = {name: rename.get(name, name) for name in member.fields}
    if len(set(names.values())) < len(names):
        raise ConfigError(f"rename: two arrays with the same name: {names}", where=member.description)
    return names


def _common_fields(members: Sequence[Samples], names: Sequence[Mapping[str, str]]) -> dict[str, Field]:
    """Return the arrays common to all datasets. Raises ConfigError if two datasets differ."""
    first = {names[0][name]: field for name, field in members[0].fields.items()}
    for member, renamed in zip(members[1:], names[1:], strict=True):
        fields = {renamed[name]: field for name, field in member.fields.items()}
        for name in sorted(first.keys() | fields.keys()):
            expected, actual = first.get(name), fields.get(name)
            if expected != actual:
                message = f"{name}: differs from {members[0].description} "
                message += f"(expected {_text(expected)}, got {_text(actual)})"
                raise ConfigError(message, where=member.description, hint="rename it, or omit it from the windows")
    return first


def _text(field: Field | None) -> str:
    return f"{field.dtype} {field.shape}" if field else "no array"
