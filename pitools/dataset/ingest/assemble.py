"""Steps of the concatenated arrays, put together from the episodes of the recordings."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pitools.dataset.formats.model import Column, Episode


class Span(NamedTuple):
    """A run of one episode's steps, [start, stop) in the episode, and where it goes in the concatenated array."""

    episode: Episode
    column: Column
    start: int
    stop: int
    at: int


def spans(name: str, episodes: Sequence[Episode], offsets: Sequence[int], start: int, stop: int) -> Iterator[Span]:
    """What makes up steps [start, stop) of the concatenated array, in order."""
    index = bisect_right(offsets, start) - 1
    while start < stop:
        first, end = offsets[index], min(stop, offsets[index + 1])
        yield Span(episodes[index], episodes[index].columns[name], start - first, end - first, start)
        start, index = end, index + 1
