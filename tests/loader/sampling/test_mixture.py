from __future__ import annotations

import pickle
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pitools.core.errors import ConfigError
from pitools.loader.loader import Loader
from pitools.loader.sampling.bucketing import BucketedSamples
from pitools.loader.sampling.mixture import MixtureSamples
from pitools.loader.sampling.packing import PackedSamples, PackingPlan
from pitools.loader.sampling.sequences import cut_sequences
from pitools.loader.sampling.weighted_turns import MAX_CYCLE, integer_weights, make_cycle
from pitools.loader.sampling.window_samples import WindowSamples
from pitools.loader.sampling.windows import Windows, WindowSpan
from pitools.store.reader.version_reader import VersionReader

SPANS = {"action": WindowSpan(0, 4), "obs/image": WindowSpan(1, 1)}
WEIGHTS = (0.5, 0.3, 0.2)


@settings(max_examples=100, deadline=None)
@given(counts=st.lists(st.integers(1, 60), min_size=1, max_size=7).map(tuple))
def test_turns_are_as_even_as_can_be(counts: tuple[int, ...]):
    """Any parts: each has them all in a cycle, in order; before any place within one of its due."""
    cycle, each = sum(counts), range(len(counts))
    actual = make_cycle(counts)
    joined_array = np.concatenate([np.zeros((1, len(counts))), np.cumsum(actual.member[:, None] == each, axis=0)])
    assert joined_array[-1].tolist() == list(counts)
    assert all(actual.index_within[i] == joined_array[i, actual.member[i]] for i in range(cycle))
    off = joined_array - np.arange(cycle + 1)[:, None] * np.array(counts) / cycle
    assert np.abs(off).max() < 1
    assert (off.max(axis=0) - off.min(axis=0)).max() < 2
    if len(counts) == 2:
        assert (off.max(axis=0) - off.min(axis=0)).max() <= 1


def test_turns_are_the_same_for_ever():
    """Frozen: another answer would change the order of runs that are to be resumed or repeated."""
    assert make_cycle((7, 3, 2)).member.tolist() == [0, 1, 0, 2, 0, 0, 1, 0, 0, 2, 1, 0]


@given(weights=st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=8))
def test_parts_are_in_the_proportion_of_the_weights(weights: list[float]):
    """Exact for small fractions, else to one part in 65,536."""
    try:
        actual = integer_weights(weights)
    except ConfigError as error:
        assert min(weights) / sum(weights) < 1 / MAX_CYCLE, error  # noqa: PT017
        return
    assert sum(actual) <= MAX_CYCLE
    for part, weight in zip(actual, weights, strict=True):
        assert abs(part / sum(actual) - weight / sum(weights)) <= 1 / MAX_CYCLE


def test_weights_that_are_none():
    """Zero, negative, not a number, too small."""
    assert integer_weights([0.5, 0.3, 0.2]) == (5, 3, 2)
    assert integer_weights([1, 2, 1]) == (1, 2, 1)
    for wrong in ([], [1, 0], [1, -1], [float("nan")], [float("inf"), 1]):
        with pytest.raises(ConfigError, match="weights"):
            integer_weights(wrong)
    with pytest.raises(ConfigError, match=r"weight 1e-07: .*65536"):
        integer_weights([1, 1e-7])


@pytest.fixture(scope="module")
def versions(record: Callable[..., Path]) -> list[Path]:
    """Three datasets of different sizes; the last calls its action otherwise."""
    return [record(lengths, name=f"set{n}", seed=n) for n, lengths in enumerate([(20, 31, 9), (14, 40), (7, 8, 5, 30)])]


def windowed(path: Path, *, resident: int = 64 << 20, pad: bool = True, seed: int = 0) -> WindowSamples:
    arrays = VersionReader(path, resident_bytes=resident)
    return WindowSamples(arrays, Windows(arrays.offsets, np.arange(len(arrays.offsets) - 1), SPANS, pad=pad), seed=seed)


def mixture(versions: list[Path], *, resident: int = 64 << 20, pad: bool = True) -> MixtureSamples:
    return MixtureSamples([windowed(path, resident=resident, pad=pad) for path in versions], WEIGHTS)


@pytest.mark.parametrize("resident", [0, 64 << 20])
def test_batches_are_those_of_a_plain_loop(versions: list[Path], resident: int):
    """Each sample is the next of its own dataset's order, whoever's turn it is, to the bit; shares are the weights'."""
    samples = mixture(versions, resident=resident, pad=True)
    members, reader = [windowed(path) for path in versions], [VersionReader(path) for path in versions]
    batches = Loader(samples, global_batch_size=32)
    used: list[list[int]] = [[], [], []]
    for batch in islice(batches, 10):
        for row, sample in enumerate(batch.sample_indices.tolist()):
            number = int(batch.extras["dataset"][row])
            arrays = reader[number]
            place = Windows(arrays.offsets, np.arange(len(arrays.offsets) - 1), SPANS, pad=True).locate([sample])
            start, stop, anchor = (int(field[0]) for field in place[1:])
            for name, span in SPANS.items():
                steps = np.arange(anchor - span.before, anchor + span.after)
                expected = arrays.read(name, start, stop)[np.clip(steps, start, stop - 1) - start]
                assert np.array_equal(batch.arrays[name][row], expected)
                assert np.array_equal(batch.valid_mask[name][row], (steps >= start) & (steps < stop))
            used[number].append(sample)
    for number, member in enumerate(members):
        own = member.order.samples_at(np.arange(8192)).tolist()
        assert used[number] == own[: len(used[number])]
        assert abs(len(used[number]) - 320 * WEIGHTS[number]) < 1
    batches.close()


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_batches_are_the_same_for_any_world_size_and_resume_at_another(versions, world_size: int):
    """Ranks' parts make the global batch, with the same keys; a state of one rank goes on as several."""
    alone, first = (Loader(mixture(versions), global_batch_size=24) for _ in range(2))
    expected = [
        (batch.arrays["obs/image"].copy(), batch.extras["dataset"], batch.sample_seeds) for batch in islice(alone, 7)
    ]
    next(first), next(first)
    ranks = [
        Loader(mixture(versions), global_batch_size=24, rank=rank, world_size=world_size, threads=1)
        for rank in range(world_size)
    ]
    for each in ranks:
        each.load_state(first.state())
    for image, dataset, keys in expected[2:]:
        actual = [next(each) for each in ranks]
        assert np.array_equal(np.concatenate([part.arrays["obs/image"] for part in actual]), image)
        assert np.array_equal(np.concatenate([part.extras["dataset"] for part in actual]), dataset)
        assert np.array_equal(np.concatenate([part.sample_seeds for part in actual]), keys)
    for each in (alone, first, *ranks):
        each.close()


