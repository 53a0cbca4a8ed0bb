"""Small arrays in memory: all of their steps, or of a part of a version the runs that are there, one after another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Runs = Sequence[tuple[int, int]]


class ResidentArray:
    """An array's steps that are here. rows: (steps, *row). is_complete: none was left out, so that row i is step i."""

    def __init__(self, name: str, rows: NDArray[Any], runs: Runs, *, is_complete: bool) -> None:
        """runs: [start, stop) of the steps that the rows are, ascending."""
        self.rows, self.is_complete = rows, is_complete
        self._name, self._runs = name, runs
        self._starts, self._stops = np.array(runs, np.int64).reshape(-1, 2).T
        lengths = self._stops - self._starts
        self._shifts = self._starts - (np.cumsum(lengths) - lengths)

    def row_indices(self, steps: NDArray[np.int64]) -> NDArray[np.int64]:
        """Which rows these steps are, any shape of them. Raises IndexError for a step that was left out."""
        if self.is_complete or not steps.size:
            return steps
        run = np.searchsorted(self._starts, steps, "right") - 1
        outside = (run < 0) | (steps >= self._stops[run])
        if outside.any():
            step = int(steps[outside].reshape(-1)[0])
            raise missing_steps_error(self._name, step, step + 1, self._runs)
        found: NDArray[np.int64] = steps - self._shifts[run]
        return found


def missing_steps_error(name: str, start: int, stop: int, runs: Runs) -> IndexError:
    """What to say of steps that a part of a version does not have."""
    here = ", ".join(f"{first}:{last}" for first, last in runs[:8]) + (", …" if len(runs) > 8 else "")
    return IndexError(f"steps [{start}, {stop}) of {name} were left out of this subset, which has {here}")
