"""Several datasets in one sequence, each as often as its weight says.

    position ──cycle of turns──▶ dataset, its own position ──its own order──▶ sample
               weighted_turns.py

No position is counted up to: any is found as fast as the first, in any process, so the sequence is the same for every
number of ranks and resumes at a number.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pitools.core.errors import ConfigError, suggest
from pitools.loader.sampling.protocol import Buffers, DrawnSamples, Field, Samples
from pitools.loader.sampling.shuffle import Indices, ShuffledOrder
from pitools.loader.sampling.weighted_turns import integer_weights, make_cycle

# `shuffled` deals at least so many turns at a time.
_CHUNK = 4096


class _MemberDraw(NamedTuple):
    """What one dataset has in a batch: rows (m,) ascending, and its own samples."""

    number: int
    rows: Indices
    drawn: DrawnSamples


class MixtureSamples:
    """Samples of several datasets in proportion; `extras` has `dataset`, the number of each sample's, (n,).

    `instructions` are those of all datasets, one after another.
    """

    planned_batch_size = 0

    def __init__(
        self,
        members: Sequence[Samples],
        weights: Sequence[float],
        *,
        rename: Mapping[int, Mapping[str, str]] = {},
        turn: Literal["even", "shuffled"] = "even",
        seed: int = 0,
    ) -> None:
        """weights: of samples, in any unit. rename: number of a dataset → its name of an array → the name here.

        turn: `even` spreads the turns of each as evenly as can be; `shuffled` deals each 4,096 or more at random.
        Raises ConfigError for weights, or datasets whose arrays differ.
        """
        if len(members) != len(weights):
            raise ConfigError(f"{len(weights)} weights for {len(members)} datasets", where="weights")
        self._members, self._turns = list(members), make_cycle(integer_weights(weights))
        self._names = [_name_map(member, rename.get(number, {})) for number, member in enumerate(members)]
        self.fields = _common_fields(self._members, self._names)
        self.description = ", ".join(member.description for member in members)
        self.identity = {
            "weights": " ".join(map(str, self._turns.parts.tolist())),
            "turn": turn,
            "seed": str(seed),
            "datasets": str(len(members)),
            **{
                f"{number} {key}": value
                for number, member in enumerate(members)
                for key, value in member.identity.items()
            },
        }
        digest = hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()[:32]
        cycle = len(self._turns.member)
        span = cycle * (-(-_CHUNK // cycle) if turn == "shuffled" else 1)
        self._order = ShuffledOrder(dataset=f"mixture {digest}", samples=span, seed=seed, shuffle=turn == "shuffled")

    def batch_at(self, position: int, batch_size: int) -> tuple[int, int]:
        """As `Samples.batch_at`."""
        return position // batch_size, batch_size

    def draw(self, positions: Indices) -> DrawnSamples:
        """As `Samples.draw`; `samples` are each dataset's own numbers."""
        cycle, span = len(self._turns.member), self._order.samples
        turn = self._order.samples_at(positions)
        whose, own = self._turns.locate(turn % cycle, positions // span * (span // cycle) + turn // cycle)
        samples = np.empty(len(positions), np.int64)
        found = []
        for number in np.unique(whose).tolist():
            rows = np.flatnonzero(whose == number)
            drawn = self._members[number].draw(own[rows])
            samples[rows] = drawn.samples
            found.append(_MemberDraw(number, rows, drawn))
        return DrawnSamples(samples, self._order.keys_at(positions), self.fields, found)

    def read(self, drawn: DrawnSamples, low: int, high: int, buffers: Buffers, rows: Indices | None = None) -> None:
        """As `Samples.read`."""
        for part in drawn.locations:
            first, last = np.searchsorted(part.rows, [low, high]).tolist()
            own = {theirs: buffers[ours] for theirs, ours in self._names[part.number].items()}
            to = part.rows if rows is None else rows[part.rows]
            self._members[part.number].read(part.drawn, first, last, own, to)

    def valid_mask(self, drawn: DrawnSamples) -> dict[str, NDArray[np.bool_]]:
        """As `Samples.valid_mask`; all of those whose dataset does not say."""
        found: dict[str, NDArray[np.bool_]] = {}
        for part in drawn.locations:
            for theirs, mask in self._members[part.number].valid_mask(part.drawn).items():
                name = self._names[part.number][theirs]
                whole = found.setdefault(name, np.ones((len(drawn.samples), *mask.shape[1:]), np.bool_))
                whole[part.rows] = mask
        return found

    def extras(self, drawn: DrawnSamples) -> dict[str, NDArray[Any]]:
        """`dataset`, and what the datasets have: zeros, or -1 in place of a number, for those that do not."""
        found: dict[str, NDArray[Any]] = {"dataset": np.empty(len(drawn.samples), np.int64)}
        for part in drawn.locations:
            found["dataset"][part.rows] = part.number
            for name, values in self._members[part.number].extras(part.drawn).items():
                if name == "instruction":
                    before = sum(map(len, self._texts()[: part.number]))
                    values = np.where(values < 0, values, values + np.int32(before))
                if name != "dataset":  # of a mixture in this one: which of them it is says no more than `samples`
                    _assign_rows(found, name, values, part.rows, len(drawn.samples))
        return found

    @property
    def instructions(self) -> tuple[str, ...]:
        """The distinct instructions of each dataset, one dataset after another."""
        return tuple(itertools.chain.from_iterable(self._texts()))

    def _texts(self) -> list[tuple[str, ...]]:
        return [getattr(member, "instructions", ()) for member in self._members]


def _assign_rows(found: dict[str, NDArray[Any]], name: str, values: NDArray[Any], rows: Indices, count: int) -> None:
    """Set some rows of an array of all datasets; windows have one value where packs have one a step."""
    whole = found.get(name)
    if whole is None or whole.ndim < values.ndim:
        wider = np.full((count, *values.shape[1:]), -1 if name in ("episode", "instruction") else 0, values.dtype)
        if whole is not None:
            wider[:] = whole[:, None]
        found[name] = whole = wider
    whole[rows] = values if values.ndim == whole.ndim else values[:, None]


def _name_map(member: Samples, rename: Mapping[str, str]) -> dict[str, str]:
    """The dataset's name of each of its arrays → the name here."""
    if member.planned_batch_size:
        raise ConfigError(
            "batches that are planned cannot be mixed", where=member.description, hint="use windows or packs"
        )
    for name in rename:
        if name not in member.fields:
            raise ConfigError(
                f"no array {name!r} to rename", where=member.description, hint=suggest(name, member.fields)
            )
    names = {name: rename.get(name, name) for name in member.fields}
    if len(set(names.values())) < len(names):
        raise ConfigError(f"two arrays would have one name: {names}", where=member.description)
    return names


def _common_fields(members: Sequence[Samples], names: Sequence[Mapping[str, str]]) -> dict[str, Field]:
    """The arrays that all datasets have alike. Raises ConfigError naming two that differ, and in what."""
    first = {names[0][name]: field for name, field in members[0].fields.items()}
    for member, renamed in zip(members[1:], names[1:], strict=True):
        other = {renamed[name]: field for name, field in member.fields.items()}
        for name in sorted(first.keys() | other.keys()):
            one, two = first.get(name), other.get(name)
            if one != two:
                what = f"{name} is {_text(two)} here, {_text(one)} in {members[0].description}"
                raise ConfigError(what, where=member.description, hint="rename it, or leave it out of the windows")
    return first


def _text(field: Field | None) -> str:
    return f"{field.dtype} {field.shape}" if field else "not there"