def test_a_state_of_another_mixture_is_refused(versions: list[Path]):
    """Other weights, another order of one of the datasets."""
    state = Loader(mixture(versions), global_batch_size=8).state()
    members = [windowed(path) for path in versions]
    with pytest.raises(ConfigError, match=r"weights .* got '5 3 2'"):
        Loader(MixtureSamples(members, [1, 1, 1]), global_batch_size=8).load_state(state)
    with pytest.raises(ConfigError, match="2 seed"):
        Loader(MixtureSamples([*members[:2], windowed(versions[2], seed=1)], WEIGHTS), global_batch_size=8).load_state(
            state
        )


def test_datasets_that_differ_are_named_unless_renamed(versions, record: Callable[..., Path]):
    """Another name of an array is an error naming both datasets, and none once it is renamed."""
    version_reader = VersionReader(record((10, 12), name="other", state="obs/joints"))
    spans = {"action": WindowSpan(0, 4), "obs/joints": WindowSpan(1, 1)}
    second = WindowSamples(version_reader, Windows(version_reader.offsets, np.arange(2), spans))
    arrays = VersionReader(versions[0])
    first = WindowSamples(
        arrays, Windows(arrays.offsets, np.arange(3), {"action": WindowSpan(0, 4), "obs/state": WindowSpan(1, 1)})
    )
    with pytest.raises(ConfigError, match=r"obs/joints: .*got float32 ") as error:
        MixtureSamples([first, second], [1, 1])
    assert str(versions[0]) in str(error.value)
    assert str(version_reader.path) in str(error.value)
    mixed = MixtureSamples([first, second], [1, 1], rename={1: {"obs/joints": "obs/state"}})
    batch = next(Loader(mixed, global_batch_size=4))
    (row,) = np.flatnonzero(batch.extras["dataset"] == 1)[:1]
    anchor = int(Windows(version_reader.offsets, np.arange(2), spans).locate(batch.sample_indices[[row]]).anchor[0])
    assert np.array_equal(batch.arrays["obs/state"][row], version_reader.read("obs/joints", anchor - 1, anchor + 1))
    with pytest.raises(ConfigError, match=r"rename: .*'obs/joint'"):
        MixtureSamples([first, second], [1, 1], rename={1: {"obs/joint": "obs/state"}})
    with pytest.raises(ConfigError, match=r"rename: .*'action'.*'action'"):
        MixtureSamples([first, second], [1, 1], rename={1: {"obs/joints": "action"}})
    with pytest.raises(ConfigError, match=r"weights: .*expected 1, got 2"):
        MixtureSamples([first], [1, 1])


def test_another_process_is_given_the_same(versions: list[Path]):
    """Samples of any kind, sent to another process, draw what they drew here."""
    arrays = VersionReader(versions[0])
    sequences = cut_sequences(arrays.offsets, np.arange(3), 40)
    packs = PackedSamples(arrays, ["action"], PackingPlan(sequences, 40))
    buckets = BucketedSamples(arrays, ["action"], sequences, [16, 40], global_batch_size=2, multiple=2)
    for samples in (mixture(versions), packs, buckets):
        record = pickle.loads(pickle.dumps(samples))
        assert record.identity == samples.identity
        first, two = (
            next(Loader(each, global_batch_size=0 if each.planned_batch_size else 4)) for each in (samples, record)
        )
        assert np.array_equal(first.sample_indices, two.sample_indices)
        assert np.array_equal(first.arrays["action"], two.arrays["action"])


def test_packs_and_mixtures_can_be_mixed(versions: list[Path]):
    """Rows of packs from two datasets, and a mixture as a part of another: each row is as its own would have it."""
    packs = []
    for path in versions[:2]:
        arrays = VersionReader(path)
        sequences = cut_sequences(arrays.offsets, np.arange(len(arrays.offsets) - 1), 40)
        packs.append(PackedSamples(arrays, ["action"], PackingPlan(sequences, 40)))
    batch = next(Loader(MixtureSamples([MixtureSamples(packs, [1, 1]), packs[0]], [1, 1]), global_batch_size=8))
    for row, (number, sample) in enumerate(zip(batch.extras["dataset"], batch.sample_indices, strict=True)):
        steps = int((batch.extras["segment"][row] > 0).sum())
        assert steps == int(batch.valid_mask["action"][row].sum()) > 0
        assert not batch.arrays["action"][row, steps:].any()
        assert np.abs(batch.arrays["action"][row, :steps]).all()
        assert number in (0, 1)
        assert 0 <= sample < 3
