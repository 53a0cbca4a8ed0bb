from __future__ import annotations

import time
import tracemalloc
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pitools.store.zarr import chunk_keys, metadata
from pitools.store.zarr.metadata import ArrayMetadata, CodecChain

V2 = {"zarr_format": 2}
GRIDS: dict[str, dict[str, Any]] = {
    "v3": {},
    "v3 dot": {"chunk_key_encoding": {"name": "default", "separator": "."}},
    "v3 with v2 keys": {"chunk_key_encoding": {"name": "v2", "separator": "/"}},
    "v3 sharded": {"shards": (16, 3)},
    "v2": V2,
    "v2 slash": V2 | {"chunk_key_encoding": {"name": "v2", "separator": "/"}},
    "v2 fortran": V2 | {"order": "F"},
    "a scalar": {"shape": (), "chunks": ()},
    "a v2 scalar": V2 | {"shape": (), "chunks": ()},
    "nothing": {"shape": (0, 3)},
    "three axes": {"shape": (9, 7, 5), "chunks": (4, 3, 5)},
}


def files(folder: Path) -> set[str]:
    """Paths of all that is no metadata."""
    paths = (path for path in folder.rglob("*") if path.is_file() and path.name not in metadata.METADATA_NAMES)
    return {path.relative_to(folder).as_posix() for path in paths}


def plain(**changes: Any) -> ArrayMetadata:
    """A v3 array of one axis, 10 items in chunks of 1."""
    fields = {
        "path": "a",
        "format": 3,
        "shape": (10,),
        "file_chunk": (1,),
        "dtype": "uint8",
        "v2_keys": False,
        "separator": "/",
        "codecs": CodecChain(names=("bytes",), raw_bytes=1),
    }
    return ArrayMetadata(**(fields | changes))


@pytest.mark.parametrize("name", ["", "deep/in/it"])
@pytest.mark.parametrize("grid", GRIDS)
def test_keys_are_the_files_that_zarr_writes(tmp_path: Path, write_array, grid: str, name: str) -> None:
    """Of each format, separator and depth, the keys are the very files, and each file finds back to its chunk."""
    array, values = write_array(tmp_path, name, **GRIDS[grid])
    assert (array.shape, array.dtype, array.path) == (values.shape, values.dtype.name, name)
    listed = list(chunk_keys.chunk_keys(array))
    assert set(listed) == files(tmp_path)
    find = chunk_keys.make_key_parser(array)
    assert [find(key) for key in listed] == list(np.ndindex(array.grid))
    assert [owner for _, owner in chunk_keys.arrays_of_paths({name: array}, listed)] == [array] * len(listed)


@given(st.integers(0, 60), st.integers(1, 9), st.data())
def test_rows(size: int, chunk: int, data) -> None:
    """The chunks of rows [a, b) are those that a scan of all rows finds."""
    array = plain(shape=(size,), file_chunk=(chunk,))
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    touched = {row // chunk for row in range(start, stop)}
    assert list(chunk_keys.chunk_keys(array, (start, stop))) == [f"a/c/{number}" for number in sorted(touched)]


@given(st.integers(1, 7), st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), max_size=6))
def test_rows_of_several_runs(chunk: int, lengths: list[tuple[int, int]]) -> None:
    """Chunks that two runs share are there once, and neighbours are one range."""
    runs, end = [], 0
    for gap, length in lengths:
        runs.append((end + gap, end + gap + length))
        end += gap + length
    actual = chunk_keys.chunk_ranges(plain(shape=(1000,), file_chunk=(chunk,)), runs)
    assert [row for some in actual for row in some] == sorted({row // chunk for run in runs for row in range(*run)})
    assert all(first.stop < second.start for first, second in pairwise(actual))


@pytest.mark.parametrize(
    "path",
    [
        "a/c/10",
        "a/c/01",
        "a/c/+1",
        "a/c/-1",
        "a/c/1/0",
        "a/c/",
        "a/c",
        "a/1",
        "b/c/1",
        "a/c/1 ",
        "a/c/1\n",
        "a/c/\u0661",
        "a/c/1.partial",
        "a/c/99999999999999999999",
        "a/zarr.json",
        "xa/c/1",
    ],
)
def test_what_is_no_key(path: str) -> None:
    """A name that no reader would look for belongs to no chunk."""
    assert chunk_keys.make_key_parser(plain())("a/c/1") == (1,)
    assert chunk_keys.make_key_parser(plain())(path) is None


def test_names_are_not_patterns() -> None:
    """An array's name and a dotted separator are taken as they are."""
    array = plain(path="a+(b", v2_keys=True, separator=".", shape=(4, 4), file_chunk=(2, 2))
    find = chunk_keys.make_key_parser(array)
    assert (find("a+(b/1.0"), find("a+(b/1x0"), find("aa(b/1.0")) == ((1, 0), None, None)


def test_a_boundless_array_takes_no_time() -> None:
    """Shapes are claims: an array of 2^60 by 2^60 chunks is described, and its first keys are had, at once."""
    array = plain(shape=(1 << 60, 1 << 60), file_chunk=(1, 1))
    assert list(islice(chunk_keys.chunk_keys(array), 2)) == ["a/c/0/0", "a/c/0/1"]
    assert chunk_keys.make_key_parser(array)(f"a/c/{(1 << 60) - 1}/0") == ((1 << 60) - 1, 0)
    assert array.grid == (1 << 60, 1 << 60)


def test_100_000_keys_cost_little() -> None:
    """Listing 100,000 keys and finding each one's array and chunk takes well under a second, and little memory."""
    array = plain(path="images/front", shape=(100_000, 64, 64, 3), file_chunk=(1, 64, 64, 3))

    def find_all(count: int) -> int:
        find = chunk_keys.make_key_parser(array)
        paths = islice(chunk_keys.chunk_keys(array), count)
        return sum(find(path) is not None for path, _ in chunk_keys.arrays_of_paths({array.path: array}, paths))

    started = time.process_time()
    assert find_all(100_000) == 100_000
    assert time.process_time() - started < 2  # 0.5 s where nothing else runs
    tracemalloc.start()
    try:
        find_all(5_000)
        assert tracemalloc.get_traced_memory()[1] < 5 << 20
    finally:
        tracemalloc.stop()
