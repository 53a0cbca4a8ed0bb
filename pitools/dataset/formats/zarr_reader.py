"""Rows of Zarr arrays, v2 or v3: by our own reader where the array's form allows, else by zarr-python."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pitools.core.errors import DataError, PitError
from pitools.dataset.formats import encoded_images
from pitools.dataset.formats.model import Column, ZarrSource, is_own_fault
from pitools.store.reader.array_reader import ArrayReader, ChunkNotStored
from pitools.store.reader.version_reader import VersionReader
from pitools.store.zarr import metadata
from pitools.store.zarr.chunk_layout import chunk_layout

_RETRY_HINT = "copy it again from where it was written"
_NOT_STORED = "record it again; were it nothing but fill values, write it with write_empty_chunks"


def must_be_stored(name: str, row: tuple[int, ...]) -> bool:
    """Whether steps of nothing but fill values are lost ones: nobody records black frames, nor a chunk of actions that
    are all 0. Of others, such as rewards, they may be meant."""
    return len(row) > 1 or any(part in ("action", "actions") for part in name.split("/"))


@contextmanager
def translate_errors(path: Path, name: str) -> Iterator[None]:
    """Whatever zarr-python says in this block is raised as DataError: only read in it."""
    try:
        yield
    except PitError:
        raise
    except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
        if is_own_fault(error):
            raise
        text = " ".join(str(error).split())
        raise DataError(f"{name}: cannot be read as Zarr: {text}", where=str(path), hint=_RETRY_HINT) from error


class ZarrReader:
    """One Zarr store, open to be read by one thread at a time."""

    def __init__(self, path: Path, *, published: bool) -> None:
        """Raises DataError."""
        self._path = path
        self._arrays = VersionReader(path, check_mode="always", verify=True) if published else None
        self._readers: dict[str, ArrayReader | None] = {}
        self._plain: dict[str, Any] = {}

    def close(self) -> None:
        """Let go of the files."""
        self._readers.clear()
        self._plain.clear()
        self._arrays = None

    def read_into(self, column: Column, source: ZarrSource, out: NDArray[Any], start: int, stop: int) -> None:
        """Fill `out` with the episode's rows [start, stop). Raises DataError for a damaged chunk, and in a version of
        ours for a missing one."""
        low, high = source.first_row + start, source.first_row + stop
        if self._arrays is not None:
            if out.flags.c_contiguous:
                self._arrays.read_into(source.name, out, low, high)
            else:
                out[:] = self._arrays.read(source.name, low, high)
            return
        try:
            reader = self._reader(source.name)
            if reader is not None and out.flags.c_contiguous and self._is_stored(source.name, low, high):
                reader.read_into(out, low, high)
                return
        except ChunkNotStored as error:
            if must_be_stored(column.dataset, column.row):
                where = f"{self._path}: {source.name}: steps {low} to {high}"
                raise DataError("a chunk is not stored", where=where, hint=_NOT_STORED) from error
        with translate_errors(self._path, source.name):
            out[:] = self._open_array(source.name)[low:high]

    def _reader(self, name: str) -> ArrayReader | None:
        if name not in self._readers:
            known = None
            file = self._path / name / metadata.V3
            with translate_errors(self._path, name):
                if file.is_file() and (array := metadata.parse_metadata(name, file.read_bytes(), str(file))):
                    known = chunk_layout(array)
            self._readers[name] = ArrayReader(self._path, name, known, check_mode="always") if known else None
        return self._readers[name]

    def _is_stored(self, name: str, start: int, stop: int) -> bool:
        """Whether every file of these rows is there: zarr-python writes none for a chunk of nothing but fill values."""
        reader = self._readers[name]
        assert reader is not None
        size, tail = reader.layout.shard, "/0" * (len(reader.layout.shape) - 1)
        return all(
            (self._path / name / f"c/{number}{tail}").exists() for number in range(start // size, -(-stop // size))
        )

    def _open_array(self, name: str) -> Any:
        import zarr

        if name not in self._plain:
            self._plain[name] = zarr.open_array(self._path / name, mode="r")
        return self._plain[name]


def check_readable(path: Path, array: metadata.ArrayMetadata) -> None:
    """Raises DataError for an array whose codec is not installed, and for one whose rows are picture files: they would
    be stored as bytes, and nothing would say of what."""
    import zarr

    where = f"{path}: {array.path}"
    try:
        opened: Any = zarr.open_array(path / array.path, mode="r")
    except (OSError, ValueError, KeyError) as error:  # its metadata are whole: they were parsed before
        problem = f"zarr-python cannot open it: {' '.join(str(error).split())}"
        codecs = ", ".join(array.codecs.names)
        hint = f"install the package that has its codecs ({codecs}); or leave it out with --skip"
        raise DataError(problem, where=where, hint=hint) from error
    if array.dtype != "uint8" or len(array.shape) != 2 or not array.shape[0]:
        return
    last, found = array.shape[0] - 1, ""
    with (
        contextlib.suppress(DataError),
        translate_errors(path, array.path),
    ):  # damage refuses its episode, when that is read
        found = encoded_images.format_of_rows([bytes(opened[row]) for row in sorted({0, last // 2, last})])
    if found:
        problem = f"its rows are {found} files, which are not read from Zarr"
        raise DataError(problem, where=where, hint="write frames; or leave it out with --skip")


def read_array(path: Path, name: str) -> NDArray[Any]:
    """A small array, whole. Raises DataError."""
    import zarr

    with translate_errors(path, name):
        return np.asarray(zarr.open_array(path / name, mode="r")[:])
