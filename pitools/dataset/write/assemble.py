"""Steps of the concatenated arrays, put together from the episodes of the recordings."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import h5py
import msgspec
import numpy as np
from numpy.typing import NDArray

from pitools.dataset.sources import hdf5, jpeg
from pitools.dataset.sources.recording import Column, Episode


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """A run of one episode's steps, [start, stop) in the episode, and where it goes in the block."""

    path: Path
    column: Column
    start: int
    stop: int
    at: int


def spans(name: str, episodes: Sequence[Episode], offsets: Sequence[int], start: int, stop: int) -> Iterator[Span]:
    """What makes up steps [start, stop) of the concatenated array, in order."""
    index = bisect_right(offsets, start) - 1
    while start < stop:
        episode, first = episodes[index], offsets[index]
        end = min(stop, offsets[index + 1])
        yield Span(path=episode.path, column=episode.columns[name], start=start - first, stop=end - first,
                   at=start)  # fmt: skip
        start, index = end, index + 1


def read(name: str, episodes: Sequence[Episode], offsets: Sequence[int], start: int, stop: int) -> NDArray[Any]:
    """Steps [start, stop) of the concatenated array, from the recordings. Raises DataError."""
    column = episodes[0].columns[name]
    block = np.empty((stop - start, *column.row), column.dtype)
    for path, run in groupby(spans(name, episodes, offsets, start, stop), key=lambda span: span.path):
        with hdf5.opened(path) as file:
            for span in run:
                _fill(block[span.at - start : span.at - start + span.stop - span.start], file, span)
    return block


def _fill(out: NDArray[Any], file: h5py.File, span: Span) -> None:
    dataset = file[span.column.dataset]
    if not span.column.jpeg:
        dataset.read_direct(out, np.s_[span.start : span.stop])
        return
    rows = dataset[span.start : span.stop]
    for i, row in enumerate(rows):
        jpeg.decode(row, out[i], f"{span.path}: {span.column.dataset}: row {span.start + i}")
