"""Steps of an episode's columns, read the same way whatever the layout.

column.place:  Hdf5 ─ Parquet ─ Video ─ ZarrSource        files, opened when first asked for, a few kept open
               Resized ─ Cast ─ Derived                  of other columns, which the same reader reads
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
    """A reader for the columns of this episode, and of any others: what was opened last stays open, so that one reader
    for many episodes is the cheapest. Files are opened as they are needed; close it when done."""
    del episode  # a column says all that there is to know
    return _CachingReader()


class _CachingReader:
    """Files by kind and path, the last used last."""

    def __init__(self) -> None:
        self._files: dict[tuple[type, Path], Any] = {}
        # Not kept for longer than files are open: what it was derived from may change.
        self._derived: transforms.DerivedCache = {}

    def read_into(self, column: Column, out: NDArray[Any], start: int, stop: int) -> None:
        if out.shape != (stop - start, *column.row) or out.dtype != column.dtype:
            problem = f"{out.dtype} {out.shape} cannot take steps [{start}, {stop}) of {column.dtype} {column.row}"
            raise ValueError(problem)
        if not 0 <= start <= stop <= column.steps:
            raise IndexError(f"steps [{start}, {stop}) of {column.dataset}, which has {column.steps}")
        if start == stop:
            return
        place = column.source
        match place:
            case ResizeOp():
                transforms.read_resized(self, column, place, out, start, stop)
            case CastOp():
                transforms.read_cast(self, place, out, start, stop)
            case DeriveOp():
                transforms.read_derived(self, self._derived, column, place, out, start, stop)
            case _:
                self._file(place).read_into(column, place, out, start, stop)

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


def _open_file(place: Hdf5Source | ParquetSource | VideoSource | ZarrSource) -> Any:
    """The file that a column is in, open; the library for it is loaded only now."""
    match place:
        case Hdf5Source():
            from pitools.dataset.formats import hdf5_reader

            return hdf5_reader.Hdf5Reader(place.path)
        case ZarrSource():
            from pitools.dataset.formats import zarr_reader

            return zarr_reader.ZarrReader(place.path, published=place.is_own_version)
        case ParquetSource():
            with require_lerobot_tools():
                from pitools.dataset.formats import parquet_reader
            return parquet_reader.ParquetReader(place.path)
        case VideoSource():
            with require_lerobot_tools():
                from pitools.dataset.formats import video_reader
            return video_reader.VideoReader(place.path)


@contextmanager
def require_lerobot_tools() -> Iterator[None]:
    """Around an import of what reads Parquet and video: raises ToolMissing where that is not installed."""
    try:
        yield
    except ImportError as error:
        hint = "pip install 'pitools-hpc[lerobot]'"
        raise ToolMissing(f"{error.name} is not installed, which reads LeRobot datasets", hint=hint) from error
