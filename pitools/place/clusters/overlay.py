"""Update a cached snapshot with the current states of our own jobs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from msgspec.structs import replace

from pitools.core import hostlist
from pitools.launch.tickets.ticket_state import TicketState
from pitools.place.clusters.snapshot import Snapshot
from pitools.slurm.fields import parse_gpus
from pitools.slurm.records import Node, SlurmJob
from pitools.slurm.states import is_final


def overlay_own_jobs(snapshot: Snapshot, tickets: Mapping[str, TicketState]) -> Snapshot:
    """Return the snapshot with the current jobs of `tickets` (by name), and with its nodes' states updated to match."""
    current = {ticket.job.raw_id: ticket.job for ticket in tickets.values() if ticket.job}
    other_jobs = [job for job in snapshot.jobs if job.raw_id not in current]
    stale_jobs = [job for job in snapshot.jobs if job.raw_id in current]
    own_jobs = [job for job in current.values() if not is_final(job.state)]
    change = _gpus_by_node(own_jobs)
    change.subtract(_gpus_by_node(stale_jobs))
    busy = _gpus_by_node(other_jobs) + _gpus_by_node(own_jobs)
    nodes = tuple(_update_node(node, change[node.node], busy[node.node]) for node in snapshot.nodes)
    return replace(snapshot, jobs=(*other_jobs, *own_jobs), nodes=nodes)


def _gpus_by_node(jobs: list[SlurmJob]) -> Counter[str]:
    """Return the GPUs of each node that running jobs hold; a job without GPUs counts as 1."""
    gpus: Counter[str] = Counter()
    for job in jobs:
        if job.state != "PENDING" and job.node_list:
            _, node_gpus = parse_gpus(job.gres)
            for name in hostlist.expand(job.node_list):
                gpus[name] += node_gpus or 1
    return gpus


def _update_node(node: Node, change: int, busy: int) -> Node:
    if not change or node.state not in ("idle", "mixed", "allocated"):
        return node
    state = "idle" if not busy else "mixed" if node.state == "idle" else node.state
    if change < 0 and busy and node.state == "allocated":
        state = "mixed"
    allocated = node.gpus_allocated
    if allocated is not None:
        allocated = min(node.gpus, max(0, allocated + change))
    return replace(node, state=state, gpus_allocated=allocated)
