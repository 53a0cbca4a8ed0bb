"""The best free box of a torus: every shape of k nodes at every place, wrap-around included, by sums over windows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from operator import le
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pitools.core.errors import ClusterError
from pitools.topology.choose.problem import Free, require_valid_costs
from pitools.topology.choose.tree_arrays import Floats
from pitools.topology.choose.types import CostWeights, NodeChoice
from pitools.topology.fabric_model import Fabric, Torus
from pitools.topology.ring_cost import ring_hops

Shape = tuple[int, ...]


@dataclass(frozen=True, order=True)
class Box:
    """Where a box begins and how far it reaches along each dimension; the cheaper is less."""

    cost: float
    shape: Shape
    anchor: Shape


def select_box(fabric: Fabric, torus: Torus, free: Free, k: int, *, spares: int, weights: CostWeights) -> NodeChoice:
    """The free box of k + spares nodes with the least surface and the fewest free neighbours cut off, in links.

    Where no box of that many nodes is free, the smallest larger one; what is beyond k is spare. Raises ClusterError.
    """
    is_free, cost = _grid(torus, free)
    total = k + spares
    volume, boxes = _smallest(is_free, cost * weights.node_cost, total)
    if not boxes:
        what = f"{total} nodes asked for, {int(is_free.sum())} free, and no free box holds so many"
        raise ClusterError(what, where="nodes", hint="ask for fewer, or wait for more to be free")
    best = boxes[0]
    cells = _cells(best, is_free.shape)
    active = cells[:k]
    if volume > k:  # of a box within the box, where there is one, else the first on the way through it
        within = np.zeros_like(is_free)
        within[tuple(np.array(cells).T)] = True
        inner = _best_boxes(within, cost * weights.node_cost, k, [])
        active = _cells(inner[0], is_free.shape) if inner else active
    name = dict(zip(np.ndindex(is_free.shape), torus.nodes, strict=True))
    others = [cell for cell in cells if cell not in set(active)]
    nodes = tuple(name[cell] for cell in active)
    extra = weights.node_cost * float(sum(cost[cell] for cell in cells))
    return NodeChoice(
        nodes=nodes,
        spares=tuple(name[cell] for cell in others),
        objective="surface",
        cost=best.cost,
        runner_up_cost=boxes[1].cost if len(boxes) > 1 else None,
        extra_cost=extra,
        free=int(is_free.sum()),
        ring_hops=ring_hops(nodes, fabric),
        shape=best.shape,
        warning=f"no free box has {total} nodes: one of {volume} is taken" if volume > total else "",
    )


def _grid(torus: Torus, free: Free) -> tuple[NDArray[np.bool_], Floats]:
    price = dict(free) if isinstance(free, Mapping) else dict.fromkeys(free, 0.0)
    require_valid_costs(price, np.array(list(price.values()), np.float64))
    cost = np.array([price.get(node, np.inf) for node in torus.nodes]).reshape(torus.dims)
    is_free = np.isfinite(cost)
    return is_free, np.where(is_free, cost, 0.0)


def _smallest(is_free: NDArray[np.bool_], cost: Floats, least: int) -> tuple[int, list[Box]]:
    """The least volume from `least` on of which a box is free, and its boxes, the best two first."""
    none: list[Shape] = []  # of which no box is free, nor of any that holds one
    for volume in range(least, int(is_free.sum()) + 1):
        if boxes := _best_boxes(is_free, cost, volume, none):
            return volume, boxes
    return 0, []


def _best_boxes(is_free: NDArray[np.bool_], cost: Floats, volume: int, none: list[Shape]) -> list[Box]:
    """The best two free boxes of so many nodes, wherever they are; fewer where there are not two.

    none: shapes that are nowhere free: larger ones are not looked for; those found out here join them.
    """
    found: list[Box] = []
    count = is_free.astype(np.int64)
    for shape in _shapes(volume, is_free.shape):
        if any(all(map(le, small, shape)) for small in none):
            continue
        fits = _window(count, shape) == volume
        # A box as long as the torus has no end in that dimension: it begins at 0.
        for axis, (extent, size) in enumerate(zip(shape, is_free.shape, strict=True)):
            if extent == size:
                fits[(slice(None),) * axis + (slice(1, None),)] = False
        if fits.any():
            score = np.where(
                fits, _window(cost, shape) + _cut_links(count, shape) + _surface(shape, is_free.shape), np.inf
            )
            for place in np.argsort(score, axis=None, kind="stable")[:2]:
                anchor = tuple(int(i) for i in np.unravel_index(place, score.shape))
                if fits[anchor]:
                    found.append(Box(float(score[anchor]), shape, anchor))
        else:
            none.append(shape)
    return sorted(found)[:2]


def _shapes(volume: int, dims: Sequence[int]) -> Iterator[Shape]:
    if len(dims) == 1:
        if volume <= dims[0]:
            yield (volume,)
        return
    for first in range(1, min(volume, dims[0]) + 1):
        if volume % first == 0:
            for rest in _shapes(volume // first, dims[1:]):
                yield (first, *rest)


def _window(values: NDArray[Any], shape: Shape) -> NDArray[Any]:
    """The sum over the box of this shape from every place on, past the edges to the other side."""
    for axis, extent in enumerate(shape):
        size = values.shape[axis]
        sums = np.cumsum(np.concatenate([values, values], axis), axis)
        end = np.take(sums, np.arange(extent - 1, extent - 1 + size), axis)
        begin = np.take(sums, np.arange(size) - 1, axis)
        begin[(slice(None),) * axis + (0,)] = 0
        values = end - begin
    return values


def _surface(shape: Shape, dims: Sequence[int]) -> int:
    """Links from the box to the rest: both ends of each dimension that it does not fill."""
    return sum(2 * prod(shape) // extent for extent, size in zip(shape, dims, strict=True) if extent < size)


def _cut_links(count: NDArray[np.int64], shape: Shape) -> NDArray[np.int64]:
    """For every place, the links from the box to free nodes beside it, which it takes from each other."""
    cut = np.zeros_like(count)
    for axis, (extent, size) in enumerate(zip(shape, count.shape, strict=True)):
        if extent < size:
            side = _window(count, (*shape[:axis], 1, *shape[axis + 1 :]))
            cut += np.roll(side, 1, axis) + np.roll(side, -extent, axis)
    return cut


def _cells(box: Box, dims: Sequence[int]) -> list[Shape]:
    """The box's places, each beside the one before: to and fro along the last dimension, then the one above it."""
    return [
        tuple((a + b) % size for a, b, size in zip(box.anchor, place, dims, strict=True)) for place in _snake(box.shape)
    ]


def _snake(shape: Shape) -> Iterator[Shape]:
    if not shape:
        yield ()
        return
    for number, rest in enumerate(_snake(shape[:-1])):
        line = range(shape[-1])
        for last in line if number % 2 == 0 else reversed(line):
            yield (*rest, last)
