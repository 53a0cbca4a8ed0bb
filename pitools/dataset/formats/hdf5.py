"""HDF5 as we accept it: every failure names the file, and nothing outside the file is followed."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import h5py
import msgspec
import numpy as np

from pitools.core.errors import DataError, PitError
from pitools.dataset.formats import encoded_images
from pitools.dataset.formats.model import Column, Hdf5Source, check_row, is_own_fault, natural_sort_key


@contextmanager
def open_hdf5(path: Path) -> Iterator[h5py.File]:
    """The file, open for reading. Whatever HDF5 says in this block is raised as DataError: only read in it."""
    # Many shared file systems have no locks; where they have, a writer that is still at work is refused.
    load_filters()
    with translate_errors(path), h5py.File(path, "r", locking="best-effort") as file:
        yield file


@lru_cache(maxsize=1)
def load_filters() -> None:
    """Let HDF5 have the filters of the package hdf5plugin (Blosc, Zstandard, LZ4, …) where that is installed."""
    with suppress(ImportError):
        importlib.import_module("hdf5plugin")


@contextmanager
def translate_errors(path: Path, where: str = "") -> Iterator[None]:
    """Whatever HDF5 says in this block is raised as DataError: only read in it. where: more than the path, if known."""
    try:
        yield
    except PitError:
        raise
    except (OSError, RuntimeError, KeyError, ValueError, TypeError) as error:
        if is_own_fault(error):
            raise
        text = " ".join(str(error.args[-1] if error.args else error).split())  # the first may be an error's number
        raise DataError(
            f"cannot be read as HDF5: {text}", where=where or str(path), hint="copy it again from where it was recorded"
        ) from error


def walk_datasets(group: h5py.Group, visited: set[int] | None = None) -> Iterator[tuple[str, h5py.Dataset]]:
    """Every dataset below a group with its path from there, in natural order. Raises DataError for a link that leaves
    the file or comes back to a group already seen."""
    visited = set() if visited is None else visited
    address = h5py.h5o.get_info(group.id).addr
    if address in visited:
        raise DataError(f"{group.name} is linked twice", where=group.file.filename, hint="remove the second link")
    visited.add(address)
    for key in sorted(group, key=natural_sort_key):
        # An external link would make us read a file that nobody named; so may a soft link to where one leads.
        if isinstance(group.get(key, getlink=True), h5py.ExternalLink) or not _same_file(node := group[key], group):
            problem, hint = f"{group.name}/{key} is a link to another file", "write it into one file with h5repack"
            raise DataError(problem, where=group.file.filename, hint=hint)
        if isinstance(node, h5py.Group):
            for name, dataset in walk_datasets(node, visited):
                yield f"{key}/{name}", dataset
        elif isinstance(node, h5py.Dataset):
            yield key, node


def get_child(group: h5py.Group, key: str, kind: type) -> Any:
    """The member of a group when it is of this kind and lies in the file, else None."""
    link = group.get(key, getlink=True)
    node = None if link is None or isinstance(link, h5py.ExternalLink) else group.get(key)
    return node if isinstance(node, kind) and _same_file(node, group) else None


def _same_file(node: Any, group: h5py.Group) -> bool:
    return bool(h5py.h5o.get_info(node.id).fileno == h5py.h5o.get_info(group.id).fileno)


def column_source(path: Path) -> Hdf5Source:
    """Where datasets of this file are, but for their names. Raises OSError."""
    return Hdf5Source(path=path, name="", bytes=path.stat().st_size)


def step_count(dataset: h5py.Dataset) -> int:
    """Length of a dataset's first axis."""
    return int(dataset.shape[0]) if dataset.shape else 0


def describe_column(dataset: h5py.Dataset, length: int, file: Hdf5Source) -> Column:
    """What a dataset of one row a step holds. Raises DataError when it is not such an array of numbers."""
    where = _require_inside(dataset)
    if dataset.dtype.kind not in "biufc" or dataset.dtype.itemsize > 16 or dataset.dtype == np.longdouble:
        raise DataError(f"dtype {dataset.dtype} is not one of numbers", where=where, hint="leave it out with --skip")
    if not dataset.shape:
        raise DataError(
            f"it is one value where an array of {length} steps was expected",
            where=where,
            hint="leave it out with --skip",
        )
    row = tuple(int(size) for size in dataset.shape[1:])
    check_row(row, dataset.dtype.name, where)
    _check_written(dataset, where)
    _check_filters(dataset, where)
    found = msgspec.structs.replace(file, name=dataset.name)
    return Column(dataset=dataset.name, steps=int(dataset.shape[0]), row=row, dtype=dataset.dtype.name, source=found)


