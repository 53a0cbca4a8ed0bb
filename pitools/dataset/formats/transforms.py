"""Compute columns from other columns: resize, cast, or derive by a function."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from pitools.core.errors import DataError, PitError
from pitools.dataset.formats import derive_functions
from pitools.dataset.formats.model import CastOp, Column, ColumnReader, DeriveOp, ResizeOp

# Input of a resize or cast, read at a time.
_BLOCK_BYTES = 16 << 20
# Two shards may share an episode: its derived arrays are computed once.
_CACHE_BYTES = 256 << 20
DerivedCache = dict[Column, NDArray[Any]]
_FILTERS = {"area": Image.Resampling.BOX, "bilinear": Image.Resampling.BILINEAR}


def read_resized(reader: ColumnReader, column: Column, op: ResizeOp, out: NDArray[Any], start: int, stop: int) -> None:
    """Fill `out` with resized images of steps [start, stop). Raises the errors of the reader."""
    source, (height, width) = op.input, column.row[:2]
    rows = _centres(source.row[0], height)[:, None], _centres(source.row[1], width)[None, :]
    for low, block in _read_blocks(reader, source, start, stop):
        target = out[low - start : low - start + len(block)]
        if op.method == "nearest":
            target[:] = block[:, rows[0], rows[1]]
            continue
        for frame, result in zip(block, target, strict=True):
            # With either filter, Pillow averages over all pixels that a result covers, without aliasing.
            image = Image.fromarray(frame[..., 0] if frame.shape[2:] == (1,) else frame)
            result[:] = np.asarray(image.resize((width, height), _FILTERS[op.method])).reshape(result.shape)


def _centres(source_size: int, target_size: int) -> NDArray[np.intp]:
    """Return the index of the source pixel under the centre of each target pixel."""
    return ((np.arange(target_size) + 0.5) * source_size / target_size).astype(np.intp)


def read_cast(reader: ColumnReader, op: CastOp, out: NDArray[Any], start: int, stop: int) -> None:
    """Fill `out` with steps cast to its dtype. Raises DataError for a value that does not fit."""
    for low, block in _read_blocks(reader, op.input, start, stop):
        target = out[low - start : low - start + len(block)]
        with np.errstate(over="ignore", invalid="ignore"):
            target[:] = block
            # A cast may round floats. Integers, such as times in ns, must stay exact.
            fractions = block.dtype.kind in "fc"
            changed = np.isfinite(block) & ~np.isfinite(target) if fractions else target.astype(block.dtype) != block
        if changed.any():
            step = low + int(np.argwhere(changed)[0][0])
            hint = f"cast it to a wider type than {out.dtype}"
            raise DataError(f"a value does not fit {out.dtype}", where=f"{_location(op.input)}: step {step}", hint=hint)


def _read_blocks(reader: ColumnReader, column: Column, start: int, stop: int) -> Any:
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
    """Fill `out` with steps of a function's result for the episode, which `cache` keeps for the next call.

    Raises DataError if the result has another shape or dtype than the column.
    """
    values = cache.get(column)
    if values is None:
        values = cache[column] = _derive_values(reader, column, op)
        while len(cache) > 1 and sum(each.nbytes for each in cache.values()) > _CACHE_BYTES:
            del cache[next(iter(cache))]
    out[:] = values[start:stop]


def _derive_values(reader: ColumnReader, column: Column, op: DeriveOp) -> NDArray[Any]:
    inputs = []
    for source in op.inputs:
        values = np.empty((source.steps, *source.row), source.dtype)
        reader.read_into(source, values, 0, source.steps)
        values.flags.writeable = False
        inputs.append(values)
    problem = f"{op.function} for {column.dataset}"
    try:
        result = np.asarray(derive_functions.find_function(op.function)(*inputs))
    except PitError:
        raise
    except Exception as error:  # a user's function may raise anything
        text = f"{problem} raised {type(error).__name__}: {error}"
        raise DataError(text, where=op.where, hint="run it on this episode alone") from error
    shape = (column.steps, *column.row)
    if result.shape != shape or result.dtype != column.dtype:
        hint = "correct the function, or its shape (of one step) and dtype in the transform file"
        actual, expected = f"{result.dtype} {result.shape}", f"{column.dtype} {shape}"
        raise DataError(f"{problem} gave {actual}, expected {expected}", where=op.where, hint=hint)
    if result.dtype.kind in "fc" and not np.isfinite(result).all():
        step = int(np.argwhere(~np.isfinite(result))[0][0])
        hint = "correct the function, or remove the episode if its inputs are not finite"
        raise DataError(f"{problem} gave a value that is not finite at step {step}", where=op.where, hint=hint)
    return result


def _location(column: Column) -> str:
    """Return the file and name of a column's original source, for messages."""
    source = column.source
    while isinstance(source, ResizeOp | CastOp):
        column = source.input
        source = column.source
    return source.where if isinstance(source, DeriveOp) else f"{source.path}: {column.dataset}"
