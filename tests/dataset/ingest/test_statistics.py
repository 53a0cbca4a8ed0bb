from __future__ import annotations

from fractions import Fraction

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pitools.dataset.ingest import statistics


@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=5),
    width=st.integers(1, 4),
    seed=st.integers(0, 99),
    bad=st.floats(0, 1),
    dtype=st.sampled_from(["f2", "f4", "f8", "i8", "u1", "?"]),
)
def test_folded_parts_are_the_whole(lengths, width, seed, bad, dtype) -> None:
    """Folded from parts, also from empty ones and those with nothing finite, statistics are NumPy's of the whole."""
    rng = np.random.default_rng(seed)
    blocks = [(rng.normal(size=(n, width)) * 100).astype(dtype) for n in lengths]
    for block in blocks if dtype[0] == "f" else ():
        block[rng.random(block.shape) < bad] = rng.choice([np.nan, np.inf, -np.inf])
    starts = np.cumsum([0, *lengths])
    parts = [statistics.stats_of_block(block, int(position)) for block, position in zip(blocks, starts, strict=False)]
    statistics_by_name = statistics.to_statistics(statistics.fold_stats(parts, width))
    full = np.concatenate(blocks).astype(float)
    assert (statistics_by_name.rows, statistics_by_name.non_finite) == (len(full), int((~np.isfinite(full)).sum()))
    counts = tuple(np.isfinite(full).sum(axis=0).tolist())
    assert statistics_by_name.finite == (counts if statistics_by_name.non_finite else msgspec.UNSET)
    for i in range(width):
        column = full[:, i][np.isfinite(full[:, i])]
        if not len(column):
            assert (
                statistics_by_name.minimum[i],
                statistics_by_name.maximum[i],
                statistics_by_name.mean[i],
                statistics_by_name.deviation[i],
            ) == (0, 0, 0, 0)
            continue
        assert (statistics_by_name.minimum[i], statistics_by_name.maximum[i]) == (column.min(), column.max())
        assert statistics_by_name.mean[i] == pytest.approx(column.mean(), rel=1e-12, abs=1e-9)
        assert statistics_by_name.deviation[i] == pytest.approx(column.std(), rel=1e-9, abs=1e-9)


def test_columns() -> None:
    """A vector's items, an image's channels, and one number for a plain image, a scalar and what has too many."""
    actual = {row: statistics.column_count(row) for row in ((), (7,), (48, 64), (48, 64, 3), (2, 48, 64, 3))}
    assert actual == {(): 1, (7,): 7, (48, 64): 1, (48, 64, 3): 3, (2, 48, 64, 3): 3}
    most = statistics.MAX_COLUMNS
    assert [statistics.column_count(row) for row in ((most,), (most + 1,), (2, 2, most + 1))] == [most, 1, 1]


def test_images_are_chosen_by_their_number() -> None:
    """Of images every 32nd is looked at, counted over the whole array, wherever a shard begins."""
    frames = np.arange(200, dtype=np.uint8)[:, None, None, None] * np.ones((1, 2, 2, 3), np.uint8)
    parts = [statistics.stats_of_block(frames[a:b], a) for a, b in ((0, 33), (33, 50), (50, 200))]
    statistics_by_name = statistics.to_statistics(statistics.fold_stats(parts, 3))
    assert statistics_by_name.rows == 7
    assert statistics_by_name.minimum == (0, 0, 0)
    assert statistics_by_name.maximum == (192, 192, 192)


@pytest.mark.filterwarnings("error")
def test_what_overflows_is_still_a_number() -> None:
    """Values near the largest there is give finite statistics, which JSON can hold, and no warning."""
    partial = statistics.stats_of_block(np.array([[1.7e308], [-1.7e308]] * 5), 0)
    statistics_by_name = statistics.to_statistics(statistics.fold_stats([partial, partial], 1))
    assert np.isfinite([*statistics_by_name.mean, *statistics_by_name.deviation]).all()


@pytest.mark.parametrize("scale", [1e8, 1e15])
def test_no_cancellation(scale) -> None:
    """Small deviations about a large mean are those that NumPy gives of the values less their mean."""
    values = scale + np.random.default_rng(0).integers(-4, 5, (5000, 2)).astype(float)
    parts = [statistics.stats_of_block(values[index : index + 700], index) for index in range(0, 5000, 700)]
    statistics_by_name = statistics.to_statistics(statistics.fold_stats(parts, 2))
    np.testing.assert_allclose(
        statistics_by_name.deviation, (values - scale).std(axis=0), rtol=1e-9 if scale < 1e9 else 1e-2
    )


def test_bytes_are_counted_exactly() -> None:
    """Statistics of bytes are the nearest numbers to the true ones, whatever processor adds them up."""
    frames = np.random.default_rng(0).integers(0, 256, (32, 61, 67, 3), np.uint8)
    partial = statistics.stats_of_block(frames, 0)
    for channel in range(3):
        values = [int(value) for value in frames[0, :, :, channel].ravel()]
        total, squares, n = sum(values), sum(value * value for value in values), len(values)
        assert partial.mean[channel] == float(Fraction(total, n))
        assert partial.squared_deviations[channel] == float(Fraction(n * squares - total * total, n))
    constant = statistics.to_statistics(statistics.stats_of_block(np.full((64, 480, 640, 3), 255, np.uint8), 0))
    assert (constant.mean, constant.deviation) == ((255.0,) * 3, (0.0,) * 3)
