"""HDF5 as we accept it: every failure names the file, and nothing outside the file is followed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from pitools.core.errors import DataError, PitError
from pitools.dataset.sources.recording import MAX_ROW_BYTES, Column, natural


@contextmanager
def opened(path: Path) -> Iterator[h5py.File]:
    """The file, open for reading. Whatever HDF5 says in this block is raised as DataError: only read in it."""
    try:
        # Many shared file systems have no locks; where they have, a writer that is still at work is refused.
        with h5py.File(path, "r", locking="best-effort") as file:
            yield file
    except PitError:
        raise
    except (OSError, RuntimeError, KeyError, ValueError, TypeError) as error:
        text = " ".join(str(error.args[0] if error.args else error).split())
        raise DataError(
            f"cannot be read as HDF5: {text}", where=str(path), hint="copy it again from where it was recorded"
        ) from error


def walk(group: h5py.Group, visited: set[int] | None = None) -> Iterator[tuple[str, h5py.Dataset]]:
    """Every dataset below a group with its path from there, in natural order. Raises DataError for a link that leaves
    the file or comes back to a group already seen."""
    visited = set() if visited is None else visited
    address = h5py.h5o.get_info(group.id).addr
    if address in visited:
        raise DataError(f"{group.name} is linked twice", where=group.file.filename, hint="remove the second link")
    visited.add(address)
    for key in sorted(group, key=natural):
        # An external link would make us read a file that nobody named.
        if isinstance(group.get(key, getlink=True), h5py.ExternalLink):
            raise DataError(f"{group.name}/{key} is a link to another file", where=group.file.filename)
        node = group[key]
        if isinstance(node, h5py.Group):
            for name, dataset in walk(node, visited):
                yield f"{key}/{name}", dataset
        elif isinstance(node, h5py.Dataset):
            yield key, node


def child(group: h5py.Group, key: str, kind: type) -> Any:
    """The member of a group when it is of this kind and lies in the file, else None."""
    link = group.get(key, getlink=True)
    node = None if link is None or isinstance(link, h5py.ExternalLink) else group.get(key)
    return node if isinstance(node, kind) else None


def column(dataset: h5py.Dataset, steps: int) -> Column:
    """What a dataset of one row a step holds. Raises DataError when it is not such an array of numbers."""
    where = f"{dataset.file.filename}: {dataset.name}"
    if dataset.external or dataset.is_virtual:
        raise DataError("its data lie in another file", where=where, hint="write it into one file with h5repack")
    if dataset.dtype.kind not in "biufc" or dataset.dtype.itemsize > 16 or dataset.dtype == np.longdouble:
        raise DataError(f"dtype {dataset.dtype} is not one of numbers", where=where, hint="leave it out with --skip")
    if not dataset.shape:
        raise DataError(
            f"it is one value where an array of {steps} steps was expected",
            where=where,
            hint="leave it out with --skip",
        )
    row = tuple(int(size) for size in dataset.shape[1:])
    row_bytes = math.prod(row) * dataset.dtype.itemsize
    if not 0 < row_bytes <= MAX_ROW_BYTES:
        raise DataError(
            f"a step of it has {row_bytes} bytes; 1 to {MAX_ROW_BYTES} can be stored",
            where=where,
            hint="leave it out with --skip",
        )
    return Column(dataset=dataset.name, steps=int(dataset.shape[0]), row=row, dtype=dataset.dtype.name)


def attributes(node: h5py.Group) -> dict[str, Any]:
    """A node's attributes as JSON can hold them."""
    return {str(key): plain(node.attrs[key]) for key in sorted(node.attrs)}


def plain(value: Any) -> Any:
    """An attribute's value as a JSON value: bytes are UTF-8 text, arrays are lists, not-a-number is null."""
    if isinstance(value, np.ndarray):
        return [plain(item) for item in value.tolist()]
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    return None if isinstance(value, h5py.Empty) else str(value)


def texts(dataset: h5py.Dataset) -> list[str]:
    """A one-dimensional dataset of strings, as text."""
    return [item.decode(errors="replace") if isinstance(item, bytes) else str(item) for item in dataset[()].tolist()]
