"""Small arrays in memory: all of their steps, or the concatenated ranges of steps in a staged subset."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ranges = Sequence[tuple[int, int]]


class ResidentArray:
    """The present steps of an array. rows: (steps, *row). is_complete: all steps are present, so row i is step i."""

    def __init__(self, name: str, rows: NDArray[Any], ranges: Ranges, *, is_complete: bool) -> None:
        """ranges: ranges [start, stop) of the present steps, ascending."""
        self.rows, self.is_complete = rows, is_complete
        self._name, self._ranges = name, ranges
        self._starts, self._stops = np.array(ranges, np.int64).reshape(-1, 2).T
        lengths = self._stops - self._starts
        self._shifts = self._starts - (np.cumsum(lengths) - lengths)

    def row_indices(self, steps: NDArray[np.int64]) -> NDArray[np.int64]:
        """Map steps, of any shape, to indices of rows. Raises IndexError for an absent step."""
        if self.is_complete or not steps.size:
            return steps
        index = np.searchsorted(self._starts, steps, "right") - 1
        outside = (index < 0) | (steps >= self._stops[index])
        if outside.any():
            step = int(steps[outside].reshape(-1)[0])
            raise missing_steps_error(self._name, step, step + 1, self._ranges)
        indices: NDArray[np.int64] = steps - self._shifts[index]
        return indices


def missing_steps_error(name: str, start: int, stop: int, ranges: Ranges) -> IndexError:
    """Return the error for steps that are not in a staged subset."""
    present = ", ".join(f"{first}:{last}" for first, last in ranges[:8]) + (", …" if len(ranges) > 8 else "")
    return IndexError(f"steps [{start}, {stop}) of {name}: not in this subset (expected {present})")
