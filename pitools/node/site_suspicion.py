"""The suspicion of a site's nodes: read for a choice of nodes, and added to by a run's recovery."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import TypeVar

from pitools.core import timestamps, units
from pitools.core.daemon_pool import DaemonPool
from pitools.node import spool as spool_folder
from pitools.node.bench.history import read_past
from pitools.node.blames import NodeBlame, read_blames, write_blames
from pitools.node.check.config import CONFIG_PATH, NodeConfig, load_config
from pitools.node.control.incidents import read_incidents
from pitools.node.suspicion import DAY_S, Suspicion, suspicions
from pitools.node.types import age_s
from pitools.run.attempt_records import Cause
from pitools.site.schema import Site

COST_OF_SCORE = 10.0
"""Added node cost of a weak suspicion, for each point of its score; a strong one leaves the node out if it can."""

_TIMEOUT_S = 5.0

T = TypeVar("T")


def read_suspicions(config: NodeConfig, nodes: Collection[str] | None = None) -> dict[str, Suspicion]:
    """Return the suspected nodes of a cluster. nodes: those that exist; None for those that ever reported.

    Raises PitError, also for a spool that others than this user and root could have written.
    """
    folder, now = Path(config.spool), timestamps.now_rfc3339()
    known = spool_folder.reported_nodes(folder) if nodes is None else set(nodes)
    reports, _ = spool_folder.read_reports(folder, known)
    max_age_s = units.parse_duration(config.control.max_report_age)
    fresh = {node: one for node, one in reports.items() if age_s(one.checked_at, now) <= max_age_s}
    journal = read_incidents(folder / "control" / "journal.jsonl")
    incidents = [one for one in journal.incidents.values() if one.node in known]
    bench = read_past(folder, known.intersection(_benched_nodes(folder)))
    return suspicions(now, fresh, incidents, bench, read_blames(folder, known))


def _benched_nodes(spool: Path) -> list[str]:
    """Return the nodes with results of the last day."""
    with contextlib.suppress(OSError), os.scandir(spool / "bench") as entries:
        return [Path(one.name).stem for one in entries if one.stat().st_mtime > time.time() - DAY_S]
    return []


def suspicions_of_site(site: Site, nodes: Collection[str] | None = None) -> dict[str, Suspicion]:
    """Return the suspected nodes of a site; {} without a spool, or with one that cannot be read, which is printed.

    nodes: as in `read_suspicions`.
    """
    problem = "no suspicion of nodes is known"
    return _with_config(site, lambda config: read_suspicions(config, nodes), problem) or {}


def costs_at_site(site: Site, nodes: Collection[str]) -> dict[str, float]:
    """Return the cost to add to each suspected node in a choice of these; infinity for a strong suspicion."""
    suspected = suspicions_of_site(site, nodes)
    return {node: math.inf if one.is_strong else COST_OF_SCORE * one.score for node, one in suspected.items()}


def report_cause(site: Site, nodes: Iterable[str], cause: Cause, run: str) -> None:
    """Record in the site's spool, if it has one, that a run blames these nodes. Never raises, never takes long."""
    rule = (cause.evidence[0].rule if cause.evidence else "") or cause.state
    now = timestamps.now_rfc3339()
    blames = [
        NodeBlame(node=node, kind=cause.kind, confidence=cause.confidence, run=run, at=now, rule=rule) for node in nodes
    ]
    if blames:
        _with_config(site, lambda config: write_blames(Path(config.spool), blames), "other users' runs are not warned")


def _config_of_site(site: Site) -> NodeConfig | None:
    """Return the site's file of checks; None if it has none with a spool here."""
    path = Path(site.node.config) if site.node.config else CONFIG_PATH
    if site.scheduler != "slurm" or not (site.node.config or (site.connection.kind == "local" and path.exists())):
        return None
    config = load_config(path)
    return config if config.spool else None


def _with_config(site: Site, function: Callable[[NodeConfig], T], problem: str) -> T | None:
    """Return the function's value for the site's file of checks; None without one, after an error, or after _TIMEOUT_S.

    The file system may hang, and a run must not.
    """

    def call() -> T | None:
        config = _config_of_site(site)
        return function(config) if config else None

    try:
        return DaemonPool(1, "suspicion").submit(call).result(timeout=_TIMEOUT_S)
    except Exception as error:  # noqa: BLE001  # a run does without
        print(f"pit: {problem}: {str(error) or f'no answer within {_TIMEOUT_S:g} s'}", file=sys.stderr)
        return None
