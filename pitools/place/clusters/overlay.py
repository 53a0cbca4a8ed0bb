"""A snapshot of a moment ago with our own jobs as they are now: others may be late in it, we must not be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from msgspec.structs import replace

from pitools.core import hostlist
from pitools.launch.tickets.ticket_state import TicketState
from pitools.place.clusters.snapshot import Snapshot
from pitools.slurm.fields import parse_gpus
from pitools.slurm.records import Node, SlurmJob
from pitools.slurm.states import is_finished


def overlay_own_jobs(snapshot: Snapshot, tickets: Mapping[str, TicketState]) -> Snapshot:
    """The snapshot with the jobs of `tickets` (by name) in their present states, and the nodes accordingly."""
    now = {one.job.raw_id: one.job for one in tickets.values() if one.job}
    others = [job for job in snapshot.jobs if job.raw_id not in now]
    before = [job for job in snapshot.jobs if job.raw_id in now]
    ours = [job for job in now.values() if not is_finished(job.state)]
    change = _gpus_by_node(ours)
    change.subtract(_gpus_by_node(before))
    busy = _gpus_by_node(others) + _gpus_by_node(ours)
    nodes = tuple(_node(node, change[node.node], busy[node.node]) for node in snapshot.nodes)
    return replace(snapshot, jobs=(*others, *ours), nodes=nodes)


def _gpus_by_node(jobs: list[SlurmJob]) -> Counter[str]:
    """GPUs, or 1 where it has none, that running jobs hold of each node."""
    held: Counter[str] = Counter()
    for job in jobs:
        if job.state != "PENDING" and job.node_list:
            _, each = parse_gpus(job.gres)
            for name in hostlist.expand(job.node_list):
                held[name] += each or 1
    return held


def _node(node: Node, change: int, busy: int) -> Node:
    if not change or node.state not in ("idle", "mixed", "allocated"):
        return node
    state = "idle" if not busy else "mixed" if node.state == "idle" else node.state
    if change < 0 and busy and node.state == "allocated":
        state = "mixed"
    allocated = node.gpus_allocated
    if allocated is not None:
        allocated = min(node.gpus, max(0, allocated + change))
    return replace(node, state=state, gpus_allocated=allocated)
