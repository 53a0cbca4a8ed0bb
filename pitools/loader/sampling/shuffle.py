"""Compute the order of samples from (dataset, seed, position); no permutation is stored.

    position ──÷ samples──▶ epoch, index ──Feistel network keyed by (dataset, seed, epoch)──▶ sample

A position is an index into the endless sequence of all samples of all epochs, the same on every rank. So the global
batch of a step is a function of its number for any world size, and a run resumes from a position.

The network permutes pairs of digits to base ⌈√samples⌉, a domain slightly larger than the samples. A result outside the
samples is permuted again until it is inside (cycle walking), which keeps the map a permutation.
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

# Enough to separate neighbours and to shuffle small sets well; the tests measure both.
_ROUNDS = 8
_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX = ((np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)), (np.uint64(27), np.uint64(0x94D049BB133111EB)))
_LAST = np.uint64(31)


class ShuffledOrder(Struct, frozen=True, kw_only=True):
    """The order of a dataset's samples. dataset: its version, or another key. samples: their count.

    shuffle: False: every epoch is 0, 1, 2, …
    """

    dataset: str
    samples: int
    seed: int
    shuffle: bool = True

    def samples_at(self, positions: Indices) -> Indices:
        """Map (n,) positions to (n,) samples in [0, samples), each once an epoch.

        Raises ValueError for a position below 0, or without samples.
        """
        epochs, places = self._split(positions)
        if not self.shuffle:
            return places
        samples = np.empty_like(places)
        for epoch in np.unique(epochs):
            in_epoch = epochs == epoch
            samples[in_epoch] = permute(
                places[in_epoch], self.samples, _round_keys(self.dataset, self.seed, int(epoch))
            )
        return samples

    def seeds_at(self, positions: Indices) -> Keys:
        """Map (n,) positions to (n,) distinct random 64-bit numbers, for the samples' augmentation."""
        if positions.size and int(positions.min()) < 0:
            raise ValueError(f"position: below 0: {int(positions.min())}")
        return _mix64(positions.astype(np.uint64) * _STEP ^ _round_keys(self.dataset, self.seed, -1)[0])

    def _split(self, positions: Indices) -> tuple[Indices, Indices]:
        if self.samples < 1:
            raise ValueError(f"samples: none (expected 1 or more, got {self.samples})")
        if positions.size and int(positions.min()) < 0:
            raise ValueError(f"position: below 0: {int(positions.min())}")
        epochs, places = np.divmod(np.asarray(positions, np.int64), np.int64(self.samples))
        return epochs, places


def permute(places: Indices, size: int, round_keys: Keys) -> Indices:
    """Map (n,) numbers by the permutation of [0, size) that the keys select."""
    base = np.uint64(math.isqrt(size - 1) + 1 if size > 1 else 1)
    numbers = places.astype(np.uint64)
    outside = np.arange(len(numbers))
    while outside.size:
        left, right = np.divmod(numbers[outside], base)
        for key in round_keys:
            left, right = right, (left + _mix64(right * _STEP ^ key) % base) % base
        numbers[outside] = results = left * base + right
        outside = outside[results >= np.uint64(size)]
    return numbers.astype(np.int64)


def rank_slice(global_batch_size: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return this rank's part [start, stop) of a global batch. The sizes of parts differ by at most one.

    Raises ValueError if some rank has no sample.
    """
    if not 0 <= rank < world_size <= global_batch_size:
        message = f"batch of {global_batch_size}: no sample for every rank (expected rank < world_size <= batch size, "
        raise ValueError(message + f"got rank {rank} of {world_size})")
    return rank * global_batch_size // world_size, (rank + 1) * global_batch_size // world_size


@lru_cache(maxsize=8)
def _round_keys(dataset: str, seed: int, epoch: int) -> Keys:
    text = f"pit.order/1 {dataset} {seed} {epoch}".encode()
    data = b"".join(hashlib.sha256(text + bytes([half])).digest() for half in range(_ROUNDS * 8 // 32))
    return np.frombuffer(data, "<u8").astype(np.uint64)


def _mix64(numbers: Keys) -> Keys:
    """Mix the bits by the finalizer of SplitMix64: each input bit affects all output bits."""
    for shift, factor in _MIX:
        numbers = (numbers ^ (numbers >> shift)) * factor
    return numbers ^ (numbers >> _LAST)
