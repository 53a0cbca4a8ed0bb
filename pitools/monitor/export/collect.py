"""The cycles of a site's workers: what is queried next, and what follows from the answer.

The worker `slurm` makes one query a cycle, in turn: of jobs (two requests to slurmctld: jobs and partitions), of nodes
(two: nodes and partitions), of Slurm's own metrics where the site has them (two), and of the fabric once an hour (one).
So no cycle makes more than two requests. The worker `runs` reads the folders of runs, and asks slurmdbd for their jobs,
every five minutes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from pitools.core import hostlist
from pitools.core.errors import ClusterError, Unreachable
from pitools.launch.run_lookup import missing_runs_dir, runs_dir
from pitools.monitor.export import jobs, native, nodes, runs, state
from pitools.monitor.export.samples import Samples
from pitools.monitor.export.state import Queried, WorkerState
from pitools.place.clusters.parallel import site_error
from pitools.place.clusters.snapshot import make_transport
from pitools.run import run_folder
from pitools.site.connect import client
from pitools.site.schema import Site
from pitools.slurm import argv, parse_nodes
from pitools.slurm.fields import new_separator
from pitools.slurm.multi_query import run_queries, stdout_or_raise
from pitools.topology.discover import fabric_of_site
from pitools.topology.show.occupancy import leaf_rows

TOPOLOGY_EVERY_S = 3600.0
RUNS_EVERY_S = 290.0  # 5 min, of a cron job that starts each minute
_RETRY_S = 300.0
_CLOCK_SET_S = 60.0  # more than a login takes, between the cluster's clock and ours
SPARE_S = 5.0  # to read and write a state
_CONTROLLER = ("jobs", "nodes", "topology")
_DATE = ["date", "+%s"]
replace = msgspec.structs.replace


class Worker(NamedTuple):
    """A worker of a site. max_age_s: how long an answer is exported. limit_s: for a cycle; None for the site's own."""

    name: str
    max_age_s: float
    limit_s: float | None = None


WORKERS = (Worker("slurm", 300.0), Worker("runs", 900.0, 120.0))


def limit_s(site: Site, worker: Worker) -> float:
    """Return how long a cycle may take until its site counts as hung."""
    return (worker.limit_s or site.connection.timeout_s) + SPARE_S


def run_cycle(site: Site, worker: Worker, before: WorkerState) -> tuple[WorkerState, list[str]]:
    """Make one query, if one is due. Return the new state, and lines: what fails, succeeds again, is left out."""
    if not (name := _next_query(site, worker, before, time.time())):
        return before, []
    after = _query(site, name, before)
    lines = []
    for key, queried in after.queried.items():
        old = before.queried.get(key, Queried())
        if bool(queried.error) != bool(old.error):
            lines.append(f"site {site.name}: {key}: {queried.error or 'succeeds again'}")
        if queried.note and not old.note:
            lines.append(f"site {site.name}: {key}: {queried.note}")
    return after, lines


def _next_query(site: Site, worker: Worker, before: WorkerState, now_s: float) -> str:
    """Return the collector that is due for longest; "" if none is."""
    every_s = {"jobs": 0.0, "nodes": 0.0, "topology": TOPOLOGY_EVERY_S}
    if site.monitor.slurm_metrics_url:
        every_s["native"] = 0.0
    if worker.name == "runs":
        # A folder that was there and is not mounted now is a failure.
        every_s = {"runs": RUNS_EVERY_S} if before.queried or missing_runs_dir(site) is None else {}
    due = {name: _due_s(before.queried.get(name, Queried()), delay_s, now_s) for name, delay_s in every_s.items()}
    name = min(due, key=lambda one: due[one], default="")
    return name if name and due[name] <= now_s else ""


def _due_s(queried: Queried, every_s: float, now_s: float) -> float:
    """Return when a query is due; after a clock was set back at once."""
    began_s = queried.began_s if queried.began_s <= now_s else 0.0
    return began_s + (min(every_s, _RETRY_S) if queried.error else every_s)


def _query(site: Site, name: str, before: WorkerState) -> WorkerState:
    """Return the state after a collector's query: with its gauges and counts, or with its error."""
    began_s, started = time.time(), time.monotonic()
    old = before.queried.get(name, Queried())
    try:
        done, after = _QUERIES[name](site, before)
        queried = replace(done, began_s=began_s, success_s=began_s)
    except Exception as problem:  # noqa: BLE001 - an answer can be malformed in any way
        error = site_error(site.name, problem)
        after, queried = before, Queried(began_s=began_s, success_s=old.success_s, error=str(error))
        if isinstance(error, Unreachable) and name in _CONTROLLER and not old.error:
            # The other values are of the same controller: they must not stay as if it answered. Once: a squeue that
            # takes too long each time is no failure of nodes.
            lost = {key: one for key, one in before.queried.items() if key in _CONTROLLER and key != name}
            failed = {key: replace(one, error=str(error), gauges=()) for key, one in lost.items()}
            after = replace(before, queried={**before.queried, **failed})
    queried = replace(queried, duration_s=time.monotonic() - started)
    after = replace(after, queried={**after.queried, name: queried})
    if old.error and not queried.error and (fabric := after.queried.get("topology", queried)).error:  # Slurm is back
        after = replace(after, queried={**after.queried, "topology": replace(fabric, began_s=0.0)})
    return after


