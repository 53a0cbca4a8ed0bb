"""Compute the statistics of an array during the ingest, bit for bit the same for any number of workers.

Each shard gives partial results over its steps, which are folded in the order of the shards, in float64: the bits
depend on the content alone. Of images, every FRAME_SAMPLE_STEP-th frame of the array is sampled.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import reduce
from itertools import starmap
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from pitools.dataset.ingest.chunking import ArraySpec
from pitools.store.manifest import Statistics

_BLOCK_ITEMS = 1 << 20  # of float64, at a time
FRAME_SAMPLE_STEP = 32
MAX_COLUMNS = 4096
_LARGEST = float(np.finfo(np.float64).max)

Floats = tuple[float, ...]


class PartialStats(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of some steps: sampled rows, their non-finite items, and for each column the count, extremes, mean
    and sum of squared deviations of the finite items."""

    rows: int
    non_finite: int
    count: tuple[int, ...]
    minimum: Floats
    maximum: Floats
    mean: Floats
    squared_deviations: Floats


def column_count(row: tuple[int, ...]) -> int:
    """Return the number of columns of an array's statistics: a vector's items or an image's channels; 1 for (H, W)
    and for more than MAX_COLUMNS."""
    last = row[-1] if len(row) in (1, 3) or len(row) > 3 else 1
    return last if last <= MAX_COLUMNS else 1


def has_statistics(dtype: str) -> bool:
    """Return whether values of this dtype are ordered; complex ones are not."""
    return np.dtype(dtype).kind in "biuf"


def stats_of_block(block: NDArray[Any], first: int) -> PartialStats:
    """Return the statistics of a block of steps. first: index of the first step in the array."""
    row = block.shape[1:]
    if len(row) >= 2:
        block = block[-first % FRAME_SAMPLE_STEP :: FRAME_SAMPLE_STEP]
    return fold_stats(starmap(_of_rows, ((part, column_count(row)) for part in _slices(block))), column_count(row))


def fold_stats(partials: Iterable[PartialStats], width: int) -> PartialStats:
    """Combine partial statistics in this order. width: number of columns."""
    zeros = (0.0,) * width
    empty = PartialStats(
        rows=0, non_finite=0, count=(0,) * width, minimum=zeros, maximum=zeros, mean=zeros, squared_deviations=zeros
    )
    return reduce(_add, partials, empty)


def to_statistics(partial: PartialStats) -> Statistics:
    """Return the statistics as the manifest records them."""
    deviation = (
        math.sqrt(squares / max(1, n)) for squares, n in zip(partial.squared_deviations, partial.count, strict=True)
    )
    return Statistics(
        rows=partial.rows,
        minimum=partial.minimum,
        maximum=partial.maximum,
        mean=partial.mean,
        deviation=tuple(deviation),
        non_finite=partial.non_finite,
        finite=partial.count if partial.non_finite else msgspec.UNSET,
    )


def fold_shards(
    spec: ArraySpec, partials: Iterable[PartialStats], base: PartialStats | None = None
) -> tuple[PartialStats, PartialStats]:
    """Return the statistics of an array's full shards, from which an append continues, and of all shards.

    partials: of the shards in order, without those that `base` covers.
    """
    rest, width = list(partials), column_count(spec.shape[1:])
    tail = len(rest) - (spec.shape[0] % spec.shard > 0)
    full = reduce(_add, rest[:tail], base or fold_stats((), width))
    return full, reduce(_add, rest[tail:], full)


def _slices(block: NDArray[Any]) -> Iterator[NDArray[Any]]:
    rows = max(1, _BLOCK_ITEMS // math.prod(block.shape[1:]))
    for start in range(0, len(block), rows):
        yield block[start : start + rows]


def _of_rows(block: NDArray[Any], width: int) -> PartialStats:
    # Columns first, each contiguous: reducing along a last axis of three is ten times slower.
    items = np.ascontiguousarray(block.reshape(-1, width).T)
    return (_of_bytes if items.dtype == np.uint8 else _of_numbers)(items, len(block))


def _of_bytes(items: NDArray[np.uint8], rows: int) -> PartialStats:
    """Compute in integers: exact, whereas products of floats depend on the processor type."""
    values = np.arange(256)
    histograms = [np.bincount(column, minlength=256) for column in items]
    n = items.shape[1]
    sums = [(int((histogram * values).sum()), int((histogram * values**2).sum())) for histogram in histograms]
    occurring = [np.flatnonzero(histogram) for histogram in histograms]
    return PartialStats(
        rows=rows,
        non_finite=0,
        count=(n,) * len(items),
        minimum=tuple(float(levels[0]) for levels in occurring),
        maximum=tuple(float(levels[-1]) for levels in occurring),
        mean=tuple(total / n for total, _ in sums),
        squared_deviations=tuple((n * squares - total * total) / n for total, squares in sums),
    )


def _of_numbers(items: NDArray[Any], rows: int) -> PartialStats:
    values = items.astype(np.float64)
    finite = np.isfinite(values)
    columns = [column[is_finite] for column, is_finite in zip(values, finite, strict=True)]
    with np.errstate(over="ignore", invalid="ignore"):
        mean = [float(column.mean()) if len(column) else 0.0 for column in columns]
        squares = [float(((column - middle) ** 2).sum()) for column, middle in zip(columns, mean, strict=True)]
    return PartialStats(
        rows=rows,
        non_finite=int(values.size - finite.sum()),
        count=tuple(map(len, columns)),
        minimum=tuple(float(column.min()) if len(column) else 0.0 for column in columns),
        maximum=tuple(float(column.max()) if len(column) else 0.0 for column in columns),
        mean=_clip_to_json(mean),
        squared_deviations=_clip_to_json(squares),
    )


def _add(a: PartialStats, b: PartialStats) -> PartialStats:
    """Combine two by Chan's rule. Adding an empty one keeps the other's bits."""
    if not a.rows or not b.rows:
        return b if b.rows else a
    both = [
        _add_column(a, b, column)
        if a.count[column] and b.count[column]
        else _column_of(b if b.count[column] else a, column)
        for column in range(len(a.count))
    ]
    count, minimum, maximum, mean, squares = zip(*both, strict=True)
    return PartialStats(
        rows=a.rows + b.rows,
        non_finite=a.non_finite + b.non_finite,
        count=count,
        minimum=minimum,
        maximum=maximum,
        mean=_clip_to_json(mean),
        squared_deviations=_clip_to_json(squares),
    )


def _column_of(partial: PartialStats, index: int) -> tuple[int, float, float, float, float]:
    return (
        partial.count[index],
        partial.minimum[index],
        partial.maximum[index],
        partial.mean[index],
        partial.squared_deviations[index],
    )


def _add_column(a: PartialStats, b: PartialStats, index: int) -> tuple[int, float, float, float, float]:
    n, gap = a.count[index] + b.count[index], b.mean[index] - a.mean[index]
    mean = a.mean[index] + gap * (b.count[index] / n)
    squares = (
        a.squared_deviations[index] + b.squared_deviations[index] + gap * gap * (a.count[index] * (b.count[index] / n))
    )
    return n, min(a.minimum[index], b.minimum[index]), max(a.maximum[index], b.maximum[index]), mean, squares


def _clip_to_json(values: Iterable[float]) -> Floats:
    """Clip infinities to the largest float64, and NaN to 0: JSON has neither."""
    return tuple(min(max(value, -_LARGEST), _LARGEST) if value == value else 0.0 for value in values)
