"""Runs of steps that are samples as they are: whole episodes, or what is left of them when they are cut."""

from __future__ import annotations

import hashlib
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pitools.core.errors import ConfigError, UsageError

Indices = NDArray[np.int64]
# What becomes of an episode that is too long.
WhenTooLong = Literal["refuse", "split", "drop"]


class Sequences(NamedTuple):
    """(n,) each: number of the episode, and its steps [start, stop). dropped, split: episodes that were too long."""

    episode: Indices
    start: Indices
    stop: Indices
    dropped: int = 0
    split: int = 0

    @property
    def lengths(self) -> Indices:
        """(n,) steps, at least one."""
        return self.stop - self.start

    @property
    def identity(self) -> str:
        """A digest of which steps these are."""
        return hashlib.sha256(np.stack(self[:3]).astype("<i8").tobytes()).hexdigest()[:16]


def cut_sequences(
    offsets: Indices, episodes: Indices, longest: int, *, window: int = 1, long: WhenTooLong = "refuse"
) -> Sequences:
    """The episodes as sequences of at most `longest` steps.

    offsets: (all episodes + 1,) first steps. long: what to do with a longer one; `split` cuts it into parts of the
    largest multiple of `window` steps, so that windows of so many steps stay whole. An episode of no steps is none.
    Raises UsageError for lengths that cannot be, ConfigError for an episode that is too long.
    """
    if not 1 <= window <= longest:
        raise UsageError(f"windows of {window} steps in sequences of {longest}", where="window")
    numbers = np.asarray(episodes, np.int64)
    numbers = numbers[offsets[numbers] < offsets[numbers + 1]]
    lengths = offsets[numbers + 1] - offsets[numbers]
    over = lengths > longest
    if long == "refuse" and over.any():
        at = int(np.argmax(lengths))
        what = f"{int(over.sum())} episodes are longer than {longest} steps; episode {numbers[at]} has {lengths[at]}"
        raise ConfigError(what, where="length", hint='take a greater length, or long="split" or "drop"')
    dropped, split = (int(over.sum()) if long == policy else 0 for policy in ("drop", "split"))
    if dropped:
        numbers, lengths, over = numbers[~over], lengths[~over], over[~over]
    part = np.where(over, longest // window * window, lengths)
    counts = -(-lengths // np.maximum(part, 1))
    which = np.repeat(np.arange(len(numbers)), counts)
    place = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
    start = offsets[numbers][which] + place * part[which]
    stop = np.minimum(start + part[which], offsets[numbers + 1][which])
    return Sequences(numbers[which], start, stop, dropped, split)
