"""Costs of nodes: read from text, and those of nodes to avoid."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from pitools.core import hostlist
from pitools.core.errors import ClusterError, DataError, PitError
from pitools.core.record import decode_json
from pitools.topology.choose.problem import FreeInput
from pitools.topology.choose.types import NodeChoice

_LAST_CHOICE = 1000.0


class _Line(msgspec.Struct):
    node: str
    cost: float = 0.0


def read_costs(text: str, where: str) -> dict[str, float]:
    """Return node → cost, summed over lines.

    text: lines of a host list and an optional cost, or records with `node` and an optional `cost`; the default is 0.
    Raises DataError with the line number.
    """
    costs: dict[str, float] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.partition("#")[0].strip()
        if not line:
            continue
        try:
            names, cost = _parse_record(line) if line.startswith("{") else _parse_columns(line)
        except (ValueError, msgspec.MsgspecError, PitError) as error:
            hint = 'a line is `n[01-04] 2.5`, or {"node": "n01", "cost": 2.5}'
            raise DataError(f"{line[:80]!r} is not a node cost", where=f"{where}:{number}", hint=hint) from error
        for name in names:
            costs[name] = costs.get(name, 0.0) + cost
    return costs


def _parse_record(line: str) -> tuple[list[str], float]:
    record = decode_json(line, _Line)
    return [record.node], record.cost


def _parse_columns(line: str) -> tuple[list[str], float]:
    columns = line.replace("\t", " ").split()
    cost = 0.0
    if len(columns) > 1:
        try:
            cost = float(columns[-1])
        except ValueError:  # host lists without a cost
            return hostlist.expand(",".join(columns)), 0.0
        columns.pop()
    return hostlist.expand(",".join(columns)), cost


def avoid_nodes(
    free: FreeInput, avoid: Mapping[str, float], select: Callable[[FreeInput], NodeChoice]
) -> tuple[NodeChoice, FreeInput]:
    """Return the choice that `select` makes, and the costs of free nodes that it was made with.

    avoid: added costs. Nodes for which that is infinite are left out; where the others do not suffice, they cost
    _LAST_CHOICE. Raises ClusterError for too few nodes.
    """
    if avoid.keys().isdisjoint(free):
        return select(free), free
    before = free if isinstance(free, Mapping) else dict.fromkeys(free, 0.0)
    costs = {node: cost + avoid.get(node, 0.0) for node, cost in before.items()}
    try:
        return select(costs), costs
    except ClusterError:
        costs = {node: cost + min(_LAST_CHOICE, avoid.get(node, 0.0)) for node, cost in before.items()}
        return select(costs), costs
