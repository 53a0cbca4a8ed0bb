"""A CSV of hosts and the switches above them: `host,core,pod,leaf`, any number of levels."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from itertools import pairwise

from pitools.core.errors import ConfigError
from pitools.topology.fabric_model import Fabric, Leaf, tree_fabric
from pitools.topology.formats.conf import NAME_PATTERN

HOST_COLUMNS = ("host", "node", "hostname", "nodename", "host_name", "node_name", "name")

_MAX_LEVELS = 64  # of switches


def read_table(text: str, where: str) -> Fabric:
    """The tree of a table whose first line names its columns, one of them `host` or `node`.

    Levels run from the root down, or up where the names themselves show that. Names that stand for several switches,
    such as S1 of every pod, are joined with those above: G6/P10/S1. Raises ConfigError or DataError naming the line.
    """
    (_, header), *rows = numbered_rows(text, where) or [(0, [])]
    heads = [cell.lower() for cell in header]
    column = next((heads.index(name) for name in HOST_COLUMNS if name in heads), None)
    if column is None or len(header) < 2:
        hint = "begin with a line such as host,core,pod,leaf"
        raise ConfigError("no column of hosts with columns of switches", where=where, hint=hint)
    if len(header) > 1 + _MAX_LEVELS:
        raise ConfigError(f"{len(header)} columns are no levels of switches", where=where, hint="host,core,pod,leaf")
    hosts, levels = [], []
    for number, row in rows:
        at = f"{where}:{number}"
        if len(row) != len(header):
            raise ConfigError(f"{len(row)} cells instead of {len(header)}", where=at)
        if bad := next((cell for cell in row if not NAME_PATTERN.fullmatch(cell)), None):
            raise ConfigError(f"{bad[:80]!r} is no name of a switch or node", where=at)
        if "" in row:
            raise ConfigError(f"column {header[row.index('')][:80]!r} is empty", where=at)
        hosts.append(row[column])
        levels.append(tuple(row[:column] + row[column + 1 :]))
    held: dict[tuple[str, ...], list[str]] = {}
    places: dict[str, str] = {}
    for (number, _), host, path in zip(rows, hosts, _unique(_root_first(levels)), strict=True):
        held.setdefault(path, []).append(host)
        places[path[-1]] = f"{where}:{number}"
    return tree_fabric((Leaf(path=path, nodes=tuple(nodes)) for path, nodes in held.items()), origins=places)


def numbered_rows(text: str, where: str) -> list[tuple[int, list[str]]]:
    """(line it ends in, cells) of each row that is no comment; divided by what the first has most of: `,`, `;` or tab.

    Raises ConfigError for a quote that is not closed, and for a cell that no table has.
    """
    first = next((line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")), "")
    rows = csv.reader(io.StringIO(text, newline=""), delimiter=max(",;\t", key=first.count), strict=True)
    try:
        found = [(rows.line_num, [cell.strip() for cell in row]) for row in rows]
    except csv.Error as error:
        raise ConfigError(str(error), where=f"{where}:{rows.line_num}", hint="is a quote open?") from error
    return [(number, row) for number, row in found if any(row) and not row[0].startswith("#")]


def _root_first(levels: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Turned over where each switch tells the next column's, but not the other way round."""
    pairs = [(set(zip(a, b, strict=True)), set(a), set(b)) for a, b in pairwise(zip(*levels, strict=True))]
    is_upwards = all(len(both) == len(left) for both, left, _ in pairs)
    is_downwards = all(len(both) == len(right) for both, _, right in pairs)
    return [path[::-1] for path in levels] if is_upwards and not is_downwards else list(levels)


def _unique(raw: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The same paths with a name for each switch: a level one of whose names repeats is named by whole paths."""
    taken: set[str] = set()
    marks: list[str] = []  # what joins the names of a level; "" where they stand alone
    for depth in range(len(raw[0]) if raw else 0):
        branches = {path[: depth + 1] for path in raw}
        mark, found = "", {branch[-1] for branch in branches}
        while len(found) < len(branches) or not taken.isdisjoint(found):
            mark += "/"  # several only where names have slashes themselves
            found = {mark.join(branch) for branch in branches}
        marks.append(mark)
        taken |= found
    return [
        tuple(mark.join(path[: depth + 1]) if mark else path[depth] for depth, mark in enumerate(marks)) for path in raw
    ]
