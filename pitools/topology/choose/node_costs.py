"""Nodes and what each costs, from lines of text."""

from __future__ import annotations

import msgspec

from pitools.core import hostlist
from pitools.core.errors import DataError, PitError
from pitools.core.record import decode_json


class _Line(msgspec.Struct):
    node: str
    cost: float = 0.0


def read_costs(text: str, where: str) -> dict[str, float]:
    """Node → cost. A line is a host list and a cost (0 without one), or a record with `node` and, perhaps, `cost`.

    What is said of a node in several lines adds up. Raises DataError naming the line.
    """
    found: dict[str, float] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.partition("#")[0].strip()
        if not line:
            continue
        try:
            names, cost = _record(line) if line.startswith("{") else _words(line)
        except (ValueError, msgspec.MsgspecError, PitError) as error:
            hint = 'a line is `n[01-04] 2.5`, or {"node": "n01", "cost": 2.5}'
            raise DataError(f"{line[:80]!r} is no cost of a node", where=f"{where}:{number}", hint=hint) from error
        for name in names:
            found[name] = found.get(name, 0.0) + cost
    return found


def _record(line: str) -> tuple[list[str], float]:
    said = decode_json(line, _Line)
    return [said.node], said.cost


def _words(line: str) -> tuple[list[str], float]:
    words = line.replace("\t", " ").split()
    cost = 0.0
    if len(words) > 1:
        try:
            cost = float(words[-1])
        except ValueError:  # several lists, no cost
            return hostlist.expand(",".join(words)), 0.0
        words.pop()
    return hostlist.expand(",".join(words)), cost
