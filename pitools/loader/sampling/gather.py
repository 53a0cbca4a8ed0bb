"""Read the steps of many samples from a version's arrays into one buffer."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pitools.loader.sampling.shuffle import Indices
from pitools.loader.sampling.windows import WindowLocations, WindowSpan
from pitools.store.reader.version_reader import VersionReader


def gather_windows(
    reader: VersionReader,
    name: str,
    out: NDArray[Any],
    rows: slice | Indices,
    locations: WindowLocations,
    span: WindowSpan,
) -> None:
    """Read n windows into n rows of `out`, (…, span.length, *row), repeating steps at the ends of episodes.

    Raises as `VersionReader.read_into`.
    """
    if resident := reader.resident_rows(name):
        steps = locations.anchor[:, None] + np.arange(-span.before, span.after)
        np.clip(steps, locations.start[:, None], locations.stop[:, None] - 1, out=steps)
        if isinstance(rows, slice):
            np.take(resident.rows, resident.row_indices(steps), axis=0, out=out[rows], mode="clip")
        else:
            out[rows] = resident.rows[resident.row_indices(steps)]
        return
    first = locations.anchor - span.before
    # At least one step: a window outside its episode consists of the nearest step, repeated.
    low = np.clip(first, locations.start, locations.stop - 1)
    high = np.clip(first + span.length, locations.start + 1, locations.stop)
    skips = np.clip(low - first, 0, span.length - 1)
    targets = range(rows.start, rows.stop) if isinstance(rows, slice) else rows.tolist()
    for row, skip, start, stop in zip(targets, skips.tolist(), low.tolist(), high.tolist(), strict=True):
        window, end = out[row], skip + stop - start
        reader.read_into(name, window[skip:end], start, stop)
        if skip:
            window[:skip] = window[skip]
        if end < span.length:
            window[end:] = window[end - 1]


def gather_run(reader: VersionReader, name: str, out: NDArray[Any], start: int) -> None:
    """Read the steps from `start` on into `out`, (steps, *row). Raises as `VersionReader.read_into`."""
    if resident := reader.resident_rows(name):
        first, last = resident.row_indices(np.array([start, start + len(out) - 1])).tolist()
        out[:] = resident.rows[first : last + 1]
    else:
        reader.read_into(name, out, start, start + len(out))
