"""Measure the collectives of this job's nodes at placements: on a node, under a leaf switch, across leaf switches."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Literal, NamedTuple

import msgspec

from pitools.core import hostlist
from pitools.core.record import Record
from pitools.node.bench.run import GroupRun, run_group, without_result
from pitools.perf.collectives.operations import algorithm_bandwidth, bus_factor

WORKER = (sys.executable, "-m", "pitools.perf.collectives.worker")


class Placement(NamedTuple):
    """Nodes to measure. name: node, leaf, leaves; or nodes, where the fabric is unknown. leaves: how many; 0 then."""

    name: str
    nodes: tuple[str, ...]
    leaves: int


class CollectiveResult(Record, frozen=True, kw_only=True, tag="pit.perf-collective/1"):
    """An operation with messages of one size. wall_s: the median repetition, by its slowest rank, and its percentiles.

    algbw, busbw: as nccl-tests define them. wrong: elements that were. of_baseline: busbw by the baseline's median.
    p: how probable a healthy result so low is. low_bytes_per_s: what 1 of 100 healthy is below. A placement without
    results is one record, without an operation.
    """

    operation: str
    placement: str
    n_nodes: int
    ranks: int
    bytes: int = 0
    wall_s: float = 0.0
    wall_p10_s: float = 0.0
    wall_p90_s: float = 0.0
    algbw_bytes_per_s: float | None = None
    busbw_bytes_per_s: float | None = None
    wrong: int = 0
    verdict: Literal["ok", "slow", "wrong", "failed"] = "ok"
    of_baseline: float | None = None
    low_bytes_per_s: float | None = None
    p: float | None = None
    problem: str = ""
    framework: str
    device: str = ""
    software: str = ""
    leaves: int
    nodes: str


def choose_placements(nodes: Sequence[str], leaf_of: Mapping[str, str], ranks_per_node: int) -> list[Placement]:
    """Return the placements that these nodes allow, each a set of nodes of its own.

    leaf_of: the leaf switch, or block, of each node that has one. As many nodes are taken across leaf switches as the
    largest leaf has, so that these two compare; then all nodes.
    """
    by_leaf: dict[str, list[str]] = {}
    for node in nodes:
        by_leaf.setdefault(leaf_of.get(node, ""), []).append(node)
    known = "" not in by_leaf
    largest = max(by_leaf.values(), key=len)
    spread = [node for row in zip_longest(*by_leaf.values()) for node in row if node is not None]
    groups = [nodes[:1]] if ranks_per_node > 1 else []
    groups += [largest, sorted(spread[: max(2, len(largest))], key=nodes.index)] if known else []
    placements: dict[frozenset[str], Placement] = {}
    for group in [*groups, nodes]:
        leaves = len({leaf_of[node] for node in group}) if known else 0
        name = "node" if len(group) == 1 else ("nodes", "leaf", "leaves")[min(leaves, 2)]
        if len(group) * ranks_per_node > 1:
            placements.setdefault(frozenset(group), Placement(name, tuple(group), leaves))
    return list(placements.values())


def run_placement(
    placement: Placement,
    framework: str,
    options: Sequence[str],
    *,
    ranks_per_node: int,
    timeout_s: float,
    worker: Sequence[str] = WORKER,
) -> list[CollectiveResult]:
    """Run a step on the nodes of a placement, and return its results. options: further ones of the worker."""
    argv = [*worker, f"--framework={framework}", f"--timeout={timeout_s:g}", *options]
    run = run_group(placement.nodes, argv, ranks_per_node, timeout_s)
    return to_results(run, placement, framework, ranks_per_node)


def to_results(run: GroupRun, placement: Placement, framework: str, ranks_per_node: int) -> list[CollectiveResult]:
    """Return a result for each operation and size; a single one, failed, if a rank has none."""
    n_ranks = len(placement.nodes) * ranks_per_node
    missing = without_result(run, ranks_per_node)
    empty = CollectiveResult(
        framework=framework,
        operation="",
        placement=placement.name,
        n_nodes=len(placement.nodes),
        leaves=placement.leaves,
        ranks=n_ranks,
        verdict="failed",
        problem=missing,
        device=run.ranks[0].device if run.ranks else "",
        software=run.ranks[0].software if run.ranks else "",
        nodes=hostlist.fold(placement.nodes),
    )
    if missing:
        return [empty]
    suspect = _name_suspect(run)
    results = []
    for sizes in zip(*(rank.sizes for rank in run.ranks), strict=True):
        walls_s = sorted(map(max, zip(*(size.walls_s for size in sizes), strict=True)))
        wall_s, n_bytes, operation = statistics.median(walls_s), sizes[0].bytes, sizes[0].operation
        algbw = algorithm_bandwidth(n_bytes, wall_s)
        wrong = sum(size.wrong for size in sizes)
        results.append(
            msgspec.structs.replace(
                empty,
                operation=operation,
                bytes=n_bytes,
                wall_s=wall_s,
                wall_p10_s=walls_s[len(walls_s) // 10],
                wall_p90_s=walls_s[-1 - len(walls_s) // 10],
                algbw_bytes_per_s=algbw,
                busbw_bytes_per_s=algbw * bus_factor(operation, n_ranks),
                wrong=wrong,
                verdict="wrong" if wrong else "ok",
                problem=f"{wrong} wrong elements{suspect}" if wrong else "",
            )
        )
    return results


def _name_suspect(run: GroupRun) -> str:
    """Return the one rank that sent or received all wrong data; "" if there is none, as after reductions alone."""
    received = [(rank.rank, size) for rank in run.ranks for size in rank.sizes if size.wrong]
    transfers = [{rank, source} for rank, size in received for source in size.wrong_sources]
    common = set.intersection(*transfers) if transfers else {rank for rank, _ in received}
    if len(common) != 1:
        return ""
    (suspect,) = common
    return f", all from or at rank {suspect} on {next(rank.node for rank in run.ranks if rank.rank == suspect)}"
