"""Windows of many samples out of an array, into one buffer."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pitools.loader.windows import Place, Span
from pitools.store.arrays import Arrays


def gather(arrays: Arrays, name: str, out: NDArray[Any], place: Place, span: Span) -> None:
    """Fill `out`, (n, span.length, *row), with the windows at n places, ends of episodes repeated.

    Raises as `Arrays.read_into`.
    """
    if (held := arrays.resident(name)) is not None:
        steps = place.anchor[:, None] + np.arange(-span.before, span.after)
        np.clip(steps, place.start[:, None], place.stop[:, None] - 1, out=steps)
        np.take(held, steps, axis=0, out=out, mode="clip")
        return
    first = place.anchor - span.before
    low, high = np.maximum(first, place.start), np.minimum(place.anchor + span.after, place.stop)
    for row, (at, start, stop) in enumerate(zip(first.tolist(), low.tolist(), high.tolist(), strict=True)):
        window = out[row]
        skip, end = start - at, stop - at
        arrays.read_into(name, window[skip:end], start, stop)
        if skip:
            window[:skip] = window[skip]
        if end < span.length:
            window[end:] = window[end - 1]
