"""Rows of HDF5 datasets, read where they lie in the file; HDF5 itself only says where that is.

contiguous, or unfiltered chunks of whole rows ──▶ preadv straight into `out`, outside of HDF5's global lock
compressed, of another byte order, cut along other axes, not written yet ──▶ h5py
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
from pitools.dataset.formats.model import ChangedDuringRead, Column, Hdf5Source

_CHANGED_MESSAGE = "it changed while it was read"
_RETRY_HINT = "ingest it when it is complete"
# Bytes between two chunks that are read along with them rather than by a call of their own.
_GAP_BYTES = 16 << 10
_IOV_MAX = 512
# Rows of pictures that are held encoded.
_IMAGE_CACHE = 32


class _RowExtents(NamedTuple):
    """Where the rows of a dataset lie: `rows` of them from each offset on, one after the other."""

    rows: int
    row_bytes: int
    offsets: numbers[int]


class Hdf5Reader:
    """One HDF5 file, open to be read by one thread at a time."""

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
        """Let go of the file."""
        os.close(self._descriptor)
        self._file.close()

    def read_into(self, column: Column, source: Hdf5Source, out: NDArray[Any], start: int, stop: int) -> None:
        """Fill `out` with rows [start, stop). Raises DataError for damage, and for a file of another size than then."""
        if os.fstat(self._descriptor).st_size != source.bytes:
            raise ChangedDuringRead(_CHANGED_MESSAGE, where=str(self._path), hint=_RETRY_HINT)
        if source.encoded_images:
            self._decode(source, out, start, stop)
            return
        if source.name not in self._extents:
            with hdf5.translate_errors(self._path):
                dataset = self._file[source.name]
                if dataset.shape[1:] != column.row or dataset.dtype.name != column.dtype or len(dataset) < column.steps:
                    raise ChangedDuringRead(_CHANGED_MESSAGE, where=f"{self._path}: {source.name}", hint=_RETRY_HINT)
                self._extents[source.name] = _row_extents(dataset)
        extents = self._extents[source.name]
        if extents and out.flags.c_contiguous and out.dtype == column.dtype:
            self._read(extents, out.reshape(-1).view(np.uint8).data, start, stop)
        else:
            self._read_filtered(source.name, out, start, stop)

    def _read_filtered(self, name: str, out: NDArray[Any], start: int, stop: int) -> None:
        """By HDF5 itself. A failure names the first chunk that cannot be read."""
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

    def _decode(self, source: Hdf5Source, out: NDArray[Any], start: int, stop: int) -> None:
        for low in range(start, stop, _IMAGE_CACHE):
            with hdf5.translate_errors(self._path, f"{self._path}: {source.name}: from row {low}"):
                rows = self._file[source.name][low : min(stop, low + _IMAGE_CACHE)]
            for number, row in enumerate(rows, low):
                encoded_images.decode_image(
                    bytes(row), out[number - start], f"{self._path}: {source.name}: row {number}"
                )

    def _read(self, extents: _RowExtents, out: memoryview, start: int, stop: int) -> None:
        """Neighbouring chunks by one call, into `out` and what lies between them into a scratch."""
        todo: list[memoryview] = []
        begin = end = done = 0
        at = start
        while at < stop:
            number, skip = divmod(at, extents.rows)
            rows = min(extents.rows - skip, stop - at)
            size, offset = rows * extents.row_bytes, extents.offsets[number] + skip * extents.row_bytes
            if todo and not (0 <= offset - end <= _GAP_BYTES and len(todo) < _IOV_MAX):
                self._fill(todo, begin)
                todo = []
            if not todo:
                begin = end = offset
            if offset > end:
                self._gap = self._gap or memoryview(bytearray(_GAP_BYTES))
                todo.append(self._gap[: offset - end])
            todo.append(out[done : done + size])
            end, done, at = offset + size, done + size, at + rows
        if todo:
            self._fill(todo, begin)

    def _fill(self, views: list[memoryview], offset: int) -> None:
        """Read the views full, one after another. Raises DataError at the file's end."""
        while views:
            try:
                count = os.preadv(self._descriptor, views, offset)
            except OSError as error:
                problem, hint = (
                    f"cannot be read: {error.strerror}",
                    "try again; else copy it from where it was recorded",
                )
                raise DataError(problem, where=str(self._path), hint=hint) from error
            if not count:
                raise DataError(f"it ends after byte {offset}", where=str(self._path), hint=_RETRY_HINT)
            offset += count
            while views and count >= len(views[0]):
                count -= len(views.pop(0))
            if count:  # rare: a signal, or more than one call reads
                views[0] = views[0][count:]


def _row_extents(dataset: h5py.Dataset) -> _RowExtents | None:
    """Where the rows lie, None where that takes HDF5 to tell."""
    row_bytes = math.prod(dataset.shape[1:]) * dataset.dtype.itemsize
    plain = dataset.dtype.kind in "iuf" and dataset.id.get_type() == h5py.h5t.py_create(dataset.dtype.newbyteorder("="))
    # With a user block, what is said of offsets has changed between releases of HDF5.
    if not (plain and row_bytes and dataset.size) or dataset.file.userblock_size:
        return None
    if dataset.chunks is None:
        offset = dataset.id.get_offset()  # None: inside of the metadata, or nowhere yet
        return None if offset is None else _RowExtents(len(dataset), row_bytes, numbers("Q", [offset]))
    if dataset.id.get_create_plist().get_nfilters() or dataset.chunks[1:] != dataset.shape[1:]:
        return None
    return _chunks(dataset, row_bytes) if hasattr(dataset.id, "chunk_iter") else None


def _chunks(dataset: h5py.Dataset, row_bytes: int) -> _RowExtents | None:
    rows = dataset.chunks[0]
    count = -(-len(dataset) // rows)
    offsets = numbers("Q", bytes(8 * count))
    found = 0

    def note(chunk: Any) -> None:
        nonlocal found
        number = chunk.chunk_offset[0] // rows
        if number < count and chunk.byte_offset is not None and chunk.size == rows * row_bytes:
            offsets[number] = chunk.byte_offset
            found += 1

    dataset.id.chunk_iter(note)
    # A chunk that was never written reads as the fill value.
    return _RowExtents(rows, row_bytes, offsets) if found == count else None