def describe_column_or_images(dataset: h5py.Dataset, length: int, file: Hdf5Source, *, camera: bool = False) -> Column:
    """What a dataset holds where its rows may be numbers or picture files. Raises DataError, also for pictures of a
    format that is not read: nothing says of bytes in a version what they were.

    camera: whether rows of bytes are known to be pictures.
    """
    if _may_hold_images(dataset) and (camera or _kind_of_rows(dataset)):
        return describe_image_column(dataset, file)
    return describe_column(dataset, length, file)


def _may_hold_images(dataset: h5py.Dataset) -> bool:
    """Whether each row is bytes, of one length or of a length of its own."""
    if dataset.ndim == 1:
        return bool(h5py.check_vlen_dtype(dataset.dtype) == np.uint8 or dataset.dtype.kind == "S")
    return bool(dataset.ndim == 2 and dataset.dtype == np.uint8)


def _kind_of_rows(dataset: h5py.Dataset) -> str:
    where, last = _require_inside(dataset), len(dataset) - 1
    _check_filters(dataset, where)
    with translate_errors(Path(dataset.file.filename), where):
        found = encoded_images.format_of_rows(
            [bytes(dataset[row]) for row in sorted({0, last // 2, last}) if last >= 0]
        )
    encoded_images.require_readable(found, where)
    return found


def describe_image_column(dataset: h5py.Dataset, file: Hdf5Source) -> Column:
    """What a dataset of one picture file a step holds, as its first step shows. Raises DataError."""
    where = _require_inside(dataset)
    row: tuple[int, ...] = (0, 0, 3)
    dtype = "uint8"
    _check_written(dataset, where)
    _check_filters(dataset, where)
    if len(dataset):  # a column without steps is refused for that
        with translate_errors(file.path, f"{where}: row 0"):
            first = bytes(dataset[0])
        row, dtype = encoded_images.describe_image(first, f"{where}: row 0")
        check_row(row, dtype, where)
    found = msgspec.structs.replace(file, name=dataset.name, encoded_images=True)
    return Column(dataset=dataset.name, steps=len(dataset), row=row, dtype=dtype, source=found)


def _require_inside(dataset: h5py.Dataset) -> str:
    """The name of a dataset in messages. Raises DataError when its data are not in the file."""
    where = f"{dataset.file.filename}: {dataset.name}"
    if dataset.external or dataset.is_virtual:
        raise DataError("its data lie in another file", where=where, hint="write it into one file with h5repack")
    return where


def _check_written(dataset: h5py.Dataset, where: str) -> None:
    """Raises DataError for values that nobody wrote: HDF5 would give zeros. It stores zeros too where they are written,
    so that these are what a recorder that died had not got to."""
    if dataset.size and dataset.id.get_space_status() != h5py.h5d.SPACE_STATUS_ALLOCATED:
        problem = "not all of it was ever written"
        raise DataError(problem, where=where, hint="remove the episode, or leave the array out with --skip")


def _check_filters(dataset: h5py.Dataset, where: str) -> None:
    """Raises DataError for data that were compressed by what HDF5 does not have here."""
    known = dataset.id.get_create_plist()
    filters = [known.get_filter(number) for number in range(known.get_nfilters())]
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
        problem = f"it is compressed by a filter that is not installed: {', '.join(missing)}"
        hint = "pip install hdf5plugin; else set HDF5_PLUGIN_PATH to the folder of the filter"
        raise DataError(problem, where=where, hint=hint) from error


def attributes(node: h5py.Group | h5py.Dataset) -> dict[str, Any]:
    """A node's attributes as plain values: text, numbers, lists."""
    return {str(key): to_plain_value(node.attrs[key]) for key in sorted(node.attrs)}


def to_plain_value(value: Any) -> Any:
    """An attribute's value as a plain one: bytes are UTF-8 text, bytes that are not are kept as surrogates, arrays are
    lists."""
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
    """A one-dimensional dataset of strings, as text."""
    return [item.decode(errors="replace") if isinstance(item, bytes) else str(item) for item in dataset[()].tolist()]
