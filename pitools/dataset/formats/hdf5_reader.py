"""Read rows of HDF5 datasets, by the offsets that HDF5 reports.

contiguous, or unfiltered chunks of entire rows ──▶ preadv into `out`, without HDF5's global lock
compressed, foreign byte order, chunked along other axes, unwritten chunks ──▶ h5py
"""

from __future__ import annotations

import math
import os
from array import array as numbers
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
from numpy.typing import NDArray

from pitools.core.errors import DataError
from pitools.dataset.formats import encoded_images, hdf5
from pitools.dataset.formats.model import Column, Hdf5Source, changed_during_read

_RETRY_HINT = "ingest it when it is complete"
# Largest gap in bytes between two chunks that one preadv call reads together.
_GAP_BYTES = 16 << 10
_IOV_MAX = 512
# Encoded images read at a time.
_IMAGE_CACHE = 32


class _RowExtents(NamedTuple):
    """File offsets of a dataset's rows: `rows` consecutive rows from each offset on."""

    rows: int
    row_bytes: int
    offsets: numbers[int]


class Hdf5Reader:
    """One open HDF5 file, for one thread at a time."""

    def __init__(self, path: Path) -> None:
        """Raises DataError."""
        self._path = path
        self._extents: dict[str, _RowExtents | None] = {}
        self._gap: memoryview | None = None
        hdf5.load_filters()
        with hdf5.translate_errors(path):
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                self._file = h5py.File(path, "r", locking="best-effort")
            except BaseException:
                os.close(self._descriptor)
                raise

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)
        self._file.close()

    def read_into(self, column: Column, source: Hdf5Source, out: NDArray[Any], start: int, stop: int) -> None:
        """Fill `out` with rows [start, stop). Raises DataError for damage, and for a file changed since the scan."""
        if os.fstat(self._descriptor).st_size != source.bytes:
            raise changed_during_read(str(self._path))
        if source.encoded_images:
            self._decode_images(source, out, start, stop)
            return
        if source.name not in self._extents:
            with hdf5.translate_errors(self._path):
                dataset = self._file[source.name]
                if dataset.shape[1:] != column.row or dataset.dtype.name != column.dtype or len(dataset) < column.steps:
                    raise changed_during_read(f"{self._path}: {source.name}")
                self._extents[source.name] = _row_extents(dataset)
        extents = self._extents[source.name]
        if extents and out.flags.c_contiguous and out.dtype == column.dtype:
            self._read_extents(extents, out.reshape(-1).view(np.uint8).data, start, stop)
        else:
            self._read_filtered(source.name, out, start, stop)

    def _read_filtered(self, name: str, out: NDArray[Any], start: int, stop: int) -> None:
        """Read rows by h5py. The error of a failure names the first unreadable chunk."""
        try:
            with hdf5.translate_errors(self._path):
                self._file[name].read_direct(out, np.s_[start:stop])
        except DataError as error:
            dataset = self._file[name]
            rows = dataset.chunks[0] if dataset.chunks else len(dataset)
            for low in range(start - start % rows, stop, rows):
                where = f"{self._path}: {name}: steps {low} to {min(low + rows, len(dataset))}"
                with hdf5.translate_errors(self._path, where):
                    dataset[max(low, start)]
            raise error

    def _decode_images(self, source: Hdf5Source, out: NDArray[Any], start: int, stop: int) -> None:
        for low in range(start, stop, _IMAGE_CACHE):
            with hdf5.translate_errors(self._path, f"{self._path}: {source.name}: from row {low}"):
                rows = self._file[source.name][low : min(stop, low + _IMAGE_CACHE)]
            for number, row in enumerate(rows, low):
                encoded_images.decode_image(
                    bytes(row), out[number - start], f"{self._path}: {source.name}: row {number}"
                )

    def _read_extents(self, extents: _RowExtents, out: memoryview, start: int, stop: int) -> None:
        """Read rows by their offsets: one call for adjacent chunks, with a scratch buffer for the gaps between them."""
        views: list[memoryview] = []
        begin = end = filled = 0
        row = start
        while row < stop:
            number, skip = divmod(row, extents.rows)
            rows = min(extents.rows - skip, stop - row)
            size, offset = rows * extents.row_bytes, extents.offsets[number] + skip * extents.row_bytes
            if views and not (0 <= offset - end <= _GAP_BYTES and len(views) < _IOV_MAX):
                self._read_full(views, begin)
                views = []
            if not views:
                begin = end = offset
            if offset > end:
                self._gap = self._gap or memoryview(bytearray(_GAP_BYTES))
                views.append(self._gap[: offset - end])
            views.append(out[filled : filled + size])
            end, filled, row = offset + size, filled + size, row + rows
        if views:
            self._read_full(views, begin)

    def _read_full(self, views: list[memoryview], offset: int) -> None:
        """Fill the views in order. Raises DataError at the end of the file."""
        while views:
            try:
                count = os.preadv(self._descriptor, views, offset)
            except OSError as error:
                hint = "try again; if it fails again, copy the file again from its source"
                raise DataError(f"cannot be read: {error.strerror}", where=str(self._path), hint=hint) from error
            if not count:
                raise DataError(f"the file ends after byte {offset}", where=str(self._path), hint=_RETRY_HINT)
            offset += count
            while views and count >= len(views[0]):
                count -= len(views.pop(0))
            if count:  # rare: a signal, or more than one call reads
                views[0] = views[0][count:]


def _row_extents(dataset: h5py.Dataset) -> _RowExtents | None:
    """Return the offsets of the rows, None if only h5py can read them."""
    row_bytes = math.prod(dataset.shape[1:]) * dataset.dtype.itemsize
    plain = dataset.dtype.kind in "iuf" and dataset.id.get_type() == h5py.h5t.py_create(dataset.dtype.newbyteorder("="))
    # With a user block, the meaning of offsets differs between releases of HDF5.
    if not (plain and row_bytes and dataset.size) or dataset.file.userblock_size:
        return None
    if dataset.chunks is None:
        offset = dataset.id.get_offset()  # None: stored in the metadata, or not written yet
        return None if offset is None else _RowExtents(len(dataset), row_bytes, numbers("Q", [offset]))
    if dataset.id.get_create_plist().get_nfilters() or dataset.chunks[1:] != dataset.shape[1:]:
        return None
    return _chunk_extents(dataset, row_bytes) if hasattr(dataset.id, "chunk_iter") else None


def _chunk_extents(dataset: h5py.Dataset, row_bytes: int) -> _RowExtents | None:
    rows = dataset.chunks[0]
    count = -(-len(dataset) // rows)
    offsets = numbers("Q", bytes(8 * count))
    located = 0

    def record_chunk(chunk: Any) -> None:
        nonlocal located
        number = chunk.chunk_offset[0] // rows
        if number < count and chunk.byte_offset is not None and chunk.size == rows * row_bytes:
            offsets[number] = chunk.byte_offset
            located += 1

    dataset.id.chunk_iter(record_chunk)
    # Without an offset, a chunk was never written: only h5py returns its fill value.
    return _RowExtents(rows, row_bytes, offsets) if located == count else None
