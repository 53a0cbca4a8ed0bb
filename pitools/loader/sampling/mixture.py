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

from pitools.core.errors import ConfigError, nearest
from pitools.loader.sampling.protocol import Buffers, Drawn, Field, Samples
from pitools.loader.sampling.shuffle import Indices, Order
from pitools.loader.sampling.weighted_turns import parts, turns

# `shuffled` deals at least so many turns at a time.
_DEALT = 4096


class _Part(NamedTuple):
    """What one dataset has in a batch: rows (m,) ascending, and its own samples."""

    number: int
    rows: Indices
    drawn: Drawn


class Mixture:
    """Samples of several datasets in proportion; `aside` has `dataset`, the number of each sample's, (n,).

    `instructions` are those of all datasets, one after another.
    """

    planned = 0

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
        self._members, self._turns = list(members), turns(parts(weights))
        self._names = [_renamed(member, rename.get(number, {})) for number, member in enumerate(members)]
        self.fields = _unified(self._members, self._names)
        self.where = ", ".join(member.where for member in members)
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
        cycle = len(self._turns.whose)
        span = cycle * (-(-_DEALT // cycle) if turn == "shuffled" else 1)
        self._order = Order(dataset=f"mixture {digest}", samples=span, seed=seed, shuffle=turn == "shuffled")

    def batch(self, position: int, batch_size: int) -> tuple[int, int]:
        """As `Samples.batch`."""
        return position // batch_size, batch_size

    def at(self, positions: Indices) -> Drawn:
        """As `Samples.at`; `samples` are each dataset's own numbers."""
        cycle, span = len(self._turns.whose), self._order.samples
        turn = self._order.at(positions)
        whose, own = self._turns.at(turn % cycle, positions // span * (span // cycle) + turn // cycle)
        samples = np.empty(len(positions), np.int64)
        found = []
        for number in np.unique(whose).tolist():
            rows = np.flatnonzero(whose == number)
            drawn = self._members[number].at(own[rows])
            samples[rows] = drawn.samples
            found.append(_Part(number, rows, drawn))
        return Drawn(samples, self._order.keys(positions), self.fields, found)

    def read(self, drawn: Drawn, low: int, high: int, buffers: Buffers, rows: Indices | None = None) -> None:
        """As `Samples.read`."""
        for part in drawn.places:
            first, last = np.searchsorted(part.rows, [low, high]).tolist()
            own = {theirs: buffers[ours] for theirs, ours in self._names[part.number].items()}
            to = part.rows if rows is None else rows[part.rows]
            self._members[part.number].read(part.drawn, first, last, own, to)

    def inside(self, drawn: Drawn) -> dict[str, NDArray[np.bool_]]:
        """As `Samples.inside`; all of those whose dataset does not say."""
        found: dict[str, NDArray[np.bool_]] = {}
        for part in drawn.places:
            for theirs, mask in self._members[part.number].inside(part.drawn).items():
                name = self._names[part.number][theirs]
                whole = found.setdefault(name, np.ones((len(drawn.samples), *mask.shape[1:]), np.bool_))
                whole[part.rows] = mask
        return found

    def aside(self, drawn: Drawn) -> dict[str, NDArray[Any]]:
        """`dataset`, and what the datasets have: zeros, or -1 in place of a number, for those that do not."""
        found: dict[str, NDArray[Any]] = {"dataset": np.empty(len(drawn.samples), np.int64)}
        for part in drawn.places:
            found["dataset"][part.rows] = part.number
            for name, values in self._members[part.number].aside(part.drawn).items():
                if name == "instruction":
                    before = sum(map(len, self._texts()[: part.number]))
                    values = np.where(values < 0, values, values + np.int32(before))
                if name != "dataset":  # of a mixture in this one: which of them it is says no more than `samples`
                    _put(found, name, values, part.rows, len(drawn.samples))
        return found

    @property
    def instructions(self) -> tuple[str, ...]:
        """The distinct instructions of each dataset, one dataset after another."""
        return tuple(itertools.chain.from_iterable(self._texts()))

    def _texts(self) -> list[tuple[str, ...]]:
        return [getattr(member, "instructions", ()) for member in self._members]


def _put(found: dict[str, NDArray[Any]], name: str, values: NDArray[Any], rows: Indices, count: int) -> None:
    """Set some rows of an array of all datasets; windows have one value where packs have one a step."""
    whole = found.get(name)
    if whole is None or whole.ndim < values.ndim:
        wider = np.full((count, *values.shape[1:]), -1 if name in ("episode", "instruction") else 0, values.dtype)
        if whole is not None:
            wider[:] = whole[:, None]
        found[name] = whole = wider
    whole[rows] = values if values.ndim == whole.ndim else values[:, None]


def _renamed(member: Samples, rename: Mapping[str, str]) -> dict[str, str]:
    """The dataset's name of each of its arrays → the name here."""
    if member.planned:
        raise ConfigError("batches that are planned cannot be mixed", where=member.where, hint="use windows or packs")
    for name in rename:
        if name not in member.fields:
            raise ConfigError(f"no array {name!r} to rename", where=member.where, hint=nearest(name, member.fields))
    names = {name: rename.get(name, name) for name in member.fields}
    if len(set(names.values())) < len(names):
        raise ConfigError(f"two arrays would have one name: {names}", where=member.where)
    return names


def _unified(members: Sequence[Samples], names: Sequence[Mapping[str, str]]) -> dict[str, Field]:
    """The arrays that all datasets have alike. Raises ConfigError naming two that differ, and in what."""
    first = {names[0][name]: field for name, field in members[0].fields.items()}
    for member, renamed in zip(members[1:], names[1:], strict=True):
        other = {renamed[name]: field for name, field in member.fields.items()}
        for name in sorted(first.keys() | other.keys()):
            one, two = first.get(name), other.get(name)
            if one != two:
                what = f"{name} is {_text(two)} here, {_text(one)} in {members[0].where}"
                raise ConfigError(what, where=member.where, hint="rename it, or leave it out of the windows")
    return first


def _text(field: Field | None) -> str:
    return f"{field.dtype} {field.shape}" if field else "not there"
