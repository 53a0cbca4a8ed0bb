"""Which episode a sample is of, and what the recording asked for in it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pitools.loader.loader import Loader
from pitools.loader.sampling.bucketing import Bucketed
from pitools.loader.sampling.mixture import Mixture
from pitools.loader.sampling.packing import Packed, Packing
from pitools.loader.sampling.protocol import Windowed
from pitools.loader.sampling.sequences import sequences
from pitools.loader.sampling.windows import Span, Windows
from pitools.store.reader.version_reader import Arrays

LENGTHS, TASKS = (9, 12, 5, 7), ("open the drawer", "", "close it", "open the drawer")


@pytest.fixture(scope="module")
def arrays(record: Callable[..., Path]) -> Arrays:
    """A version of four episodes, of which one has no instruction."""
    return Arrays(record(LENGTHS, tasks=TASKS))


@pytest.fixture(scope="module")
def untold(record: Callable[..., Path]) -> Arrays:
    """Another, whose recording has no instructions."""
    return Arrays(record((6, 8)))


def windowed(arrays: Arrays, length: int = 4) -> Windowed:
    count = len(arrays.offsets) - 1
    return Windowed(arrays, Windows(arrays.offsets, np.arange(count), {"action": Span(0, length)}, pad=True))


def packed(arrays: Arrays) -> Packed:
    known = sequences(arrays.offsets, np.arange(len(arrays.offsets) - 1), 12)
    return Packed(arrays, ["action"], Packing(known, 12))


def texts(samples: Any, numbers: Any) -> list[str]:
    return ["" if number < 0 else samples.instructions[number] for number in numbers]


def test_windows(arrays: Arrays):
    """Each has the number of the episode that its first action is of, and that episode's instruction."""
    samples = windowed(arrays)
    assert samples.instructions == ("close it", "open the drawer")
    starts = {
        arrays.read("action", start, start + 1).tobytes(): episode
        for episode, (start, stop) in enumerate(zip(arrays.offsets, arrays.offsets[1:], strict=False))
        for start in range(start, stop)
    }
    batches = Loader(samples, batch_size=8)
    for batch in islice(batches, 8):
        assert batch.aside["episode"].tolist() == [starts[row[:1].tobytes()] for row in batch.arrays["action"]]
        assert texts(samples, batch.aside["instruction"]) == [TASKS[episode] for episode in batch.aside["episode"]]
    batches.close()


def test_packs_and_buckets(arrays: Arrays):
    """Of each step of a row, -1 where it is padding; of each sequence."""
    samples = packed(arrays)
    aside = next(Loader(samples, batch_size=2)).aside
    for episode, number in zip(aside["episode"].flat, aside["instruction"].flat, strict=True):
        assert texts(samples, [number]) == ["" if episode < 0 else TASKS[episode]]
    known = sequences(arrays.offsets, np.arange(4), 12)
    buckets = Bucketed(arrays, ["action"], known, [12], batch_size=4, multiple=1)
    aside = next(Loader(buckets)).aside
    assert texts(buckets, aside["instruction"]) == [TASKS[episode] for episode in aside["episode"]]


def test_mixtures(arrays: Arrays, untold: Arrays):
    """Of windows of several datasets, and of windows and packs; one without instructions has none."""
    members: list[Any] = [windowed(untold), windowed(arrays), windowed(arrays)]
    samples = Mixture(members, [1, 1, 1])
    assert samples.instructions == ("close it", "open the drawer") * 2
    aside = next(Loader(samples, batch_size=96)).aside
    expected = [
        TASKS[episode] if dataset else "" for dataset, episode in zip(aside["dataset"], aside["episode"], strict=True)
    ]
    assert texts(samples, aside["instruction"]) == expected
    assert set(aside["instruction"].tolist()) == {-1, 0, 1, 2, 3}
    for order in ((0, 1), (1, 0)):
        pair = [windowed(arrays, length=12), packed(arrays)]
        aside = next(Loader(Mixture([pair[n] for n in order], [1, 1]), batch_size=4)).aside
        assert aside["episode"].shape == aside["instruction"].shape == (4, 12)
        for dataset, row in zip(aside["dataset"], aside["episode"], strict=True):
            assert (len(set(row.tolist())) == 1) == (order[dataset] == 0) or -1 not in row


def test_tensors(arrays: Arrays):
    """As tensors."""
    torch_batches = pytest.importorskip("pitools.loader.torch", reason="torch is not installed").torch_batches
    batches, plain = torch_batches(Loader(windowed(arrays), batch_size=8)), Loader(windowed(arrays), batch_size=8)
    assert next(batches).aside["instruction"].tolist() == next(plain).aside["instruction"].tolist()
    batches.close()
    plain.close()
