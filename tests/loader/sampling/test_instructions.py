"""Which episode a sample is of, and what the recording asked for in it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pitools.loader.loader import Loader
from pitools.loader.sampling.bucketing import BucketedSamples
from pitools.loader.sampling.mixture import MixtureSamples
from pitools.loader.sampling.packing import PackedSamples, PackingPlan
from pitools.loader.sampling.sequences import cut_sequences
from pitools.loader.sampling.window_samples import WindowSamples
from pitools.loader.sampling.windows import Windows, WindowSpan
from pitools.store.reader.version_reader import VersionReader

LENGTHS, TASKS = (9, 12, 5, 7), ("open the drawer", "", "close it", "open the drawer")


@pytest.fixture(scope="module")
def arrays(record: Callable[..., Path]) -> VersionReader:
    """A version of four episodes, of which one has no instruction."""
    return VersionReader(record(LENGTHS, tasks=TASKS))


@pytest.fixture(scope="module")
def untold(record: Callable[..., Path]) -> VersionReader:
    """Another, whose recording has no instructions."""
    return VersionReader(record((6, 8)))


def windowed(arrays: VersionReader, length: int = 4) -> WindowSamples:
    count = len(arrays.offsets) - 1
    return WindowSamples(arrays, Windows(arrays.offsets, np.arange(count), {"action": WindowSpan(0, length)}, pad=True))


def packed(arrays: VersionReader) -> PackedSamples:
    sequences = cut_sequences(arrays.offsets, np.arange(len(arrays.offsets) - 1), 12)
    return PackedSamples(arrays, ["action"], PackingPlan(sequences, 12))


def texts(samples: Any, numbers: Any) -> list[str]:
    return ["" if number < 0 else samples.instructions[number] for number in numbers]


def test_windows(arrays: VersionReader):
    """Each has the number of the episode that its first action is of, and that episode's instruction."""
    samples = windowed(arrays)
    assert samples.instructions == ("close it", "open the drawer")
    starts = {
        arrays.read("action", start, start + 1).tobytes(): episode
        for episode, (start, stop) in enumerate(zip(arrays.offsets, arrays.offsets[1:], strict=False))
        for start in range(start, stop)
    }
    batches = Loader(samples, global_batch_size=8)
    for batch in islice(batches, 8):
        assert batch.extras["episode"].tolist() == [starts[row[:1].tobytes()] for row in batch.arrays["action"]]
        assert texts(samples, batch.extras["instruction"]) == [TASKS[episode] for episode in batch.extras["episode"]]
    batches.close()


def test_packs_and_buckets(arrays: VersionReader):
    """Of each step of a row, -1 where it is padding; of each sequence."""
    samples = packed(arrays)
    aside = next(Loader(samples, global_batch_size=2)).extras
    for episode, number in zip(aside["episode"].flat, aside["instruction"].flat, strict=True):
        assert texts(samples, [number]) == ["" if episode < 0 else TASKS[episode]]
    sequences = cut_sequences(arrays.offsets, np.arange(4), 12)
    buckets = BucketedSamples(arrays, ["action"], sequences, [12], global_batch_size=4, multiple=1)
    aside = next(Loader(buckets)).extras
    assert texts(buckets, aside["instruction"]) == [TASKS[episode] for episode in aside["episode"]]


def test_mixtures(arrays: VersionReader, untold: VersionReader):
    """Of windows of several datasets, and of windows and packs; one without instructions has none."""
    members: list[Any] = [windowed(untold), windowed(arrays), windowed(arrays)]
    samples = MixtureSamples(members, [1, 1, 1])
    assert samples.instructions == ("close it", "open the drawer") * 2
    aside = next(Loader(samples, global_batch_size=96)).extras
    expected = [
        TASKS[episode] if dataset else "" for dataset, episode in zip(aside["dataset"], aside["episode"], strict=True)
    ]
    assert texts(samples, aside["instruction"]) == expected
    assert set(aside["instruction"].tolist()) == {-1, 0, 1, 2, 3}
    for order in ((0, 1), (1, 0)):
        pair = [windowed(arrays, length=12), packed(arrays)]
        aside = next(Loader(MixtureSamples([pair[n] for n in order], [1, 1]), global_batch_size=4)).extras
        assert aside["episode"].shape == aside["instruction"].shape == (4, 12)
        for dataset, row in zip(aside["dataset"], aside["episode"], strict=True):
            assert (len(set(row.tolist())) == 1) == (order[dataset] == 0) or -1 not in row


def test_tensors(arrays: VersionReader):
    """As tensors."""
    torch_batches = pytest.importorskip("pitools.loader.torch", reason="torch is not installed").torch_batches
    batches, plain = (
        torch_batches(Loader(windowed(arrays), global_batch_size=8)),
        Loader(windowed(arrays), global_batch_size=8),
    )
    assert next(batches).extras["instruction"].tolist() == next(plain).extras["instruction"].tolist()
    batches.close()
    plain.close()
