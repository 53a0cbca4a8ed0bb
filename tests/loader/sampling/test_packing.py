from __future__ import annotations

import json
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pitools.commands.dataset_packing import plan_packing
from pitools.core.errors import ConfigError, UsageError
from pitools.dataset.catalog.retirement import retire_version
from pitools.loader.loader import Loader
from pitools.loader.sampling.packing import PackedSamples, PackingPlan, best_fit
from pitools.loader.sampling.sequences import Sequences, cut_sequences
from pitools.store.reader.version_reader import VersionReader

LENGTHS = (40, 3, 25, 60, 17, 9, 33, 21, 5, 12)
NAMES = ("action", "obs/image")


def run(lengths: NDArray[np.int64]) -> Sequences:
    ends = np.cumsum(lengths)
    return Sequences(np.arange(len(lengths)), ends - lengths, ends)


def naive_best_fit(lengths: list[int], length: int) -> int:
    """Rows that plain best-fit decreasing needs: each sequence, the longest first, to the fullest row it fits."""
    rooms: list[int] = []
    for size in sorted(lengths, reverse=True):
        fits = [(room, i) for i, room in enumerate(rooms) if room >= size]
        if fits:
            rooms[min(fits)[1]] -= size
        else:
            rooms.append(length - size)
    return len(rooms)


@settings(max_examples=200)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=30),
    length=st.integers(1, 30),
    window=st.integers(1, 30),
    when_too_long=st.sampled_from(["cut", "drop"]),
)
def test_every_step_is_a_sequences_once(lengths, length, window, when_too_long):
    """Any episodes: whole, cut at multiples of the window, or dropped; in order, none longer than is allowed."""
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    if window > length:
        with pytest.raises(UsageError, match=f"window: .* {window}$"):
            cut_sequences(offsets, np.arange(len(lengths)), length, window=window)
        return
    sequences = cut_sequences(offsets, np.arange(len(lengths)), length, window=window, when_too_long=when_too_long)
    assert all(1 <= steps <= length for steps in sequences.lengths)
    steps = [(e, s) for e, low, high in zip(*sequences[:3], strict=True) for s in range(low, high)]
    retained = [e for e, size in enumerate(lengths) if size <= length or when_too_long == "cut"]
    assert steps == [(e, s) for e in retained for s in range(offsets[e], offsets[e + 1])]
    assert sequences.dropped == len(lengths) - len(retained)
    assert sequences.cut == (sum(size > length for size in lengths) if when_too_long == "cut" else 0)
    cuts = (sequences.start - offsets[sequences.episode]) % window
    assert not cuts.any()


def test_a_long_episode_is_refused_by_name():
    """Unless the caller said what to do with it."""
    with pytest.raises(ConfigError, match=r"episodes: 2 .* 30 steps, got 60 in episode 3"):
        cut_sequences(np.concatenate([[0], np.cumsum(LENGTHS[:5])]), np.arange(5), 30)


@settings(max_examples=200)
@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=60), room=st.integers(0, 20), seed=st.integers(0, 99))
def test_a_plan_has_every_sequence_once_and_no_row_too_long(lengths, room, seed):
    """Any lengths, in every epoch; and as many rows as plain best-fit decreasing makes."""
    length = max(lengths) + room
    plan = PackingPlan(run(np.array(lengths)), length, seed=seed)
    assert plan.rows == naive_best_fit(lengths, length)
    assert plan.fill == sum(lengths) / (plan.rows * length)
    for epoch in range(3):
        dealt = plan.sequences_of_epoch(epoch)
        assert sorted(dealt.tolist()) == list(range(len(lengths)))
        rows = [dealt[a:b] for a, b in zip(plan.first[:-1], plan.first[1:], strict=True)]
        assert all(len(row) and sum(lengths[i] for i in row) <= length for row in rows)


def test_a_hundred_thousand_lengths_are_packed_at_once():
    """Log-normal lengths: rows are at least 97 % full, and the plan takes less than a second."""
    lengths = np.clip(np.random.default_rng(0).lognormal(np.log(300), 0.6, 100_000).astype(np.int64), 1, 2048)
    began = time.process_time()
    plan = PackingPlan(run(lengths), 2048)
    dealt = plan.sequences_of_epoch(0)
    assert time.process_time() - began < 1
    assert plan.fill >= 0.97
    assert np.mean(dealt == plan.sequences_of_epoch(1)) < 0.2
    assert np.add.reduceat(lengths[dealt], plan.first[:-1]).max() <= 2048


def test_a_plan_is_the_same_for_ever():
    """Frozen: another answer would change the rows of runs that are to be resumed or repeated."""
    plan = PackingPlan(run(np.array(LENGTHS)), 60, seed=7)
    assert plan.first.tolist() == [0, 1, 4, 6, 10]
    assert plan.sequences_of_epoch(0).tolist() == [3, 0, 4, 1, 6, 2, 7, 9, 5, 8]
    ties = PackingPlan(run(np.arange(40) % 4 + 1), 7, seed=7)
    assert ties.sequences_of_epoch(0)[:10].tolist() == [11, 2, 23, 10, 39, 18, 15, 34, 35, 38]
    assert ties.sequences_of_epoch(1)[:10].tolist() == [3, 38, 31, 26, 23, 14, 11, 6, 35, 34]


