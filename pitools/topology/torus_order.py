"""Order the nodes of a torus so that consecutive nodes are neighbours."""

from __future__ import annotations

from collections.abc import Collection
from math import prod

from pitools.topology.fabric_model import Torus, torus_coordinates


def torus_order(nodes: Collection[str], torus: Torus) -> list[str]:
    """Return the nodes that are in the torus, in rank order.

    A full box with an even side gives a closed ring of neighbours; any other full box gives a path, whose ends may be
    apart. Nodes that do not fill their box are ordered by the same sweep, with gaps.
    """
    coordinates = torus_coordinates(torus)
    places = {node: coordinates[node] for node in nodes if node in coordinates}
    if not places:
        return []
    ranges = [
        _positions_from_gap({place[axis] for place in places.values()}, size) for axis, size in enumerate(torus.dims)
    ]
    cells = {tuple(ranges[axis][value] for axis, value in enumerate(place)): node for node, place in places.items()}
    sides = tuple(len(values) for values in ranges)
    even_axis = next((axis for axis, side in enumerate(sides) if side % 2 == 0 and prod(sides) > side), None)
    if even_axis is None or prod(sides) > len(cells):
        return [cells[cell] for cell in sorted(cells, key=lambda cell: _boustrophedon_index(cell, sides))]
    return [cells[cell] for cell in sorted(cells, key=lambda cell: _ring_index(cell, sides, even_axis))]


def _positions_from_gap(values: set[int], size: int) -> dict[int, int]:
    """Return coordinate → position, counted from the end of the widest gap, as a box may wrap around the edge."""
    ordered = sorted(values)
    gaps = [(value - ordered[index - 1]) % size for index, value in enumerate(ordered)]
    first = gaps.index(max(gaps))
    return {value: place for place, value in enumerate(ordered[first:] + ordered[:first])}


def _boustrophedon_index(cell: tuple[int, ...], sides: tuple[int, ...]) -> int:
    """Return a cell's index in a sweep that reverses at the end of each line."""
    index = 0
    for value, side in zip(cell, sides, strict=True):
        index = index * side + (side - 1 - value if index % 2 else value)
    return index


def _ring_index(cell: tuple[int, ...], sides: tuple[int, ...], even_axis: int) -> int:
    """Return a cell's index in a closed ring: back and forth across the even side, then back along the line ends."""
    lane = cell[even_axis]
    cross_section = cell[:even_axis] + cell[even_axis + 1 :], sides[:even_axis] + sides[even_axis + 1 :]
    step, length = _boustrophedon_index(*cross_section), prod(cross_section[1])
    if step == 0:
        return length * sides[even_axis] - 1 - lane
    return lane * (length - 1) + (length - 1 - step if lane % 2 else step - 1)
