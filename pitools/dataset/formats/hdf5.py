"""Open and inspect HDF5 files. Every error names the file, and links to other files are refused."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import h5py
import msgspec
import numpy as np

from pitools.core.errors import DataError
from pitools.dataset.formats import encoded_images
from pitools.dataset.formats.model import Column, Hdf5Source, check_row, natural_sort_key, translate_library_errors


@contextmanager
def open_hdf5(path: Path) -> Iterator[h5py.File]:
    """Open a file for reading. The block must only read: every error of HDF5 in it becomes a DataError."""
    # Many shared file systems have no locks; on others, a file that is still being written is refused.
    load_filters()
    with translate_errors(path), h5py.File(path, "r", locking="best-effort") as file:
        yield file


@lru_cache(maxsize=1)
def load_filters() -> None:
    """Register the filters of the package hdf5plugin (Blosc, Zstandard, LZ4, …), if installed."""
    with suppress(ImportError):
        importlib.import_module("hdf5plugin")


def translate_errors(path: Path, where: str = "") -> AbstractContextManager[None]:
    """Raise HDF5's errors in this block as DataError; the block must only read. where: default is the path."""
    kinds = (OSError, RuntimeError, KeyError, ValueError, TypeError)
    return translate_library_errors("HDF5", where or str(path), "copy it again from its source", kinds)


def walk_datasets(group: h5py.Group, visited: set[int] | None = None) -> Iterator[tuple[str, h5py.Dataset]]:
    """Yield every dataset below a group with its relative path, in natural order.

    Raises DataError for a link to another file, and for a group that is linked twice.
    """
    visited = set() if visited is None else visited
    address = h5py.h5o.get_info(group.id).addr
    if address in visited:
        raise DataError(f"{group.name} is linked twice", where=group.file.filename, hint="remove the second link")
    visited.add(address)
    for key in sorted(group, key=natural_sort_key):
        require_local(group, key)
        node = group[key]
        if isinstance(node, h5py.Group):
            for name, dataset in walk_datasets(node, visited):
                yield f"{key}/{name}", dataset
        elif isinstance(node, h5py.Dataset):
            yield key, node


def is_local(group: h5py.Group, key: str) -> bool:
    """Return whether a member is in the same file: neither a link to another one, nor to nothing."""
    # An external link would read a file that the user did not name; a soft link may point to an external one.
    is_external = isinstance(group.get(key, getlink=True), h5py.ExternalLink)
    return not is_external and (node := group.get(key)) is not None and _same_file(node, group)


def require_local(group: h5py.Group, key: str) -> None:
    """Raise DataError for a member that `is_local` denies."""
    if not is_local(group, key):
        problem = f"{group.name.rstrip('/')}/{key} is a link to another file, or to nothing"
        raise DataError(problem, where=group.file.filename, hint="copy what it names into this file: h5py's File.copy")


def get_child(group: h5py.Group, key: str, kind: type) -> Any:
    """Return a member of a group, None unless it is of this kind and in the same file."""
    link = group.get(key, getlink=True)
    node = None if link is None or isinstance(link, h5py.ExternalLink) else group.get(key)
    return node if isinstance(node, kind) and _same_file(node, group) else None


def _same_file(node: Any, group: h5py.Group) -> bool:
    return bool(h5py.h5o.get_info(node.id).fileno == h5py.h5o.get_info(group.id).fileno)


def column_source(path: Path) -> Hdf5Source:
    """Return the source of this file's datasets, without a name. Raises OSError."""
    return Hdf5Source(path=path, name="", bytes=path.stat().st_size)


def step_count(dataset: h5py.Dataset) -> int:
    """Return the length of a dataset's first axis, 0 for a scalar."""
    return int(dataset.shape[0]) if dataset.shape else 0


def describe_column(dataset: h5py.Dataset, length: int, file: Hdf5Source) -> Column:
    """Return the column of a dataset with one row per step. Raises DataError unless it is an array of numbers."""
    where = _require_inside(dataset)
    if dataset.dtype.kind not in "biufc" or dataset.dtype.itemsize > 16 or dataset.dtype == np.longdouble:
        raise DataError(f"dtype {dataset.dtype} (expected numbers)", where=where, hint="leave it out with --skip-array")
    if not dataset.shape:
        raise DataError(f"a scalar (expected {length} steps)", where=where, hint="leave it out with --skip-array")
    row = tuple(int(size) for size in dataset.shape[1:])
    check_row(row, dataset.dtype.name, where)
    _check_written(dataset, where)
    _check_filters(dataset, where)
    source = msgspec.structs.replace(file, name=dataset.name)
    return Column(dataset=dataset.name, steps=int(dataset.shape[0]), row=row, dtype=dataset.dtype.name, source=source)