def test_nothing_and_too_much_are_refused():
    """No sequence, and one that is longer than a row."""
    with pytest.raises(ConfigError, match="sequences: none"):
        PackingPlan(run(np.array([], np.int64)), 10)
    with pytest.raises(ConfigError, match="at most 10 steps, got 11"):
        PackingPlan(run(np.array([11])), 10)
    assert best_fit(np.array([0, 0, 0, 2]), 7) == [(((3, 2),), 1)]


@pytest.fixture(scope="module")
def version(record: Callable[..., Path]) -> Path:
    return record(LENGTHS)


def packed(version: Path, *, resident: int = 64 << 20, shuffle: bool = True) -> PackedSamples:
    arrays = VersionReader(version, resident_bytes=resident)
    sequences = cut_sequences(arrays.offsets, np.arange(len(LENGTHS)), 48, window=8, when_too_long="cut")
    return PackedSamples(arrays, NAMES, PackingPlan(sequences, 48, seed=3), seed=3, shuffle=shuffle)


@pytest.mark.parametrize("resident", [0, 64 << 20])
def test_batches_are_those_of_a_plain_loop(version: Path, resident: int):
    """Over more than an epoch: arrays, segments, positions, episodes and mask, to the bit, of old buffers too."""
    samples = packed(version, resident=resident)
    plan, arrays = samples.packing, VersionReader(version)
    batches = Loader(samples, global_batch_size=4)
    observed = []
    for batch in islice(batches, 6):
        for row, number in enumerate(batch.sample_indices.tolist()):
            epoch = (batch.step * 4 + row) // plan.rows
            observed.append((epoch, number))
            at, expected = 0, {name: np.zeros_like(batch.arrays[name][0]) for name in NAMES}
            segment, position, episode = np.zeros(48), np.zeros(48), np.full(48, -1)
            members = plan.sequences_of_epoch(epoch)[plan.first[number] : plan.first[number + 1]]
            for place, member in enumerate(members.tolist(), 1):
                start, stop = int(plan.sequences.start[member]), int(plan.sequences.stop[member])
                for step in range(start, stop):
                    for name in NAMES:
                        expected[name][at] = arrays.read(name, step, step + 1)[0]
                    segment[at], position[at], episode[at] = place, step - start, plan.sequences.episode[member]
                    at += 1
            assert all(np.array_equal(batch.arrays[name][row], expected[name]) for name in NAMES)
            assert np.array_equal(batch.extras["segment"][row], segment)
            assert np.array_equal(batch.extras["position"][row], position)
            assert np.array_equal(batch.extras["episode"][row], episode)
            assert np.array_equal(batch.valid_mask["action"][row], segment > 0)
    assert len({item for item in observed if item[0] == 0}) == plan.rows
    batches.close()


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_rows_are_the_same_for_any_world_size_and_resume_at_another(version: Path, world_size: int):
    """Ranks' parts make the global batch; a state of one rank goes on as several."""
    alone = Loader(packed(version), global_batch_size=8)
    expected = [
        (batch.arrays["action"].copy(), batch.extras["segment"], batch.sample_seeds) for batch in islice(alone, 5)
    ]
    first = Loader(packed(version), global_batch_size=8)
    next(first), next(first)
    ranks = [
        Loader(packed(version), global_batch_size=8, rank=r, world_size=world_size, threads=1)
        for r in range(world_size)
    ]
    for each in ranks:
        each.load_state(first.state())
    for action, segment, keys in expected[2:]:
        parts = [next(each) for each in ranks]
        assert np.array_equal(np.concatenate([part.arrays["action"] for part in parts]), action)
        assert np.array_equal(np.concatenate([part.extras["segment"] for part in parts]), segment)
        assert np.array_equal(np.concatenate([part.sample_seeds for part in parts]), keys)
    with pytest.raises(ConfigError, match="shuffle"):
        Loader(packed(version, shuffle=False), global_batch_size=8).load_state(first.state())
    for each in (alone, first, *ranks):
        each.close()


def test_the_command_says_how_full_rows_would_be(record: Callable[..., Path]):
    """A record for each length, with what is cut or dropped; the numbers are those of the plan."""
    path = record(LENGTHS, name="pack", masks={"train": [0, 1, 2, 3]})
    run = CliRunner().invoke(plan_packing, [str(path), "--length", "48", "--length", "80", "--split", "train"])
    assert run.exit_code == 0, run.output
    first, second = map(json.loads, run.stdout.splitlines())
    assert first["schema"] == "pit.packing-report/1"
    assert (first["episodes"], first["sequences"], first["cut"], first["dropped"]) == (4, 5, 1, 0)
    assert (first["rows"], first["steps"], first["padding_steps"], first["longest"]) == (3, 128, 16, 60)
    assert (second["rows"], second["fill"], second["cut"]) == (2, 0.8, 0)
    run = CliRunner().invoke(
        plan_packing, [str(path), "--length", "48", "--when-too-long", "drop", "--format", "table"]
    )
    assert run.exit_code == 0, run.output
    assert run.stdout.splitlines()[0].split()[-2:] == ["CUT", "DROPPED"]
    assert run.stdout.splitlines()[1].split()[-2:] == ["0", "1"]
    retire_version(path, reason="blurred")
    run = CliRunner().invoke(plan_packing, [str(path), "--length", "48"])
    assert (run.exit_code, run.stderr.startswith(f"pit: note: {path}: retired")) == (0, True)
    assert len(run.stderr.splitlines()) == 1
    run = CliRunner().invoke(plan_packing, [str(path), "--length", "48", "--when-too-long", "refuse"])
    assert isinstance(run.exception, ConfigError)
