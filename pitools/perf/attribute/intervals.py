"""Sets of intervals on int64 nanoseconds, so that measures of them are exact."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pitools.perf.spans import Ints


@dataclass(frozen=True)
class IntervalSet:
    """Disjoint intervals, sorted. before_ns: their summed length before each, and at last that of all."""

    start_ns: Ints
    end_ns: Ints
    before_ns: Ints

    def measure(self, start_ns: Ints, end_ns: Ints) -> Ints:
        """Return the length of the set within each of these windows."""
        return self._until(end_ns) - self._until(start_ns)

    def _until(self, at_ns: Ints) -> Ints:
        index = np.searchsorted(self.start_ns, at_ns, "right") - 1
        inside = np.maximum(index, 0)
        if not len(self.start_ns):
            return np.zeros(len(at_ns), np.int64)
        partial = np.minimum(at_ns, self.end_ns[inside]) - self.start_ns[inside]
        return np.where(index < 0, 0, self.before_ns[inside] + partial)


def union(start_ns: Ints, end_ns: Ints) -> IntervalSet:
    """Return the union of intervals in any order."""
    order = np.argsort(start_ns, kind="stable")
    start, end = start_ns[order], np.maximum.accumulate(end_ns[order])
    begins = np.ones(len(start), bool)
    begins[1:] = start[1:] > end[:-1]
    first = np.flatnonzero(begins)
    start, end = start[first], end[np.r_[first[1:], len(order)] - 1] if len(order) else end
    return IntervalSet(start, end, np.r_[0, np.cumsum(end - start)])
