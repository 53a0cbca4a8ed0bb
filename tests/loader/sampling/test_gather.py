from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from pitools.core.errors import UsageError
from pitools.loader.sampling.bucketing import BucketedSamples
from pitools.loader.sampling.packing import PackedSamples, PackingPlan
from pitools.loader.sampling.protocol import Samples
from pitools.loader.sampling.sequences import cut_sequences
from pitools.loader.sampling.window_samples import WindowSamples
from pitools.loader.sampling.windows import Windows, WindowSpan
from pitools.store.reader.version_reader import VersionReader

LENGTHS = (7, 1, 4, 2)


@pytest.fixture(scope="module")
def version(record: Callable[..., Path]) -> Path:
    """Episodes that are shorter than some windows."""
    return record(LENGTHS)


@pytest.mark.parametrize("resident", [0, 64 << 20])
@pytest.mark.parametrize("order", ["slice", "rows"])
def test_padded_windows_may_lie_beside_their_episode(version: Path, resident: int, order: str):
    """Any window about any step, such as the next one alone: from memory and from files the steps of a plain loop."""
    arrays = VersionReader(version, resident_bytes=resident)
    action, offsets = VersionReader(version).read("action", 0, sum(LENGTHS)), arrays.offsets.tolist()
    for index in range(-9, 10):
        for length in (1, 2, 5, 9):
            windows = Windows(arrays.offsets, np.arange(4), {"action": WindowSpan(index, length - index)}, pad=True)
            samples = WindowSamples(arrays, windows, shuffle=False)
            drawn, out = samples.draw(np.arange(len(windows))), np.full((len(windows), length, 3), np.nan)
            rows = np.arange(len(windows))[::-1] if order == "rows" else None
            samples.read(drawn, 0, len(windows), {"action": out}, rows)
            expected = np.stack(
                [
                    action[np.clip(np.arange(step - index, step - index + length), start, stop - 1)]
                    for start, stop in pairwise(offsets)
                    for step in range(start, stop)
                ]
            )
            np.testing.assert_array_equal(out if rows is None else out[::-1], expected)


def test_what_is_not_along_steps_is_no_sample(version: Path):
    """The array of episodes' ends has rows of its own: taken for steps it would give others, and no error."""
    arrays = VersionReader(version)
    sequences, names = cut_sequences(arrays.offsets, np.arange(4), 8), ["action", "episode_offsets"]
    spans = dict.fromkeys(names, WindowSpan(0, 1))
    created: list[Callable[[], Samples]] = [
        lambda: WindowSamples(arrays, Windows(arrays.offsets, np.arange(4), spans, pad=True)),
        lambda: PackedSamples(arrays, names, PackingPlan(sequences, 8)),
        lambda: BucketedSamples(arrays, names, sequences, [8], global_batch_size=8),
    ]
    for make in created:
        with pytest.raises(UsageError, match="'episode_offsets': "):
            make()


def test_windows_of_another_version_are_refused(version: Path, record: Callable[..., Path]):
    """Mixed up, as where several datasets are mixed, they would reach over the ends of episodes, and no error."""
    arrays, other = VersionReader(version), VersionReader(record((7, 2, 3, 2)))
    spans, sequences = {"action": WindowSpan(0, 1)}, cut_sequences(other.offsets, np.arange(4), 8)
    created: list[Callable[[], Samples]] = [
        lambda: WindowSamples(arrays, Windows(other.offsets, np.arange(4), spans)),
        lambda: WindowSamples(arrays, Windows(np.array([0, 1, 1, 1, 1, 2]), np.arange(5), spans)),
        lambda: PackedSamples(arrays, ["action"], PackingPlan(sequences, 8)),
        lambda: BucketedSamples(arrays, ["action"], sequences, [8], global_batch_size=8),
    ]
    for make in created:
        with pytest.raises(UsageError, match="of another version"):
            make()
