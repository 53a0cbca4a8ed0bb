"""What runs now, as records: one per daemon, one per cluster's nodes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from devcluster_parts import root
from devcluster_parts.daemons import Daemon, daemons
from devcluster_parts.errors import ClusterProblem
from devcluster_parts.layout import Layout
from devcluster_parts.nodes import states

Row = dict[str, str | int]
COLUMNS = ("name", "kind", "cluster", "state", "pid", "port", "nodes", "log")


def status(where: Path, *, timeout_s: float) -> list[Row]:
    """Return a row per daemon that should run; [] before `up`. Raises ClusterProblem for a root without the marker."""
    settings = root.read_settings(where) if root.is_ours(where) else None
    if settings is None:
        return []
    layout = Layout(root=where, settings=settings)
    return [_row(layout, daemon, timeout_s) for daemon in daemons(layout)]


def _row(layout: Layout, daemon: Daemon, timeout_s: float) -> Row:
    who = daemon.identity()
    return {
        "schema": "pit.devcluster/1",
        "name": daemon.name,
        "kind": daemon.kind,
        "cluster": daemon.cluster,
        "state": "up" if who else "down",
        "pid": who.pid if who else 0,
        "port": daemon.port,
        "nodes": _nodes(layout, daemon, timeout_s) if who and daemon.kind == "slurmctld" else "",
        "log": str(daemon.log),
    }


def _nodes(layout: Layout, daemon: Daemon, timeout_s: float) -> str:
    cluster = next(cluster for cluster in layout.clusters if cluster.name == daemon.cluster)
    try:
        return " ".join(f"{count} {state}" for state, count in states(cluster, root=layout.root, limit_s=timeout_s))
    except ClusterProblem:
        return "no answer"


def as_table(rows: Iterable[Row]) -> str:
    """The rows in aligned columns."""
    cells = [[str(row[column]) for column in COLUMNS] for row in rows]
    widths = [max(len(line[i]) for line in [list(COLUMNS), *cells]) for i in range(len(COLUMNS))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in [COLUMNS, *cells]
    ]
    return "\n".join(line.rstrip() for line in lines)


def as_jsonl(rows: Iterable[Row]) -> str:
    """The rows as JSON Lines."""
    return "\n".join(json.dumps(row) for row in rows)
