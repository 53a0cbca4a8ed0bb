"""Map chunks of a Zarr array to the keys of their files, and paths back to chunks.

Shapes come from untrusted files: no function takes time or memory for chunks that are not requested.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping

from pitools.store.zarr.metadata import ArrayMetadata, Coordinate, parent_groups


def chunk_key(array: ArrayMetadata, coordinate: Coordinate) -> str:
    """Return the path of one chunk's file in the store."""
    name = array.separator.join([*_key_head(array), *map(str, coordinate)]) or "0"
    return f"{array.path}/{name}" if array.path else name


def _key_head(array: ArrayMetadata) -> list[str]:
    return [] if array.v2_keys else ["c"]


def chunk_keys(array: ArrayMetadata, steps: tuple[int, int] | None = None) -> Iterator[str]:
    """Yield the keys of all chunks in C order. steps: only of chunks with rows [start, stop) of the first axis."""
    axes = [range(count) for count in array.grid]
    if steps is not None and axes:
        axes[0] = chunk_numbers(array, *steps)
    yield from (chunk_key(array, coordinate) for coordinate in _coordinates(axes))


def _coordinates(axes: list[range]) -> Iterator[Coordinate]:
    # Not itertools.product, which first builds a list of each axis: an array may claim 2^60 chunks.
    if not axes:
        yield ()
        return
    for number in axes[0]:
        for rest in _coordinates(axes[1:]):
            yield (number, *rest)


def chunk_numbers(array: ArrayMetadata, start: int, stop: int) -> range:
    """Return the numbers along the first axis of the chunks with rows [start, stop)."""
    size = array.file_chunk[0]
    return range(start // size, -(-stop // size)) if start < stop else range(0)


def chunk_ranges(array: ArrayMetadata, row_ranges: Iterable[tuple[int, int]]) -> list[range]:
    """Return the chunk numbers of several ascending ranges of rows, as disjoint ranges with gaps between them."""
    ranges: list[range] = []
    for rows in row_ranges:
        more = chunk_numbers(array, *rows)
        if ranges and more and more.start <= ranges[-1].stop:
            more = range(ranges.pop().start, more.stop)
        ranges += [more] if more else []
    return ranges


def make_key_parser(array: ArrayMetadata) -> Callable[[str], Coordinate | None]:
    """Return a function that maps a path to the chunk of which it is the key; None for other paths."""
    if not array.shape:
        return {chunk_key(array, ()): ()}.get
    grid, prefix = array.grid, f"{array.path}/" if array.path else ""
    # "01" is not a key of chunk 1.
    numbers = [r"(0|[1-9][0-9]{0,18})" for _ in grid]
    pattern = re.compile(re.escape(prefix) + re.escape(array.separator).join([*_key_head(array), *numbers]))

    def find(path: str) -> Coordinate | None:
        match = pattern.fullmatch(path)
        coordinate = tuple(map(int, match.groups())) if match else grid
        return coordinate if all(map(int.__lt__, coordinate, grid)) else None

    return find


def arrays_of_paths(
    arrays: Mapping[str, ArrayMetadata], paths: Iterable[str]
) -> Iterator[tuple[str, ArrayMetadata | None]]:
    """Yield each path with the array whose folder contains it, or None."""
    by_folder: dict[str, ArrayMetadata | None] = {}
    for path in paths:
        folder = path.rpartition("/")[0]
        if folder not in by_folder:
            by_folder[folder] = next(
                (arrays[parent] for parent in (folder, *parent_groups(folder)) if parent in arrays), None
            )
        yield path, by_folder[folder]
