"""Read rows of Zarr arrays, v2 or v3: by `store.reader` where the array's codecs and layout allow, else zarr-python."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pitools.core.errors import DataError
from pitools.dataset.formats import encoded_images
from pitools.dataset.formats.model import Column, ZarrSource, translate_library_errors
from pitools.store.reader.array_reader import ArrayReader, ChunkNotStored
from pitools.store.reader.version_reader import VersionReader
from pitools.store.zarr import metadata
from pitools.store.zarr.chunk_layout import chunk_layout

_RETRY_HINT = "copy it again from its source"
_NOT_STORED_HINT = "record it again; if all its values are the fill value, write it with write_empty_chunks"


def must_be_stored(name: str, row: tuple[int, ...]) -> bool:
    """Return whether a missing chunk means lost data: real frames and chunks of actions are not all 0.

    A chunk of other values, such as rewards, may well hold only the fill value, which Zarr does not store.
    """
    return len(row) > 1 or any(part in ("action", "actions") for part in name.split("/"))


def translate_errors(path: Path, name: str) -> AbstractContextManager[None]:
    """Raise zarr-python's errors in this block as DataError; the block must only read. name: of the array."""
    kinds = (OSError, ValueError, RuntimeError, KeyError, TypeError)
    return translate_library_errors("Zarr", f"{path}: {name}", _RETRY_HINT, kinds)


class ZarrReader:
    """One open Zarr store, for one thread at a time."""

    def __init__(self, path: Path, *, is_own_version: bool) -> None:
        """Raises DataError."""
        self._path = path
        self._version = VersionReader(path, checksums="always", verify_digests=True) if is_own_version else None
        self._readers: dict[str, ArrayReader | None] = {}
        self._zarr_arrays: dict[str, Any] = {}

    def close(self) -> None:
        """Close the files."""
        self._readers.clear()
        self._zarr_arrays.clear()
        self._version = None

    def read_into(self, column: Column, source: ZarrSource, out: NDArray[Any], start: int, stop: int) -> None:
        """Fill `out` with the episode's rows [start, stop). Raises DataError for a damaged chunk, and for a missing one
        of a pitools version, of images or of actions."""
        low, high = source.first_row + start, source.first_row + stop
        if self._version is not None:
            if out.flags.c_contiguous:
                self._version.read_into(source.name, out, low, high)
            else:
                out[:] = self._version.read(source.name, low, high)
            return
        try:
            reader = self._fast_reader(source.name)
            if reader is not None and out.flags.c_contiguous and self._is_stored(source.name, low, high):
                reader.read_into(out, low, high)
                return
        except ChunkNotStored as error:
            if must_be_stored(column.dataset, column.row):
                where = f"{self._path}: {source.name}: steps {low} to {high}"
                raise DataError("a chunk is not stored", where=where, hint=_NOT_STORED_HINT) from error
        with translate_errors(self._path, source.name):
            out[:] = self._open_array(source.name)[low:high]

    def _fast_reader(self, name: str) -> ArrayReader | None:
        if name not in self._readers:
            layout = None
            file = self._path / name / metadata.V3_FILE
            with translate_errors(self._path, name):
                if file.is_file() and (array := metadata.parse_metadata(name, file.read_bytes(), str(file))):
                    layout = chunk_layout(array)
            self._readers[name] = ArrayReader(self._path, name, layout, checksums="always") if layout else None
        return self._readers[name]

    def _is_stored(self, name: str, start: int, stop: int) -> bool:
        """Return whether all files of these rows exist: zarr-python writes none for a chunk of only the fill value."""
        reader = self._readers[name]
        assert reader is not None
        size, tail = reader.layout.shard, "/0" * (len(reader.layout.shape) - 1)
        return all(
            (self._path / name / f"c/{number}{tail}").exists() for number in range(start // size, -(-stop // size))
        )

    def _open_array(self, name: str) -> Any:
        import zarr

        if name not in self._zarr_arrays:
            self._zarr_arrays[name] = zarr.open_array(self._path / name, mode="r")
        return self._zarr_arrays[name]


def check_readable(path: Path, array: metadata.ArrayMetadata) -> None:
    """Raise DataError for an array whose codec is not installed, and for rows of encoded images.

    Encoded images would be stored as bytes, without a record of their format.
    """
    import zarr

    where = f"{path}: {array.path}"
    try:
        opened: Any = zarr.open_array(path / array.path, mode="r")
    except (OSError, ValueError, KeyError) as error:  # the metadata are valid: they were parsed before
        problem = f"zarr-python cannot open it: {' '.join(str(error).split())}"
        codecs = ", ".join(array.codecs.names)
        hint = f"install the package of its codecs ({codecs}); or leave it out with --skip-array"
        raise DataError(problem, where=where, hint=hint) from error
    if array.dtype != "uint8" or len(array.shape) != 2 or not array.shape[0]:
        return
    image_format = ""
    # A damaged row rejects its episode later, when the episode is read.
    with contextlib.suppress(DataError), translate_errors(path, array.path):
        image_format = encoded_images.format_of_rows(opened)
    if image_format:
        problem = f"rows of {image_format} files are not supported in Zarr"
        raise DataError(problem, where=where, hint="store decoded frames; or leave it out with --skip-array")


def read_array(path: Path, name: str) -> NDArray[Any]:
    """Read an entire small array. Raises DataError."""
    import zarr

    with translate_errors(path, name):
        return np.asarray(zarr.open_array(path / name, mode="r")[:])
