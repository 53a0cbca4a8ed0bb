from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from pitools.loader.sampling.bucketing import Bucketed
from pitools.loader.sampling.mixture import Mixture
from pitools.loader.sampling.packing import Packed, Packing
from pitools.loader.sampling.protocol import Samples, Windowed
from pitools.loader.sampling.sequences import sequences
from pitools.loader.sampling.windows import Span, Windows
from pitools.store.reader.version_reader import Arrays

LENGTHS = (9, 7, 12, 3, 16, 5)
NAMES = ["action"]


def test_whatever_changes_the_order_changes_the_identity(record: Callable[..., Path]):
    """By it a state is known to be of this order: each argument that decides what comes when is a part of it."""
    one, two = Arrays(record(LENGTHS)), Arrays(record(LENGTHS, seed=1))
    everything, less = np.arange(6), np.arange(5)

    def windowed(arrays: Arrays = one, episodes: Any = everything, *, pad: bool = True, **more: Any) -> Windowed:
        return Windowed(arrays, Windows(arrays.offsets, episodes, {"action": Span(0, 2)}, pad=pad), **more)

    def packed(episodes: Any = everything, length: int = 16, plan: int = 0, **more: Any) -> Packed:
        return Packed(one, NAMES, Packing(sequences(one.offsets, episodes, 16), length, seed=plan), **more)

    def bucketed(edges: Any = (8, 16), episodes: Any = everything, **more: Any) -> Bucketed:
        known = sequences(one.offsets, episodes, 16)
        return Bucketed(one, NAMES, known, edges, **{"batch_size": 2, "multiple": 1, **more})

    def mixture(weights: Any = (3, 1), members: Any = (one, two), seeds: Any = (0, 0), **more: Any) -> Mixture:
        return Mixture([windowed(each, seed=seed) for each, seed in zip(members, seeds, strict=True)], weights, **more)

    made: list[list[Samples]] = [
        [
            windowed(),
            windowed(two),
            windowed(episodes=less),
            windowed(pad=False),
            windowed(seed=1),
            windowed(shuffle=False),
        ],
        [
            packed(),
            packed(less),
            packed(length=20),
            packed(plan=1),
            packed(seed=1),
            packed(shuffle=False),
            packed(deal=False),
        ],
        [
            bucketed(),
            bucketed((10, 16)),
            bucketed(episodes=less),
            bucketed(batch_size=4),
            bucketed(multiple=2),
            bucketed(steps=64, batch_size=0),
            bucketed(seed=1),
            bucketed(shuffle=False),
        ],
        [
            mixture(),
            mixture((1, 3)),
            mixture(members=(two, one)),
            mixture(seeds=(0, 1)),
            mixture(turn="shuffled"),
            mixture(turn="shuffled", seed=1),
            mixture(seed=1),
        ],
    ]
    for samples in made:
        identities = [tuple(sorted(each.identity.items())) for each in samples]
        assert len(set(identities)) == len(samples)
    assert windowed().identity == windowed().identity
    assert mixture((6, 2)).identity == mixture().identity
