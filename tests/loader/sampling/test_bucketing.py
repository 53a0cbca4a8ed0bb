from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pitools.core.errors import ConfigError
from pitools.loader.loader import Loader
from pitools.loader.sampling.bucketing import BucketedSamples, quantile_edges
from pitools.loader.sampling.sequences import cut_sequences
from pitools.store.reader.version_reader import VersionReader

LENGTHS = (4, 9, 17, 3, 30, 28, 8, 2, 12, 15, 7, 21, 5, 6, 26, 11, 1, 19, 24, 10, 13, 14, 16)
EDGES = (8, 16, 32)
NAMES = ("action", "obs/image")


@pytest.fixture(scope="module")
def version(record: Callable[..., Path]) -> Path:
    return record(LENGTHS)


def bucketed(
    version: Path, *, resident: int = 64 << 20, multiple: int = 2, max_batch_steps: int = 64, **more
) -> BucketedSamples:
    arrays = VersionReader(version, resident_bytes=resident)
    sequences = cut_sequences(arrays.offsets, np.arange(len(LENGTHS)), 32)
    return BucketedSamples(arrays, NAMES, sequences, EDGES, max_batch_steps=max_batch_steps, multiple=multiple, **more)


@pytest.mark.parametrize("resident", [0, 64 << 20])
def test_batches_are_those_of_a_plain_loop(version: Path, resident: int):
    """Each sequence whole, zeros after it, the batch as long as its bucket's edge, and told what is padding."""
    samples, arrays = bucketed(version, resident=resident), VersionReader(version)
    batches = Loader(samples)
    for number, batch in enumerate(islice(batches, 30)):
        lengths = [LENGTHS[sample] for sample in batch.sample_indices]
        (edge,) = {next(edge for edge in EDGES if length <= edge) for length in lengths}
        assert batch.step == number
        assert len(lengths) == 64 // edge
        for name in NAMES:
            assert batch.arrays[name].shape[:2] == (len(lengths), edge)
            for row, sample in enumerate(batch.sample_indices.tolist()):
                start, stop = arrays.offsets[sample : sample + 2].tolist()
                assert np.array_equal(batch.arrays[name][row, : stop - start], arrays.read(name, start, stop))
                assert not batch.arrays[name][row, stop - start :].any()
        assert batch.valid_mask["action"].sum(axis=1).tolist() == lengths == batch.extras["length"].tolist()
        assert batch.extras["episode"].tolist() == batch.sample_indices.tolist()
    batches.close()


@settings(max_examples=50, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 32), min_size=1, max_size=40),
    multiple=st.integers(1, 4),
    factor=st.integers(1, 4),
    seed=st.integers(0, 9),
    shuffle=st.booleans(),
)
def test_every_sequence_comes_equally_often(version, lengths, multiple, factor, seed, shuffle):
    """Any lengths and sizes: positions follow without a gap, and after any round counts differ by one at most."""
    arrays = VersionReader(version)
    arrays._offsets = np.concatenate([[0], np.cumsum(lengths)])  # no step is read: a version is not written for each
    del arrays.manifest.arrays["episode_json"]  # it tells of other episodes
    sequences = cut_sequences(arrays.offsets, np.arange(len(lengths)), 32)
    samples = BucketedSamples(
        arrays,
        ["action"],
        sequences,
        EDGES,
        max_batch_steps=32 * multiple * factor,
        multiple=multiple,
        seed=seed,
        shuffle=shuffle,
    )
    counts, position, step = Counter(range(len(lengths))), 0, 0
    while position < 4 * len(lengths) + 200:
        number, size = samples.batch_at(position)
        drawn = samples.draw(np.arange(position, position + size))
        assert number == step
        assert size % multiple == 0
        assert size >= samples.planned_batch_size
        (edge,) = {next(edge for edge in EDGES if lengths[sample] <= edge) for sample in drawn.sample_indices}
        assert drawn.fields["action"].shape == (edge, 3)
        assert size * edge <= 32 * multiple * factor
        counts.update(drawn.sample_indices.tolist())
        position, step = position + size, step + 1
    for low, edge in zip((0, *EDGES), EDGES, strict=False):
        of_bucket = [counts[i] for i, length in enumerate(lengths) if low < length <= edge]
        # In the middle of a round its batches are shuffled, so some of the next deal may be there before the last's.
        assert not of_bucket or max(of_bucket) - min(of_bucket) <= 2 + 64 * multiple * factor // len(of_bucket)


