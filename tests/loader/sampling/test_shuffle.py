from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pitools.loader.sampling.shuffle import ShuffledOrder, rank_slice

FROZEN = [572, 823, 304, 532, 311, 238, 210, 397, 963, 659, 330, 531, 994, 709, 445, 740, 3, 640, 595, 932]
KEYS = ["0x865004ea64a24d92", "0xcdd3074b48d7eab3", "0x7364c9761ce4e827"]


def order(samples: int, seed: int = 0, dataset: str = "d" * 32) -> ShuffledOrder:
    return ShuffledOrder(dataset=dataset, samples=samples, seed=seed)


@settings(max_examples=200)
@given(samples=st.integers(1, 5000), seed=st.integers(-(2**40), 2**40), epoch=st.integers(0, 1000))
def test_an_epoch_has_every_sample_once(samples: int, seed: int, epoch: int):
    """Any number of samples, seed and epoch: a permutation, whichever positions are asked for together."""
    actual = order(samples, seed).samples_at(np.arange(epoch * samples, (epoch + 1) * samples))
    assert np.array_equal(np.sort(actual), np.arange(samples))
    some = np.arange(epoch * samples, (epoch + 1) * samples, 3)[::-1]
    assert np.array_equal(order(samples, seed).samples_at(some), actual[::3][::-1])


def test_it_is_the_same_for_ever():
    """Frozen: another answer would change the order of runs that are to be resumed or repeated."""
    assert order(1000, 7).samples_at(np.arange(990, 1010)).tolist() == FROZEN
    assert [hex(key) for key in order(1000, 7).seeds_at(np.arange(3)).tolist()] == KEYS


def test_everything_that_names_it_changes_it():
    """Another dataset, seed or epoch is another order."""
    numbers = np.arange(1000)
    actual = [
        order(1000).samples_at(numbers),
        order(1000, 1).samples_at(numbers),
        order(1000, dataset="e").samples_at(numbers),
        order(1000).samples_at(numbers + 1000),
    ]
    for number, item in enumerate(actual):
        for other in actual[:number]:
            assert np.mean(item == other) < 0.02


@pytest.mark.parametrize("samples", [2, 5, 24, 1000, 65_537])
def test_it_is_as_good_as_a_shuffle(samples: int):
    """Over many seeds each sample comes to each place about as often, and neighbours do not stay neighbours."""
    rounds, places = 2000, min(samples, 24)
    numbers = np.arange(places)
    actual = np.stack([order(samples, seed).samples_at(numbers) for seed in range(rounds)])
    # Means of uniform numbers: five deviations of a mean are never seen by chance.
    deviation = np.sqrt((samples**2 - 1) / 12 / rounds)
    assert np.all(np.abs(actual.mean(axis=0) - (samples - 1) / 2) < 5 * deviation + 1e-9)
    if samples > 100:
        steps = np.diff(actual, axis=1)
        assert np.mean(np.abs(steps) < samples / 100) < 0.03


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_the_global_batch_is_the_same_for_any_world_size(world_size: int):
    """What the ranks take, one after another, is the whole batch."""
    parts = [range(*rank_slice(64, rank, world_size)) for rank in range(world_size)]
    assert [place for part in parts for place in part] == list(range(64))
    with pytest.raises(ValueError, match=f"batch of {world_size - 1}: .* of {world_size}"):
        rank_slice(world_size - 1, 0, world_size)


def test_a_hundred_million_samples_take_no_memory():
    """No list of samples is made: any position of 10⁸ samples is computed from itself."""
    large = order(10**8)
    tracemalloc.start()
    actual = large.samples_at(np.arange(99_999_000, 99_999_256))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20
    assert len(set(actual.tolist())) == 256
    assert actual.min() >= 0
    assert actual.max() < 10**8


def test_what_is_no_position():
    """A negative position, and an order of nothing."""
    with pytest.raises(ValueError, match=r"position: .* -1"):
        order(10).samples_at(np.array([-1]))
    with pytest.raises(ValueError, match="samples: none"):
        order(0).samples_at(np.array([0]))
