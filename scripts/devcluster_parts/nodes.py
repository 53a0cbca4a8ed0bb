"""What a cluster's controller says of its nodes."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from devcluster_parts.errors import ClusterProblem
from devcluster_parts.layout import Cluster
from devcluster_parts.tools import run


def states(cluster: Cluster, *, root: Path, limit_s: float) -> list[tuple[str, int]]:
    """Return state → number of nodes, as sinfo writes states (`idle`, `down*`). Raises ClusterProblem."""
    argv = ["sinfo", "-h", "-p", "train", "-o", "%T|%D"]
    answer = run(argv, root=root, limit_s=limit_s, SLURM_CONF=str(cluster.conf)).out
    pairs = [line.strip().split("|") for line in answer.splitlines() if line.strip()]
    return [(state, int(count)) for state, count in pairs]


def nodes_not_ready(cluster: Cluster, new: Collection[str], *, root: Path, limit_s: float) -> str:
    """Return what is still awaited before the cluster can be used, as text; "" for nothing.

    `new` names the nodes whose slurmd was just started: those must come back even from `down`. Another node that is
    drained or down was made so by someone, and stays so.
    """
    try:
        if not cluster.nodes:  # the cloud cluster's controller answers for nodes that have no slurmd
            return "" if states(cluster, root=root, limit_s=limit_s) else f"{cluster.name} has no nodes"
        argv = ["sinfo", "-h", "-N", "-p", "train", "-o", "%N|%T"]
        answer = run(argv, root=root, limit_s=limit_s, SLURM_CONF=str(cluster.conf)).out
    except ClusterProblem as problem:
        return str(problem)
    pairs = [line.strip().split("|") for line in answer.splitlines() if line.strip()]
    waiting = [f"{node} is {state}" for node, state in pairs if _awaited(state, is_new=node in new)]
    if len(pairs) != len(cluster.nodes):
        waiting.append(f"{cluster.name} has {len(pairs)} of {len(cluster.nodes)} nodes")
    return ", ".join(waiting)


def _awaited(state: str, *, is_new: bool) -> bool:
    return state.endswith("*") or state.startswith("unk") or (is_new and state.startswith("down"))
