"""The collector of nodes: one `scontrol show node`, and why GPUs are out of use."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from pitools.monitor.export.metrics import OTHER
from pitools.monitor.export.samples import Samples
from pitools.node.control.incidents import incident_of_reason
from pitools.slurm.records import Node
from pitools.topology.show.occupancy import state_of

_POWERING_DOWN = frozenset({"power_down", "powering_down"})
MAX_GAP_S = 900.0
"""If no exporter looked for longer, nothing of the time between counts as drained: nobody knows."""


def node_gauges(nodes: Iterable[Node]) -> Samples:
    """Return the gauges of nodes and GPUs. GPUs of a node whose allocated GPUs are unknown are left out."""
    gauges = Samples()
    for node in nodes:
        if node.state == "future":
            continue
        state = state_of(_without_power_saving(node))
        gauges.add("pit_nodes", 1, state)
        allocated = node.gpus_allocated
        free = max(0, node.gpus - (allocated or 0))
        free_state = state if state in ("drained", "down") else "idle"
        gpus = (("allocated", allocated), (free_state, free)) if node.gpus and allocated is not None else ()
        for gpu_state, count in gpus:
            gauges.add("pit_gpus", count, gpu_state)
        for partition in node.partitions:
            gauges.add("pit_partition_nodes", 1, partition, state)
            for gpu_state, count in gpus:
                gauges.add("pit_partition_gpus", count, partition, gpu_state)
        if gpus and free_state != "idle":
            gauges.add("pit_drained_gpus", free, drain_cause(node, state))
    return gauges


def _without_power_saving(node: Node) -> Node:
    """Return the node as one that is powered down already: Slurm starts it for a job."""
    if _POWERING_DOWN.isdisjoint(node.flags):
        return node
    flags = ("powered_down" if flag in _POWERING_DOWN else flag for flag in node.flags)
    return msgspec.structs.replace(node, flags=tuple(flags))


def drain_cause(node: Node, state: str) -> str:
    """Return why a node is out of use: the check of `pit node drain`, maintenance, reboot, down, or other."""
    if check := incident_of_reason(node.reason)[1]:
        return check
    if "maintenance" in node.flags:
        return "maintenance"
    if {"reboot_issued", "reboot_requested"} & set(node.flags):
        return "reboot"
    return "down" if state == "down" and "drain" not in node.flags else OTHER


def node_counts(gauges: Samples, since_s: float, now_s: float) -> Samples:
    """Return the increments of counters since the query before: drained GPUs over the time between.

    since_s: 0 if there was none. Both are the cluster's times.
    """
    counts = Samples()
    for cause in ("maintenance", "reboot", "down", OTHER):
        counts.touch("pit_drained_gpu_seconds_total", cause)
    gap_s = now_s - since_s
    for (name, labels), values in gauges.items():
        if name == "pit_drained_gpus" and 0 < gap_s <= MAX_GAP_S:
            counts.add("pit_drained_gpu_seconds_total", values[0] * gap_s, *labels)
    return counts
