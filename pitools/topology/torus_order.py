"""A way through the nodes of a torus on which each is the next one's neighbour."""

from __future__ import annotations

from collections.abc import Collection
from math import prod

from pitools.topology.fabric_model import Torus, torus_coordinates


def torus_order(nodes: Collection[str], torus: Torus) -> list[str]:
    """Those of the nodes that the torus has, in rank order.

    Of a whole box with an even side a closed ring of neighbours; of another box a path, whose ends may be apart. Nodes
    that are no box are taken in the same sweep, with the gaps that there are.
    """
    at = torus_coordinates(torus)
    places = {node: at[node] for node in nodes if node in at}
    if not places:
        return []
    ranges = [
        _positions_from_gap({place[axis] for place in places.values()}, size) for axis, size in enumerate(torus.dims)
    ]
    cells = {tuple(ranges[axis][value] for axis, value in enumerate(place)): node for node, place in places.items()}
    sides = tuple(len(values) for values in ranges)
    even = next((axis for axis, side in enumerate(sides) if side % 2 == 0 and prod(sides) > side), None)
    if even is None or prod(sides) > len(cells):
        return [cells[cell] for cell in sorted(cells, key=lambda cell: _boustrophedon_index(cell, sides))]
    return [cells[cell] for cell in sorted(cells, key=lambda cell: _around(cell, sides, even))]


def _positions_from_gap(values: set[int], size: int) -> dict[int, int]:
    """Coordinate → its place, counted from behind the widest gap: a box may lie over the edge of the grid."""
    held = sorted(values)
    gaps = [(value - held[index - 1]) % size for index, value in enumerate(held)]
    first = gaps.index(max(gaps))
    return {value: place for place, value in enumerate(held[first:] + held[:first])}


def _boustrophedon_index(cell: tuple[int, ...], sides: tuple[int, ...]) -> int:
    """Where a sweep that turns round at the end of each line is at a cell."""
    at = 0
    for value, side in zip(cell, sides, strict=True):
        at = at * side + (side - 1 - value if at % 2 else value)
    return at


def _around(cell: tuple[int, ...], sides: tuple[int, ...], even: int) -> int:
    """Where a closed way is at a cell: to and fro in lines across the even side, and back along their ends."""
    lane = cell[even]
    others = cell[:even] + cell[even + 1 :], sides[:even] + sides[even + 1 :]
    step, length = _boustrophedon_index(*others), prod(others[1])
    if step == 0:
        return length * sides[even] - 1 - lane
    return lane * (length - 1) + (length - 1 - step if lane % 2 else step - 1)
