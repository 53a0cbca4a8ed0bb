"""Batches of small leaves: all batches of a fabric are convolved in parallel, which saves a call per leaf."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pitools.topology.choose.problem import Problem
from pitools.topology.choose.tree_arrays import Floats, Ints


class LeafBatches:
    """best[m] of each batch of leaves, a row per batch; inf where the batch has fewer than m units."""

    def __init__(self, problem: Problem) -> None:
        members = problem.tree.leaf_batches
        self.members = members
        self.added_costs = _pad_rows(problem, members)
        self.steps = [np.zeros((len(members), 1))]
        for column in members.T:
            added = self.added_costs[column]
            self.steps.append(_min_plus_rows(self.steps[-1], added[:, : _finite_width(added)], problem.units))

    def table(self, batch: int) -> Floats:
        """Return best[m] of a batch, without the inf entries."""
        row: Floats = self.steps[-1][batch]
        return row[: int(np.isfinite(row).sum())]

    def distribution(self, batch: int, units: int) -> Iterator[tuple[int, int]]:
        """Yield leaf and units of the best choice of m units in a batch."""
        for step in range(self.members.shape[1] - 1, -1, -1):
            earlier, added = self.steps[step][batch], self.added_costs[self.members[batch, step]]
            low, high = max(0, units - len(earlier) + 1), min(units, len(added) - 1)
            leaf_units = low + int(np.argmin(added[low : high + 1] + earlier[units - high : units - low + 1][::-1]))
            if leaf_units:
                yield int(self.members[batch, step]), leaf_units
            units -= leaf_units
            if not units:
                return


def _pad_rows(problem: Problem, members: Ints) -> Floats:
    """Return the added cost of each batched leaf, a row per leaf, padded to one length; the padding leaf adds 0."""
    leaves = problem.tree.leaf_count
    room = np.diff(problem.offset) - 1
    is_member = np.zeros(leaves + 1, bool)
    is_member[members] = True
    max_units = int(room[is_member[:leaves]].max(initial=0))
    leaf = np.repeat(np.arange(leaves), room + 1)
    batched = is_member[leaf]
    padded = np.full((leaves + 1, max_units + 1), np.inf)
    padded[:, 0] = 0
    column = np.arange(len(leaf)) - problem.offset[leaf]
    padded[leaf[batched], column[batched]] = problem.added_costs[batched]
    return padded


def _finite_width(rows: Floats) -> int:
    return int(np.isfinite(rows).any(0).sum())


def _min_plus_rows(left: Floats, right: Floats, max_units: int) -> Floats:
    """Return the min-plus convolution of each row."""
    rows, length_left = left.shape
    width = min(length_left + right.shape[1] - 1, max_units + 1)
    out = np.full((rows, width), np.inf)
    for x in range(right.shape[1]):
        length = min(length_left, width - x)
        np.minimum(out[:, x : x + length], left[:, :length] + right[:, x : x + 1], out=out[:, x : x + length])
    return out
