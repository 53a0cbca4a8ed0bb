"""Read a CSV of hosts and the switches above them: `host,core,pod,leaf`, with any number of levels."""

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
    """Return the tree of a table. Its first line names the columns, one of them `host` or `node`.

    Levels run from the root down, or from the leaf up if only that gives each switch one parent. Names that several
    switches share, such as S1 of every pod, are joined with those above: G6/P10/S1.
    Raises ConfigError or DataError with the line number.
    """
    (_, header), *rows = numbered_rows(text, where) or [(0, [])]
    lower_header = [cell.lower() for cell in header]
    column = next((lower_header.index(name) for name in HOST_COLUMNS if name in lower_header), None)
    if column is None or len(header) < 2:
        hint = "begin with a line such as host,core,pod,leaf"
        raise ConfigError("no column of hosts, or no column of switches", where=where, hint=hint)
    if len(header) > 1 + _MAX_LEVELS:
        problem = f"{len(header) - 1} levels of switches (at most {_MAX_LEVELS})"
        raise ConfigError(problem, where=where, hint="host,core,pod,leaf")
    hosts, levels = [], []
    for number, row in rows:
        origin = f"{where}:{number}"
        if len(row) != len(header):
            raise ConfigError(f"{len(row)} cells (expected {len(header)})", where=origin)
        if invalid := next((cell for cell in row if not NAME_PATTERN.fullmatch(cell)), None):
            raise ConfigError(f"{invalid[:80]!r} is not a valid name of a switch or node", where=origin)
        if "" in row:
            raise ConfigError(f"column {header[row.index('')][:80]!r} is empty", where=origin)
        hosts.append(row[column])
        levels.append(tuple(row[:column] + row[column + 1 :]))
    nodes_by_path: dict[tuple[str, ...], list[str]] = {}
    origins: dict[str, str] = {}
    for (number, _), host, path in zip(rows, hosts, _unique_paths(_root_first_paths(levels)), strict=True):
        nodes_by_path.setdefault(path, []).append(host)
        origins[path[-1]] = f"{where}:{number}"
    return tree_fabric((Leaf(path=path, nodes=tuple(nodes)) for path, nodes in nodes_by_path.items()), origins=origins)


def numbered_rows(text: str, where: str) -> list[tuple[int, list[str]]]:
    """Return (last line number, cells) of each row except comments.

    The delimiter is the most frequent one of the first line: `,`, `;` or tab. Raises ConfigError for invalid CSV.
    """
    first_line = next((line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")), "")
    rows = csv.reader(io.StringIO(text, newline=""), delimiter=max(",;\t", key=first_line.count), strict=True)
    try:
        numbered = [(rows.line_num, [cell.strip() for cell in row]) for row in rows]
    except csv.Error as error:
        raise ConfigError(str(error), where=f"{where}:{rows.line_num}", hint="close every quote") from error
    return [(number, row) for number, row in numbered if any(row) and not row[0].startswith("#")]


def _root_first_paths(levels: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return the paths from the root down: reversed if each switch determines the next column, but not vice versa."""
    pairs = [(set(zip(a, b, strict=True)), set(a), set(b)) for a, b in pairwise(zip(*levels, strict=True))]
    is_upwards = all(len(both) == len(left) for both, left, _ in pairs)
    is_downwards = all(len(both) == len(right) for both, _, right in pairs)
    return [path[::-1] for path in levels] if is_upwards and not is_downwards else list(levels)


def _unique_paths(paths: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return the paths with unique switch names: a level with repeated names is named by whole paths."""
    used_names: set[str] = set()
    separators: list[str] = []  # separator of the joined names of each level; "" for unjoined names
    for depth in range(len(paths[0]) if paths else 0):
        branches = {path[: depth + 1] for path in paths}
        separator, names = "", {branch[-1] for branch in branches}
        while len(names) < len(branches) or not used_names.isdisjoint(names):
            separator += "/"  # more than one only where the names contain slashes
            names = {separator.join(branch) for branch in branches}
        separators.append(separator)
        used_names |= names
    return [
        tuple(mark.join(path[: depth + 1]) if mark else path[depth] for depth, mark in enumerate(separators))
        for path in paths
    ]
