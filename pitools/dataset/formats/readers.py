"""Read steps of columns, for every layout.

column.source:  Hdf5Source ─ ParquetSource ─ VideoSource ─ ZarrSource    files, opened on first use; a few stay open
                ResizeOp ─ CastOp ─ DeriveOp                             computed from other columns
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from pitools.core.errors import ToolMissing
from pitools.dataset.formats import transforms
from pitools.dataset.formats.model import (
    CastOp,
    Column,
    ColumnReader,
    DeriveOp,
    Episode,
    Hdf5Source,
    ParquetSource,
    ResizeOp,
    VideoSource,
    ZarrSource,
)

_MAX_OPEN_FILES = 8


def open_reader(episode: Episode) -> ColumnReader:
    """Return a reader for the columns of any episode; `close` it afterwards. Files are opened on first use.

    One reader for many episodes is cheapest, because recently used files stay open.
    """
    del episode  # a column has all that its reader needs
    return _CachingReader()


class _CachingReader:
    """Reader with an LRU cache of open files, by source type and path."""

    def __init__(self) -> None:
        self._files: dict[tuple[type, Path], Any] = {}
        # Cleared when the files are closed: their contents may change afterwards.
        self._derived: transforms.DerivedCache = {}

    def read_into(self, column: Column, out: NDArray[Any], start: int, stop: int) -> None:
        if out.shape != (stop - start, *column.row) or out.dtype != column.dtype:
            problem = f"{out.dtype} {out.shape} cannot take steps [{start}, {stop}) of {column.dtype} {column.row}"
            raise ValueError(problem)
        if not 0 <= start <= stop <= column.steps:
            raise IndexError(f"steps [{start}, {stop}) of {column.dataset}, which has {column.steps}")
        if start == stop:
            return
        source = column.source
        match source:
            case ResizeOp():
                transforms.read_resized(self, column, source, out, start, stop)
            case CastOp():
                transforms.read_cast(self, source, out, start, stop)
            case DeriveOp():
                transforms.read_derived(self, self._derived, column, source, out, start, stop)
            case _:
                self._file(source).read_into(column, source, out, start, stop)

    def close(self) -> None:
        self._derived.clear()
        while self._files:
            self._files.popitem()[1].close()

    def _file(self, source: Hdf5Source | ParquetSource | VideoSource | ZarrSource) -> Any:
        key = type(source), source.path
        file = self._files.pop(key, None)
        if file is None:
            file = _open_file(source)
            while len(self._files) >= _MAX_OPEN_FILES:
                self._files.pop(next(iter(self._files))).close()
        self._files[key] = file
        return file


def _open_file(source: Hdf5Source | ParquetSource | VideoSource | ZarrSource) -> Any:
    """Open a column's file; this imports the library for its format."""
    match source:
        case Hdf5Source():
            from pitools.dataset.formats import hdf5_reader

            return hdf5_reader.Hdf5Reader(source.path)
        case ZarrSource():
            from pitools.dataset.formats import zarr_reader

            return zarr_reader.ZarrReader(source.path, is_own_version=source.is_own_version)
        case ParquetSource():
            with require_lerobot_tools():
                from pitools.dataset.formats import parquet_reader
            return parquet_reader.ParquetReader(source.path)
        case VideoSource():
            with require_lerobot_tools():
                from pitools.dataset.formats import video_reader
            return video_reader.VideoReader(source.path)


@contextmanager
def require_lerobot_tools() -> Iterator[None]:
    """Raise ToolMissing if an import in this block fails: pyarrow and PyAV are optional."""
    try:
        yield
    except ImportError as error:
        hint = "pip install 'pitools-hpc[lerobot]'"
        raise ToolMissing(f"{error.name} is not installed (needed for LeRobot datasets)", hint=hint) from error
