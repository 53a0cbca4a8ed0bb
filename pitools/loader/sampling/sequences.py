"""Cut episodes into sequences of limited length: whole episodes, or parts of long ones."""

from __future__ import annotations

import hashlib
from typing import Literal, NamedTuple

import numpy as np

from pitools.core.errors import ConfigError, UsageError
from pitools.loader.sampling.shuffle import Indices

# The treatment of an episode that is too long.
WhenTooLong = Literal["refuse", "cut", "drop"]


class Sequences(NamedTuple):
    """episode, start, stop: (n,) number of the episode and steps [start, stop). dropped, cut: counts of episodes."""

    episode: Indices
    start: Indices
    stop: Indices
    dropped: int = 0
    cut: int = 0

    @property
    def lengths(self) -> Indices:
        """Return the (n,) numbers of steps, at least 1 each."""
        return self.stop - self.start

    @property
    def identity(self) -> str:
        """Return a digest of the episodes and steps."""
        return hashlib.sha256(np.stack(self[:3]).astype("<i8").tobytes()).hexdigest()[:16]


def cut_sequences(
    offsets: Indices, episodes: Indices, longest: int, *, window: int = 1, when_too_long: WhenTooLong = "refuse"
) -> Sequences:
    """Return the episodes as sequences of at most `longest` steps; empty episodes are omitted.

    offsets: (all episodes + 1,) first steps. when_too_long: treatment of longer episodes; `cut` makes parts of the
    largest multiple of `window` steps, so that no window of this length is divided. Raises UsageError for invalid
    lengths, ConfigError for an episode that is too long.
    """
    if not 1 <= window <= longest:
        raise UsageError(f"window: expected 1 to {longest} steps, got {window}", where="window")
    numbers = np.asarray(episodes, np.int64)
    numbers = numbers[offsets[numbers] < offsets[numbers + 1]]
    lengths = offsets[numbers + 1] - offsets[numbers]
    over = lengths > longest
    if when_too_long == "refuse" and over.any():
        index = int(np.argmax(lengths))
        message = f"episodes: {int(over.sum())} too long (expected at most {longest} steps, got {lengths[index]} in "
        message += f"episode {numbers[index]})"
        raise ConfigError(
            message, where="length", hint='increase the length, or use when_too_long="cut" or when_too_long="drop"'
        )
    dropped, cut = (int(over.sum()) if when_too_long == policy else 0 for policy in ("drop", "cut"))
    if dropped:
        numbers, lengths, over = numbers[~over], lengths[~over], over[~over]
    part = np.where(over, longest // window * window, lengths)
    counts = -(-lengths // np.maximum(part, 1))
    index_of = np.repeat(np.arange(len(numbers)), counts)
    part_number = np.arange(len(index_of)) - np.repeat(np.cumsum(counts) - counts, counts)
    start = offsets[numbers][index_of] + part_number * part[index_of]
    stop = np.minimum(start + part[index_of], offsets[numbers + 1][index_of])
    return Sequences(numbers[index_of], start, stop, dropped, cut)
