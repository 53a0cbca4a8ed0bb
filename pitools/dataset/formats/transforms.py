"""Columns that are made of others: resized, cast, or derived by a function."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from pitools.core.errors import DataError, PitError
from pitools.dataset.formats import derive_functions
from pitools.dataset.formats.model import CastOp, Column, ColumnReader, DeriveOp, ResizeOp

# Of what is read to be resized or cast, at a time.
_BLOCK_BYTES = 16 << 20
# A shard ends in the middle of an episode, and the next one begins there: its arrays are made once.
_CACHE_BYTES = 256 << 20
DerivedCache = dict[Column, NDArray[Any]]
_FILTERS = {"area": Image.Resampling.BOX, "bilinear": Image.Resampling.BILINEAR}


def read_resized(reader: ColumnReader, column: Column, op: ResizeOp, out: NDArray[Any], start: int, stop: int) -> None:
    """Fill `out` with steps of images in the column's size. Raises as the reader."""
    source, (height, width) = op.input, column.row[:2]
    rows = _centres(source.row[0], height)[:, None], _centres(source.row[1], width)[None, :]
    for low, block in _blocks(reader, source, start, stop):
        target = out[low - start : low - start + len(block)]
        if op.method == "nearest":
            target[:] = block[:, rows[0], rows[1]]
            continue
        for frame, result in zip(block, target, strict=True):
            # Pillow takes all pixels that a result covers into account, with either filter: nothing aliases.
            image = Image.fromarray(frame[..., 0] if frame.shape[2:] == (1,) else frame)
            result[:] = np.asarray(image.resize((width, height), _FILTERS[op.method])).reshape(result.shape)


def _centres(have: int, want: int) -> NDArray[np.intp]:
    """Which of `have` pixels lies under the centre of each of `want`."""
    return ((np.arange(want) + 0.5) * have / want).astype(np.intp)


def read_cast(reader: ColumnReader, op: CastOp, out: NDArray[Any], start: int, stop: int) -> None:
    """Fill `out` with steps in its own dtype. Raises DataError for a value that this cannot hold."""
    for low, block in _blocks(reader, op.input, start, stop):
        target = out[low - start : low - start + len(block)]
        with np.errstate(over="ignore", invalid="ignore"):
            target[:] = block
            # Fractions may lose digits, that is what they are cast for. Whole numbers, such as times in ns, may not.
            fractions = block.dtype.kind in "fc"
            lost = np.isfinite(block) & ~np.isfinite(target) if fractions else target.astype(block.dtype) != block
        if lost.any():
            step = low + int(np.argwhere(lost)[0][0])
            hint = f"cast it to a wider type than {out.dtype}"
            raise DataError(f"a value does not fit {out.dtype}", where=f"{_location(op.input)}: step {step}", hint=hint)


def _blocks(reader: ColumnReader, column: Column, start: int, stop: int) -> Any:
    row_bytes = int(np.prod(column.row, dtype=np.int64)) * np.dtype(column.dtype).itemsize
    rows = max(1, min(stop - start, _BLOCK_BYTES // row_bytes))
    block = np.empty((rows, *column.row), column.dtype)
    for low in range(start, stop, rows):
        part = block[: min(rows, stop - low)]
        reader.read_into(column, part, low, low + len(part))
        yield low, part


def read_derived(
    reader: ColumnReader, cache: DerivedCache, column: Column, op: DeriveOp, out: NDArray[Any], start: int, stop: int
) -> None:
    """Fill `out` with steps of what a function makes of the episode, which is kept for the next call.

    Raises DataError when it makes something else.
    """
    values = cache.get(column)
    if values is None:
        values = cache[column] = _derived(reader, column, op)
        while len(cache) > 1 and sum(each.nbytes for each in cache.values()) > _CACHE_BYTES:
            del cache[next(iter(cache))]
    out[:] = values[start:stop]


def _derived(reader: ColumnReader, column: Column, place: DeriveOp) -> NDArray[Any]:
    inputs = []
    for source in place.inputs:
        values = np.empty((source.steps, *source.row), source.dtype)
        reader.read_into(source, values, 0, source.steps)
        values.flags.writeable = False
        inputs.append(values)
    problem = f"{place.function} for {column.dataset}"
    try:
        result = np.asarray(derive_functions.find_function(place.function)(*inputs))
    except PitError:
        raise
    except Exception as error:  # it is the user's function
        text = f"{problem} raised {type(error).__name__}: {error}"
        raise DataError(text, where=place.where, hint="run it on this episode alone") from error
    shape = (column.steps, *column.row)
    if result.shape != shape or result.dtype != column.dtype:
        hint = "correct the function, or its shape and dtype in the schema (shape is that of one step)"
        found, expected = f"{result.dtype} {result.shape}", f"{column.dtype} {shape}"
        raise DataError(f"{problem} gave {found}, expected {expected}", where=place.where, hint=hint)
    if result.dtype.kind in "fc" and not np.isfinite(result).all():
        step = int(np.argwhere(~np.isfinite(result))[0][0])
        hint = "correct the function, or remove the episode if its inputs are none"
        raise DataError(f"{problem} gave a value that is not finite at step {step}", where=place.where, hint=hint)
    return result


def _location(column: Column) -> str:
    """The file and name of what a column is made of, for messages."""
    place = column.source
    while isinstance(place, ResizeOp | CastOp):
        column = place.input
        place = column.source
    return place.where if isinstance(place, DeriveOp) else f"{place.path}: {column.dataset}"