def describe_column_or_images(dataset: h5py.Dataset, length: int, file: Hdf5Source, *, camera: bool = False) -> Column:
    """Return the column of a dataset whose rows are numbers or encoded images. camera: rows of bytes are images.

    Raises DataError, also for an unsupported image format: stored as bytes, it could not be identified later.
    """
    if _may_hold_images(dataset) and (camera or _image_format_of_rows(dataset)):
        return describe_image_column(dataset, file)
    return describe_column(dataset, length, file)


def _may_hold_images(dataset: h5py.Dataset) -> bool:
    """Return whether each row is bytes, of equal or variable length."""
    if dataset.ndim == 1:
        return bool(h5py.check_vlen_dtype(dataset.dtype) == np.uint8 or dataset.dtype.kind == "S")
    return bool(dataset.ndim == 2 and dataset.dtype == np.uint8)


def _image_format_of_rows(dataset: h5py.Dataset) -> str:
    where = _require_inside(dataset)
    _check_filters(dataset, where)
    with translate_errors(Path(dataset.file.filename), where):
        image_format = encoded_images.format_of_rows(dataset)
    encoded_images.require_readable(image_format, where)
    return image_format


def describe_image_column(dataset: h5py.Dataset, file: Hdf5Source) -> Column:
    """Return the column of a dataset of encoded images, by its first step. Raises DataError."""
    where = _require_inside(dataset)
    row: tuple[int, ...] = (0, 0, 3)
    dtype = "uint8"
    _check_written(dataset, where)
    _check_filters(dataset, where)
    if len(dataset):  # `make_episode` rejects a column without steps
        with translate_errors(file.path, f"{where}: row 0"):
            first = bytes(dataset[0])
        row, dtype = encoded_images.describe_image(first, f"{where}: row 0")
        check_row(row, dtype, where)
    source = msgspec.structs.replace(file, name=dataset.name, encoded_images=True)
    return Column(dataset=dataset.name, steps=len(dataset), row=row, dtype=dtype, source=source)


def _require_inside(dataset: h5py.Dataset) -> str:
    """Return a dataset's name for messages. Raises DataError if its data are in another file."""
    where = f"{dataset.file.filename}: {dataset.name}"
    if dataset.external or dataset.is_virtual:
        raise DataError("data in another file", where=where, hint="write it into one file with h5repack")
    return where


def _check_written(dataset: h5py.Dataset, where: str) -> None:
    """Raise DataError for chunks that were never written, for which HDF5 returns zeros.

    HDF5 also stores zeros that were written, so a missing chunk means that the recorder stopped early.
    """
    if dataset.size and dataset.id.get_space_status() != h5py.h5d.SPACE_STATUS_ALLOCATED:
        hint = "remove the episode, or leave the array out with --skip-array"
        raise DataError("incomplete: some chunks were never written", where=where, hint=hint)


def _check_filters(dataset: h5py.Dataset, where: str) -> None:
    """Raise DataError for data compressed by an HDF5 filter that is not installed."""
    creation_properties = dataset.id.get_create_plist()
    filters = [creation_properties.get_filter(number) for number in range(creation_properties.get_nfilters())]
    missing = [
        f"{name.decode(errors='replace') or 'unnamed'} ({code})"
        for code, _, _, name in filters
        if not h5py.h5z.filter_avail(code)
    ]
    if not missing or not dataset.size:
        return
    try:
        dataset[(0,) * dataset.ndim]  # a writer may have left out the filter, chunk by chunk
    except OSError as error:
        problem = f"compressed by a filter that is not installed: {', '.join(missing)}"
        hint = "pip install hdf5plugin; or set HDF5_PLUGIN_PATH to the filter's folder"
        raise DataError(problem, where=where, hint=hint) from error


def read_attributes(node: h5py.Group | h5py.Dataset) -> dict[str, Any]:
    """Return a node's attributes as plain values: text, numbers, lists."""
    return {str(key): to_plain_value(node.attrs[key]) for key in sorted(node.attrs)}


def to_plain_value(value: Any) -> Any:
    """Convert an attribute's value: bytes to text (invalid UTF-8 to surrogates), arrays to lists."""
    if isinstance(value, np.ndarray):
        return [to_plain_value(item) for item in value.tolist()]
    if isinstance(value, np.generic):
        item = value.item()
        return str(item) if isinstance(item, np.generic) else to_plain_value(item)  # Python has no long double
    if isinstance(value, bytes):
        return value.decode(errors="surrogateescape")
    if isinstance(value, list | tuple):
        return [to_plain_value(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return None if isinstance(value, h5py.Empty) else str(value)


def read_texts(dataset: h5py.Dataset) -> list[str]:
    """Return a one-dimensional dataset of strings as text."""
    return [item.decode(errors="replace") if isinstance(item, bytes) else str(item) for item in dataset[()].tolist()]