def test_a_round_gives_each_its_due(version: Path):
    """Each of many sequences comes once in a round but for what begins the next batch; no padding beyond its edge."""
    samples = bucketed(version)
    position, observed = 0, Counter[int]()
    for _ in range(2000):
        size = samples.batch_at(position)[1]
        observed.update(samples.draw(np.arange(position, position + size)).sample_indices.tolist())
        position += size
    assert max(observed.values()) - min(observed.values()) <= 4
    padded = sum(next(edge for edge in EDGES if length <= edge) for length in LENGTHS)
    assert samples.fill == sum(LENGTHS) / padded


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_batches_are_the_same_for_any_world_size_and_resume_at_another(version: Path, world_size: int):
    """Ranks' parts are equal and make the global batch; a state of one rank goes on as several."""
    make = lambda: bucketed(version, multiple=8, max_batch_steps=256, seed=1)  # noqa: E731
    alone = Loader(make())
    expected = [(batch.step, batch.arrays["action"].copy(), batch.sample_seeds) for batch in islice(alone, 9)]
    assert len({action.shape for _, action, _ in expected}) > 1
    first = Loader(make())
    for _ in range(3):
        next(first)
    ranks = [Loader(make(), rank=rank, world_size=world_size, threads=1) for rank in range(world_size)]
    for each in ranks:
        each.load_state(first.state())
    for step, action, keys in expected[3:]:
        parts = [next(each) for each in ranks]
        assert {(part.step, len(part.sample_indices)) for part in parts} == {(step, len(action) // world_size)}
        assert np.array_equal(np.concatenate([part.arrays["action"] for part in parts]), action)
        assert np.array_equal(np.concatenate([part.sample_seeds for part in parts]), keys)
    with pytest.raises(ConfigError, match="max_batch_steps"):
        Loader(bucketed(version, multiple=8, max_batch_steps=512, seed=1)).load_state(first.state())
    for each in (alone, first, *ranks):
        each.close()


def test_any_position_is_found_at_once(version: Path):
    """A batch far into training is the one that walking there would have found."""
    samples, position = bucketed(version), 0
    for _ in range(500):
        position += samples.batch_at(position)[1]
    fresh = bucketed(version)
    assert fresh.batch_at(position) == samples.batch_at(position) == (500, samples.batch_at(position)[1])
    with pytest.raises(ConfigError, match=f"position {position + 1}: "):
        fresh.batch_at(position + 1)
    with pytest.raises(ValueError, match=f"positions {position} to {position + 99}: "):
        fresh.draw(np.arange(position, position + 100))


def test_invalid_edges_and_sizes_are_refused(version: Path):
    """Edges that do not ascend or are too small, and batch sizes that fit no sequence or divide unevenly."""
    arrays = VersionReader(version)
    sequences = cut_sequences(arrays.offsets, np.arange(len(LENGTHS)), 32)
    assert quantile_edges(sequences.lengths, 4)[-1] == max(LENGTHS)
    assert quantile_edges(np.array([5, 5, 5]), 4) == [5]
    for edges, more, message in (
        ((16, 8), {"max_batch_steps": 64}, r"edges: .*\[16, 8\]"),
        ((8, 16), {"max_batch_steps": 256}, "at most 16 steps, got 30"),
        (EDGES, {"max_batch_steps": 64}, r"max_batch_steps=64: .* 8 sequences of 32 \(expected 256\)"),
        (EDGES, {"global_batch_size": 12}, "global_batch_size=12"),
        (EDGES, {}, "max_batch_steps=0, global_batch_size=0"),
    ):
        with pytest.raises(ConfigError, match=message):
            BucketedSamples(arrays, NAMES, sequences, edges, **more)