def _query_jobs(site: Site, before: WorkerState) -> tuple[Queried, WorkerState]:
    sep = new_separator()
    transport = make_transport(site, site.connection.timeout_s)
    clock, squeue = run_queries(transport, [_DATE, jobs.squeue_command(sep)])
    now_s = _read_clock(stdout_or_raise(transport, clock))
    rows = jobs.parse_rows(stdout_or_raise(transport, squeue), sep)
    counts = jobs.job_counts(rows, _since_s(before, "jobs", now_s), now_s, site)
    running = tuple(row.raw_id for row in rows if row.state == "RUNNING")
    after = _counted(before, "jobs", now_s, counts)
    tiers = {labels[0] for name, labels in state.totals_of(after) if name == "pit_queue_wait_seconds"}
    gauges = jobs.job_gauges(rows, now_s, site, before.leaves).bounded(tiers)
    return Queried(gauges=gauges.rows()), replace(after, running=running)


def _query_nodes(site: Site, before: WorkerState) -> tuple[Queried, WorkerState]:
    transport = make_transport(site, site.connection.timeout_s)
    clock, scontrol = run_queries(transport, [_DATE, argv.show_nodes()])
    now_s = _read_clock(stdout_or_raise(transport, clock))
    gauges = nodes.node_gauges(parse_nodes.parse_nodes(stdout_or_raise(transport, scontrol)))
    counts = nodes.node_counts(gauges, _since_s(before, "nodes", now_s), now_s)
    return _queried(gauges), _counted(before, "nodes", now_s, counts)


def _query_topology(site: Site, before: WorkerState) -> tuple[Queried, WorkerState]:
    leaves = tuple(hostlist.fold(leaf.nodes) for leaf in leaf_rows(fabric_of_site(site, client(site))))
    return Queried(), replace(before, leaves=leaves or None)


def _query_native(site: Site, before: WorkerState) -> tuple[Queried, WorkerState]:
    rows, helps = native.query_native(site.monitor, site.connection.timeout_s / 2)
    return Queried(gauges=rows, helps=helps), before


def _query_runs(site: Site, before: WorkerState) -> tuple[Queried, WorkerState]:
    if error := missing_runs_dir(site):
        raise error
    slurm = state.read_state(state.state_path(site.name, "slurm"))
    asked = slurm.queried.get("jobs", Queried())
    is_known = not asked.error and time.time() - asked.began_s < WORKERS[0].max_age_s
    gauges, after = runs.query_runs(site, before, frozenset(slurm.running) if is_known else None)
    closed = run_folder.count_closed(runs_dir(site))
    note = f"{closed} folders of runs cannot be read by this account" if closed else ""
    return replace(_queried(gauges), note=note), after


_QUERIES: dict[str, Callable[[Site, WorkerState], tuple[Queried, WorkerState]]] = {
    "jobs": _query_jobs,
    "nodes": _query_nodes,
    "topology": _query_topology,
    "native": _query_native,
    "runs": _query_runs,
}


def _queried(gauges: Samples) -> Queried:
    return Queried(gauges=gauges.bounded().rows())


def _since_s(before: WorkerState, name: str, now_s: float) -> float:
    """Return up to when a collector has counted; 0 if a clock was set since, so that nothing between counts."""
    since_s, own_s = before.clocks.get(name, 0.0), time.time() - before.queried.get(name, Queried()).success_s
    return since_s if abs(now_s - since_s - own_s) <= _CLOCK_SET_S else 0.0


def _counted(before: WorkerState, name: str, now_s: float, counts: Samples) -> WorkerState:
    """Return the state with counts added, and the time up to which its collector has counted."""
    totals = state.totals_of(before)
    totals.merge(counts)
    return replace(before, totals=totals.rows(), clocks={**before.clocks, name: now_s})


def _read_clock(text: str) -> float:
    if not text.strip().isdecimal():
        raise ClusterError(f"not a time: {text[:40]!r} (expected seconds)", where="date", hint="log in: date +%s")
    return float(text)
