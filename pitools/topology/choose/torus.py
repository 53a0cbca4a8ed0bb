"""Find the best free box of a torus: every shape at every position, with wrap-around, by sums over windows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from operator import le
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pitools.core.errors import ClusterError
from pitools.topology.choose.problem import FreeInput, require_valid_costs
from pitools.topology.choose.tree_arrays import Floats
from pitools.topology.choose.types import CostWeights, NodeChoice
from pitools.topology.fabric_model import Fabric, Torus
from pitools.topology.ring_cost import ring_hops

Shape = tuple[int, ...]


@dataclass(frozen=True, order=True)
class Box:
    """A box of a torus: its first corner and its extents. Ordered by cost."""

    cost: float
    shape: Shape
    anchor: Shape


def select_box(
    fabric: Fabric, torus: Torus, free: FreeInput, k: int, *, spares: int, weights: CostWeights
) -> NodeChoice:
    """Return the free box of k + spares nodes with the least surface that cuts the fewest links of free neighbours.

    If no box of that size is free, the smallest larger box is used; nodes beyond k are spares. Raises ClusterError if
    no box is large enough.
    """
    is_free, cost = _free_grid(torus, free)
    total = k + spares
    volume, boxes = _smallest_boxes(is_free, cost * weights.node_cost, total)
    if not boxes:
        problem = f"{total} nodes requested, {int(is_free.sum())} free, but no free box of {total} or more"
        raise ClusterError(problem, where="nodes", hint="request fewer nodes, or retry later")
    best = boxes[0]
    cells = _cells(best, is_free.shape)
    active = cells[:k]
    if volume > k:  # prefer a smaller box within the box, else take the first k nodes of its ring
        is_in_box = np.zeros_like(is_free)
        is_in_box[tuple(np.array(cells).T)] = True
        inner = _best_boxes(is_in_box, cost * weights.node_cost, k, [])
        active = _cells(inner[0], is_free.shape) if inner else active
    name_by_cell = dict(zip(np.ndindex(is_free.shape), torus.nodes, strict=True))
    spare_cells = [cell for cell in cells if cell not in set(active)]
    nodes = tuple(name_by_cell[cell] for cell in active)
    extra = weights.node_cost * float(sum(cost[cell] for cell in cells))
    return NodeChoice(
        nodes=nodes,
        spares=tuple(name_by_cell[cell] for cell in spare_cells),
        objective="surface",
        cost=best.cost,
        runner_up_cost=boxes[1].cost if len(boxes) > 1 else None,
        extra_cost=extra,
        free=int(is_free.sum()),
        ring_hops=ring_hops(nodes, fabric),
        shape=best.shape,
        warning=f"no free box has {total} nodes: using one of {volume}" if volume > total else "",
    )


def _free_grid(torus: Torus, free: FreeInput) -> tuple[NDArray[np.bool_], Floats]:
    cost_by_node = dict(free) if isinstance(free, Mapping) else dict.fromkeys(free, 0.0)
    require_valid_costs(cost_by_node, np.array(list(cost_by_node.values()), np.float64))
    cost = np.array([cost_by_node.get(node, np.inf) for node in torus.nodes]).reshape(torus.dims)
    is_free = np.isfinite(cost)
    return is_free, np.where(is_free, cost, 0.0)


def _smallest_boxes(is_free: NDArray[np.bool_], cost: Floats, least: int) -> tuple[int, list[Box]]:
    """Return the smallest volume, at least `least`, with a free box, and its best two boxes."""
    shapes_not_free: list[Shape] = []  # shapes without a free box; larger shapes have none either
    for volume in range(least, int(is_free.sum()) + 1):
        if boxes := _best_boxes(is_free, cost, volume, shapes_not_free):
            return volume, boxes
    return 0, []


def _best_boxes(is_free: NDArray[np.bool_], cost: Floats, volume: int, shapes_not_free: list[Shape]) -> list[Box]:
    """Return the best two free boxes of `volume` nodes; fewer if there are fewer.

    shapes_not_free: shapes without a free box; this function adds to them. Shapes that contain one of them are skipped.
    """
    boxes: list[Box] = []
    count = is_free.astype(np.int64)
    for shape in _shapes(volume, is_free.shape):
        if any(all(map(le, small, shape)) for small in shapes_not_free):
            continue
        fits = _window_sums(count, shape) == volume
        # A box that fills a dimension is the same from any start: count only the one at 0.
        for axis, (extent, size) in enumerate(zip(shape, is_free.shape, strict=True)):
            if extent == size:
                fits[(slice(None),) * axis + (slice(1, None),)] = False
        if fits.any():
            score = np.where(
                fits,
                _window_sums(cost, shape) + _cut_links(count, shape) + _surface_links(shape, is_free.shape),
                np.inf,
            )
            for place in np.argsort(score, axis=None, kind="stable")[:2]:
                anchor = tuple(int(i) for i in np.unravel_index(place, score.shape))
                if fits[anchor]:
                    boxes.append(Box(float(score[anchor]), shape, anchor))
        else:
            shapes_not_free.append(shape)
    return sorted(boxes)[:2]


def _shapes(volume: int, dims: Sequence[int]) -> Iterator[Shape]:
    if len(dims) == 1:
        if volume <= dims[0]:
            yield (volume,)
        return
    for first in range(1, min(volume, dims[0]) + 1):
        if volume % first == 0:
            for rest in _shapes(volume // first, dims[1:]):
                yield (first, *rest)


def _window_sums(values: NDArray[Any], shape: Shape) -> NDArray[Any]:
    """Return, for each position, the sum over the box that starts there, with wrap-around."""
    for axis, extent in enumerate(shape):
        size = values.shape[axis]
        sums = np.cumsum(np.concatenate([values, values], axis), axis)
        end = np.take(sums, np.arange(extent - 1, extent - 1 + size), axis)
        begin = np.take(sums, np.arange(size) - 1, axis)
        begin[(slice(None),) * axis + (0,)] = 0
        values = end - begin
    return values


def _surface_links(shape: Shape, dims: Sequence[int]) -> int:
    """Return the links out of the box: both faces of each dimension that the box does not fill."""
    return sum(2 * prod(shape) // extent for extent, size in zip(shape, dims, strict=True) if extent < size)


def _cut_links(count: NDArray[np.int64], shape: Shape) -> NDArray[np.int64]:
    """Return, for each position, the links from the box to adjacent free nodes."""
    cut = np.zeros_like(count)
    for axis, (extent, size) in enumerate(zip(shape, count.shape, strict=True)):
        if extent < size:
            side = _window_sums(count, (*shape[:axis], 1, *shape[axis + 1 :]))
            cut += np.roll(side, 1, axis) + np.roll(side, -extent, axis)
    return cut


def _cells(box: Box, dims: Sequence[int]) -> list[Shape]:
    """Return the cells of the box, each adjacent to the previous: back and forth along the last dimension first."""
    return [
        tuple((a + b) % size for a, b, size in zip(box.anchor, place, dims, strict=True))
        for place in _boustrophedon(box.shape)
    ]


def _boustrophedon(shape: Shape) -> Iterator[Shape]:
    if not shape:
        yield ()
        return
    for number, rest in enumerate(_boustrophedon(shape[:-1])):
        line = range(shape[-1])
        for last in line if number % 2 == 0 else reversed(line):
            yield (*rest, last)
