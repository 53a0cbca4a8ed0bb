"""Read rows of Parquet columns as arrays: numbers, (nested) lists of equal length, or encoded images."""

from __future__ import annotations

import math
from bisect import bisect_right
from contextlib import AbstractContextManager
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pitools.core.errors import DataError
from pitools.dataset.formats import encoded_images
from pitools.dataset.formats.model import Column, ParquetSource, translate_library_errors

# Numbers read and cached at a time, in bytes.
_CACHE_BYTES = 4 << 20
_RETRY_HINT = "download it again, or convert it again from where it was recorded"


def translate_errors(path: Path) -> AbstractContextManager[None]:
    """Raise Arrow's errors in this block as DataError; the block must only read."""
    return translate_library_errors("Parquet", str(path), _RETRY_HINT, (OSError, pa.ArrowException, KeyError))


class _CachedRows(NamedTuple):
    """Rows of a column from `first` on, as one Arrow array."""

    first: int
    values: Any


class ParquetReader:
    """One open Parquet file, for one thread at a time.

    The rows last read of each column are cached: episodes are read in order, and a row group may hold several.
    """

    def __init__(self, path: Path) -> None:
        """Raises DataError."""
        self._path = path
        with translate_errors(path):
            self._file = pq.ParquetFile(path)
            file_metadata = self._file.metadata
            rows = [file_metadata.row_group(i).num_rows for i in range(file_metadata.num_row_groups)]
        self._offsets = list(accumulate(rows, initial=0))
        self._cached: dict[str, _CachedRows] = {}

    def close(self) -> None:
        """Close the file."""
        self._cached.clear()
        self._file.close()

    def read_into(self, column: Column, source: ParquetSource, out: NDArray[Any], start: int, stop: int) -> None:
        """Fill `out` with the episode's rows [start, stop). Raises DataError."""
        low, high = source.first_row + start, source.first_row + stop
        if high > self._offsets[-1]:
            problem = f"the file has {self._offsets[-1]} rows (expected {high}: an episode has rows {low} to {high})"
            raise DataError(problem, where=str(self._path), hint=_RETRY_HINT)
        row = low
        while row < high:
            cached = self._read_cached(row, source, column)
            end = min(high, cached.first + len(cached.values))
            part = cached.values.slice(row - cached.first, end - row)
            where = f"{self._path}: {source.key}: row {row}"
            target = out[row - low : end - low]
            if source.encoded_images:
                _decode_images(part, target, f"{self._path}: {source.key}", row)
            else:
                _store_numbers(_flatten_numbers(part, where), target, where)
            row = end

    def _read_cached(self, row: int, source: ParquetSource, column: Column) -> _CachedRows:
        """Return the row group of a row; for numbers, also the next groups, up to _CACHE_BYTES."""
        cached = self._cached.get(source.key)
        if cached is None or not cached.first <= row < cached.first + len(cached.values):
            group = bisect_right(self._offsets, row) - 1
            stop = group + 1
            if not source.encoded_images:
                row_bytes = math.prod(column.row) * np.dtype(column.dtype).itemsize
                stop = max(stop, bisect_right(self._offsets, self._offsets[group] + _CACHE_BYTES // row_bytes) - 1)
            with translate_errors(self._path):
                table = self._file.read_row_groups(range(group, stop), columns=[source.key], use_threads=False)
                cached = _CachedRows(self._offsets[group], table.column(source.key).combine_chunks())
            self._cached[source.key] = cached
        return cached


def _flatten_numbers(part: Any, where: str) -> NDArray[Any]:
    """Flatten the rows to numbers. Raises DataError for rows of unequal length, and for missing values."""
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
        raise DataError(f"{part.type} values (expected numbers)", where=where, hint="leave it out with --skip-array")
    return values


def _store_numbers(values: NDArray[Any], out: NDArray[Any], where: str) -> None:
    """Fill `out` with numbers. Raises DataError unless their count fits and the dtype of `out` can hold each value."""
    if len(values) != out.size:
        problem = f"rows of {len(values) // len(out)} values (expected the shape {out.shape[1:]})"
        raise DataError(problem, where=where, hint=_RETRY_HINT)
    values = values.reshape(out.shape)
    with np.errstate(over="ignore", invalid="ignore"):
        out[:] = values
    # Only floats may be rounded.
    rounded = values.dtype.kind == out.dtype.kind == "f"
    if values.dtype != out.dtype and not (np.isfinite(out) | ~np.isfinite(values) if rounded else out == values).all():
        problem = f"{values.dtype} values do not fit {out.dtype}, the dtype that meta/info.json gives"
        raise DataError(problem, where=where, hint=_RETRY_HINT)


def _decode_images(part: Any, out: NDArray[Any], where: str, first: int) -> None:
    if not pa.types.is_struct(part.type) or part.type.get_field_index("bytes") < 0:
        raise DataError(f"{part.type} values (expected encoded images)", where=where, hint=_RETRY_HINT)
    cells = part.field("bytes")
    for i in range(len(part)):
        data = cells[i].as_py()
        if not data:
            raise DataError("the image is not in the file", where=f"{where}: row {first + i}", hint=_RETRY_HINT)
        encoded_images.decode_image(data, out[i], f"{where}: row {first + i}")


def read_column(path: Path, key: str) -> NDArray[Any]:
    """Read an entire column of one number per row. Raises DataError."""
    with translate_errors(path), pq.ParquetFile(path) as file:
        return _flatten_numbers(file.read([key], use_threads=False).column(key).combine_chunks(), f"{path}: {key}")


def run_lengths(values: NDArray[Any]) -> list[tuple[int, int]]:
    """Return runs of equal integers as (value, length), in order."""
    cuts = np.flatnonzero(np.diff(values)) + 1
    starts = np.concatenate([[0], cuts]) if len(values) else np.zeros(0, np.int64)
    return [(int(values[low]), int(high - low)) for low, high in zip(starts, [*cuts, len(values)], strict=False)]


def read_records(path: Path, columns: list[str] | None) -> list[dict[str, Any]]:
    """Read all rows of a small file; columns that the file lacks are left out. Raises DataError."""
    with translate_errors(path), pq.ParquetFile(path) as file:
        present = None if columns is None else [name for name in columns if name in file.schema_arrow.names]
        records: list[dict[str, Any]] = file.read(present, use_threads=False).to_pylist()
        return records
