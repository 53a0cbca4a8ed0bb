"""Which sample comes at which position of training: computed from a few numbers, never stored.

    position ──÷ samples──▶ epoch, place ──Feistel network keyed by (dataset, seed, epoch)──▶ sample

A position is a number in the endless sequence of all samples of all epochs, the same for every rank. So the global
batch of a step is a function of its number, whatever the world size, and to resume is to go on at a position.

The network works on pairs of digits to a base just above √samples, so it permutes little more than the samples; what
falls outside of them is sent through again until it falls inside (cycle walking), which keeps it a permutation.
Source: Black and Rogaway, Ciphers with Arbitrary Finite Domains (2002), there called the generalized Feistel cipher.
"""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

Indices = NDArray[np.int64]
Keys = NDArray[np.uint64]

# Enough that neighbours go far apart and small sets are shuffled well; see the tests, which count it.
_ROUNDS = 8
_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX = ((np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)), (np.uint64(27), np.uint64(0x94D049BB133111EB)))
_LAST = np.uint64(31)


class ShuffledOrder(Struct, frozen=True, kw_only=True):
    """The order of a dataset's samples. dataset: its version, or whatever names what is ordered. samples: how many.

    shuffle: else every epoch is 0, 1, 2, …
    """

    dataset: str
    samples: int
    seed: int
    shuffle: bool = True

    def samples_at(self, positions: Indices) -> Indices:
        """(n,) positions → (n,) samples in [0, samples). Within an epoch, each sample comes once.

        Raises ValueError for a position below 0, or when there are no samples.
        """
        epochs, places = self._split(positions)
        if not self.shuffle:
            return places
        found = np.empty_like(places)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            found[here] = permute(places[here], self.samples, _round_keys(self.dataset, self.seed, int(epoch)))
        return found

    def keys_at(self, positions: Indices) -> Keys:
        """(n,) positions → (n,) random numbers of 64 bits, one of its own for each: for a sample's augmentation."""
        if positions.size and int(positions.min()) < 0:
            raise ValueError("a position below 0")
        return _mix64(positions.astype(np.uint64) * _STEP ^ _round_keys(self.dataset, self.seed, -1)[0])

    def _split(self, positions: Indices) -> tuple[Indices, Indices]:
        if self.samples < 1:
            raise ValueError("there are no samples to order")
        if positions.size and int(positions.min()) < 0:
            raise ValueError("a position below 0")
        epochs, places = np.divmod(np.asarray(positions, np.int64), np.int64(self.samples))
        return epochs, places


def permute(places: Indices, size: int, round_keys: Keys) -> Indices:
    """(n,) numbers in [0, size) → (n,) others: a permutation of [0, size) chosen by the keys."""
    base = np.uint64(math.isqrt(size - 1) + 1 if size > 1 else 1)
    found = places.astype(np.uint64)
    walking = np.arange(len(found))
    while walking.size:
        left, right = np.divmod(found[walking], base)
        for key in round_keys:
            left, right = right, (left + _mix64(right * _STEP ^ key) % base) % base
        found[walking] = moved = left * base + right
        walking = walking[moved >= np.uint64(size)]
    return found.astype(np.int64)


def rank_slice(batch_size: int, rank: int, world_size: int) -> tuple[int, int]:
    """The part [start, stop) of a global batch that is this rank's; parts differ by at most one sample.

    Raises ValueError where some rank would have none.
    """
    if not 0 <= rank < world_size <= batch_size:
        raise ValueError(f"a batch of {batch_size} has no part for rank {rank} of {world_size}")
    return rank * batch_size // world_size, (rank + 1) * batch_size // world_size


@lru_cache(maxsize=8)
def _round_keys(dataset: str, seed: int, epoch: int) -> Keys:
    text = f"pit.order/1 {dataset} {seed} {epoch}".encode()
    data = b"".join(hashlib.sha256(text + bytes([half])).digest() for half in range(_ROUNDS * 8 // 32))
    return np.frombuffer(data, "<u8").astype(np.uint64)


def _mix64(numbers: Keys) -> Keys:
    """Every bit of the result depends on every bit of the number (the finalizer of SplitMix64)."""
    for shift, factor in _MIX:
        numbers = (numbers ^ (numbers >> shift)) * factor
    return numbers ^ (numbers >> _LAST)
