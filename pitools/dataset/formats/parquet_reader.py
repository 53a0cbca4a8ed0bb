"""Rows of Parquet columns as arrays: numbers, lists of one length (of lists …), or picture files."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pitools.core.errors import DataError
from pitools.dataset.formats import encoded_images
from pitools.dataset.formats.model import Column, ParquetSource, is_own_fault

# Of numbers that are read, and kept, at a time.
_CACHE_BYTES = 4 << 20
_RETRY_HINT = "download it again, or convert it again from where it was recorded"


@contextmanager
def translate_errors(path: Path) -> Iterator[None]:
    """Whatever Arrow says in this block is raised as DataError: only read in it."""
    try:
        yield
    except (OSError, pa.ArrowException, KeyError) as error:
        if is_own_fault(error):
            raise
        text = " ".join(str(error).split())
        raise DataError(f"cannot be read as Parquet: {text}", where=str(path), hint=_RETRY_HINT) from error


class _CachedRows(NamedTuple):
    """Rows of a column from `first` on, as one Arrow array."""

    first: int
    values: Any


class ParquetReader:
    """One Parquet file, open to be read by one thread at a time. Of each column the rows last read are kept: episodes
    are read one by one, where many lie in one row group, or each in one of its own."""

    def __init__(self, path: Path) -> None:
        """Raises DataError."""
        self._path = path
        with translate_errors(path):
            self._file = pq.ParquetFile(path)
            known = self._file.metadata
            rows = [known.row_group(i).num_rows for i in range(known.num_row_groups)]
        self._offsets = list(accumulate(rows, initial=0))
        self._kept: dict[str, _CachedRows] = {}

    def close(self) -> None:
        """Let go of the file."""
        self._kept.clear()
        self._file.close()

    def read_into(self, column: Column, source: ParquetSource, out: NDArray[Any], start: int, stop: int) -> None:
        """Fill `out` with the episode's rows [start, stop). Raises DataError."""
        low, high = source.first_row + start, source.first_row + stop
        if high > self._offsets[-1]:
            problem = f"it has {self._offsets[-1]} rows, and rows {low} to {high} belong to an episode"
            raise DataError(problem, where=str(self._path), hint=_RETRY_HINT)
        at = low
        while at < high:
            kept = self._part(at, source, column)
            end = min(high, kept.first + len(kept.values))
            part = kept.values.slice(at - kept.first, end - at)
            where = f"{self._path}: {source.key}: row {at}"
            target = out[at - low : end - low]
            if source.encoded_images:
                _decode(part, target, f"{self._path}: {source.key}", at)
            else:
                _store_numbers(_numbers(part, where), target, where)
            at = end

    def _part(self, row: int, source: ParquetSource, column: Column) -> _CachedRows:
        """Rows of a column with this one among them: its row group, and of numbers more groups after it."""
        kept = self._kept.get(source.key)
        if kept is None or not kept.first <= row < kept.first + len(kept.values):
            group = bisect_right(self._offsets, row) - 1
            stop = group + 1
            if not source.encoded_images:
                row_bytes = math.prod(column.row) * np.dtype(column.dtype).itemsize
                stop = max(stop, bisect_right(self._offsets, self._offsets[group] + _CACHE_BYTES // row_bytes) - 1)
            with translate_errors(self._path):
                table = self._file.read_row_groups(range(group, stop), columns=[source.key], use_threads=False)
                kept = _CachedRows(self._offsets[group], table.column(source.key).combine_chunks())
            self._kept[source.key] = kept
        return kept


def _numbers(part: Any, where: str) -> NDArray[Any]:
    """All numbers in the rows, flat. Raises DataError for a row of another length, or of none."""
    rows = len(part)
    while pa.types.is_list(part.type) or pa.types.is_large_list(part.type) or pa.types.is_fixed_size_list(part.type):
        if part.null_count:
            raise DataError("a value is missing", where=where, hint=_RETRY_HINT)
        if not pa.types.is_fixed_size_list(part.type):
            lengths = np.unique(part.value_lengths().to_numpy(zero_copy_only=False))
            if len(lengths) > 1:
                raise DataError(f"rows of {lengths[0]} to {lengths[-1]} values", where=where, hint=_RETRY_HINT)
        part = part.flatten()
    if part.null_count:
        raise DataError("a value is missing", where=where, hint=_RETRY_HINT)
    values: NDArray[Any] = part.to_numpy(zero_copy_only=False)
    if values.dtype.kind not in "biuf" or len(values) % max(rows, 1):
        raise DataError(f"{part.type} values where numbers were expected", where=where, hint="leave it out with --skip")
    return values


def _store_numbers(values: NDArray[Any], out: NDArray[Any], where: str) -> None:
    """Fill `out` with the numbers of its rows. Raises DataError unless they are as many, and what they were there."""
    if len(values) != out.size:
        problem = f"rows of {len(values) // len(out)} values, where {out.shape[1:]} was expected"
        raise DataError(problem, where=where, hint=_RETRY_HINT)
    values = values.reshape(out.shape)
    with np.errstate(over="ignore", invalid="ignore"):
        out[:] = values
    # Of fractions digits may be lost, and of nothing else anything.
    rounded = values.dtype.kind == out.dtype.kind == "f"
    if values.dtype != out.dtype and not (np.isfinite(out) | ~np.isfinite(values) if rounded else out == values).all():
        problem = f"its {values.dtype} values do not fit {out.dtype}, which the dataset says it has"
        raise DataError(problem, where=where, hint=_RETRY_HINT)


def _decode(part: Any, out: NDArray[Any], where: str, first: int) -> None:
    if not pa.types.is_struct(part.type) or part.type.get_field_index("bytes") < 0:
        raise DataError(f"{part.type} where picture files were expected", where=where, hint=_RETRY_HINT)
    cells = part.field("bytes")
    for i in range(len(part)):
        data = cells[i].as_py()
        if not data:
            raise DataError("the picture is not in the file", where=f"{where}: row {first + i}", hint=_RETRY_HINT)
        encoded_images.decode_image(data, out[i], f"{where}: row {first + i}")


def read_column(path: Path, key: str) -> NDArray[Any]:
    """A column of one number a row, whole. Raises DataError."""
    with translate_errors(path), pq.ParquetFile(path) as file:
        return _numbers(file.read([key], use_threads=False).column(key).combine_chunks(), f"{path}: {key}")


def run_lengths(values: NDArray[Any]) -> list[tuple[int, int]]:
    """Whole numbers as (value, how many of it), in order."""
    cuts = np.flatnonzero(np.diff(values)) + 1
    starts = np.concatenate([[0], cuts]) if len(values) else np.zeros(0, np.int64)
    return [(int(values[low]), int(high - low)) for low, high in zip(starts, [*cuts, len(values)], strict=False)]


def read_records(path: Path, columns: list[str] | None) -> list[dict[str, Any]]:
    """The rows of a small file, with those of these columns that it has. Raises DataError."""
    with translate_errors(path), pq.ParquetFile(path) as file:
        known = None if columns is None else [name for name in columns if name in file.schema_arrow.names]
        found: list[dict[str, Any]] = file.read(known, use_threads=False).to_pylist()
        return found
