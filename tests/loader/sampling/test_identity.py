from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from pitools.loader.sampling.bucketing import BucketedSamples
from pitools.loader.sampling.mixture import MixtureSamples
from pitools.loader.sampling.packing import PackedSamples, PackingPlan
from pitools.loader.sampling.protocol import Samples
from pitools.loader.sampling.sequences import cut_sequences
from pitools.loader.sampling.window_samples import WindowSamples
from pitools.loader.sampling.windows import Windows, WindowSpan
from pitools.store.reader.version_reader import VersionReader

LENGTHS = (9, 7, 12, 3, 16, 5)
NAMES = ["action"]


def test_whatever_changes_the_order_changes_the_identity(record: Callable[..., Path]):
    """By it a state is known to be of this order: each argument that decides what comes when is a part of it."""
    first, two = VersionReader(record(LENGTHS)), VersionReader(record(LENGTHS, seed=1))
    everything, less = np.arange(6), np.arange(5)

    def windowed(
        arrays: VersionReader = first, episodes: Any = everything, *, pad: bool = True, **more: Any
    ) -> WindowSamples:
        return WindowSamples(arrays, Windows(arrays.offsets, episodes, {"action": WindowSpan(0, 2)}, pad=pad), **more)

    def packed(episodes: Any = everything, length: int = 16, plan: int = 0, **more: Any) -> PackedSamples:
        return PackedSamples(
            first, NAMES, PackingPlan(cut_sequences(first.offsets, episodes, 16), length, seed=plan), **more
        )

    def bucketed(edges: Any = (8, 16), episodes: Any = everything, **more: Any) -> BucketedSamples:
        sequences = cut_sequences(first.offsets, episodes, 16)
        return BucketedSamples(first, NAMES, sequences, edges, **{"global_batch_size": 2, "multiple": 1, **more})

    def mixture(weights: Any = (3, 1), members: Any = (first, two), seeds: Any = (0, 0), **more: Any) -> MixtureSamples:
        return MixtureSamples(
            [windowed(each, seed=seed) for each, seed in zip(members, seeds, strict=True)], weights, **more
        )

    created: list[list[Samples]] = [
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
        ],
        [
            bucketed(),
            bucketed((10, 16)),
            bucketed(episodes=less),
            bucketed(global_batch_size=4),
            bucketed(multiple=2),
            bucketed(max_batch_steps=64, global_batch_size=0),
            bucketed(seed=1),
            bucketed(shuffle=False),
        ],
        [
            mixture(),
            mixture((1, 3)),
            mixture(members=(two, first)),
            mixture(seeds=(0, 1)),
            mixture(seed=1),
        ],
    ]
    for samples in created:
        identities = [tuple(sorted(each.identity.items())) for each in samples]
        assert len(set(identities)) == len(samples)
    assert windowed().identity == windowed().identity
    assert mixture((6, 2)).identity == mixture().identity
