"""Steps of many samples out of a version's arrays, into one buffer: small arrays from memory, others from files."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pitools.loader.sampling.windows import Indices, Place, Span
from pitools.store.reader.version_reader import Arrays


def windows(arrays: Arrays, name: str, out: NDArray[Any], to: slice | Indices, place: Place, span: Span) -> None:
    """Read the windows at n places, ends of episodes repeated, to n rows of `out`, (…, span.length, *row).

    Raises as `Arrays.read_into`.
    """
    if held := arrays.held(name):
        steps = place.anchor[:, None] + np.arange(-span.before, span.after)
        np.clip(steps, place.start[:, None], place.stop[:, None] - 1, out=steps)
        if isinstance(to, slice):
            np.take(held.rows, held.places(steps), axis=0, out=out[to], mode="clip")
        else:
            out[to] = held.rows[held.places(steps)]
        return
    first = place.anchor - span.before
    # One step at least, since a window may lie beside its episode: then that step is all of it.
    low = np.clip(first, place.start, place.stop - 1)
    high = np.clip(first + span.length, place.start + 1, place.stop)
    skips = np.clip(low - first, 0, span.length - 1)
    targets = range(to.start, to.stop) if isinstance(to, slice) else to.tolist()
    for row, skip, start, stop in zip(targets, skips.tolist(), low.tolist(), high.tolist(), strict=True):
        window, end = out[row], skip + stop - start
        arrays.read_into(name, window[skip:end], start, stop)
        if skip:
            window[:skip] = window[skip]
        if end < span.length:
            window[end:] = window[end - 1]


def run(arrays: Arrays, name: str, out: NDArray[Any], start: int) -> None:
    """Read the steps from `start` on to all of `out`, (steps, *row). Raises as `Arrays.read_into`."""
    if held := arrays.held(name):
        first, last = held.places(np.array([start, start + len(out) - 1])).tolist()
        out[:] = held.rows[first : last + 1]
    else:
        arrays.read_into(name, out, start, start + len(out))
