"""Small leaves by the bundle: all bundles of a fabric are folded side by side, which saves a call for each leaf."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pitools.topology.choose.problem import Problem
from pitools.topology.choose.tree_arrays import Floats, Ints


class LeafBatches:
    """best[m] of each of the index's bundles, by one row each; inf where a bundle has not so many."""

    def __init__(self, problem: Problem) -> None:
        members = problem.index.bundles
        self.members = members
        self.adds = _pad_rows(problem, members)
        self.steps = [np.zeros((len(members), 1))]
        for column in members.T:
            adds = self.adds[column]
            self.steps.append(_min_plus_rows(self.steps[-1], adds[:, : _width(adds)], problem.units))

    def table(self, bundle: int) -> Floats:
        """best[m] of one, as far as it goes."""
        row: Floats = self.steps[-1][bundle]
        return row[: int(np.isfinite(row).sum())]

    def distribution(self, bundle: int, m: int) -> Iterator[tuple[int, int]]:
        """Leaf and units of the best choice of m units of a bundle."""
        for step in range(self.members.shape[1] - 1, -1, -1):
            before, adds = self.steps[step][bundle], self.adds[self.members[bundle, step]]
            low, high = max(0, m - len(before) + 1), min(m, len(adds) - 1)
            mine = low + int(np.argmin(adds[low : high + 1] + before[m - high : m - low + 1][::-1]))
            if mine:
                yield int(self.members[bundle, step]), mine
            m -= mine
            if not m:
                return


def _pad_rows(problem: Problem, members: Ints) -> Floats:
    """What each bundled leaf adds, by rows of one length; of the leaf that is none, nothing."""
    leaves = problem.index.leaf_count
    room = np.diff(problem.offset) - 1
    is_member = np.zeros(leaves + 1, bool)
    is_member[members] = True
    most = int(room[is_member[:leaves]].max(initial=0))
    leaf = np.repeat(np.arange(leaves), room + 1)
    kept = is_member[leaf]
    padded = np.full((leaves + 1, most + 1), np.inf)
    padded[:, 0] = 0
    padded[leaf[kept], (np.arange(len(leaf)) - problem.offset[leaf])[kept]] = problem.adds[kept]
    return padded


def _width(rows: Floats) -> int:
    return int(np.isfinite(rows).any(0).sum())


def _min_plus_rows(before: Floats, adds: Floats, most: int) -> Floats:
    """Min-plus convolution, row by row."""
    rows, held = before.shape
    width = min(held + adds.shape[1] - 1, most + 1)
    out = np.full((rows, width), np.inf)
    for x in range(adds.shape[1]):
        length = min(held, width - x)
        np.minimum(out[:, x : x + length], before[:, :length] + adds[:, x : x + 1], out=out[:, x : x + length])
    return out
