"""Test the nodes of this job in groups, by a step of Slurm for each group, and judge the groups.

A group fails by the correctness gate (wrong elements, a rank that died or hung), or if its bandwidth is far below that
of the other groups of as many nodes in this run.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from pitools.core import hostlist, subprocesses, timestamps
from pitools.core.daemon_pool import DaemonPool
from pitools.core.errors import ClusterError, Unreachable
from pitools.core.record import decode_json
from pitools.node.bench import single
from pitools.node.bench.bisect import Bisection, Group
from pitools.node.bench.compare import BenchResult, Verdict, is_low
from pitools.node.bench.worker import RankResult, bus_bandwidth
from pitools.slurm import job_step
from pitools.slurm.job_step import NO_VARIABLES, failure_reason, srun_argv

WORKER = (sys.executable, "-m", "pitools.node.bench.worker")
SINGLE = (sys.executable, "-m", "pitools.node.bench.single")
ALL_REDUCE = "all_reduce_bytes_per_s"
_MAX_STEPS = 64  # at a time: each has an srun and a connection to slurmctld
GROUP_FLOOR = 0.3
"""Share below the median: pairs of one leaf switch and of two differ by less."""

_MIN_GROUPS = 2
_SEVERITY: tuple[Verdict, ...] = ("ok", "undecided", "slow", "failed", "wrong")


class GroupTest(NamedTuple):
    """A test of a group. nodes: a host list. bytes_per_s: bus bandwidth of the largest size; None without a result."""

    nodes: str
    n_nodes: int
    verdict: Verdict
    bytes_per_s: float | None = None
    problem: str = ""


class GroupRun(NamedTuple):
    """What the ranks of a group printed, and how its step failed; "" if it did not. is_started: a rank listened."""

    group: Group
    ranks: tuple[RankResult, ...]
    problem: str
    is_started: bool = True


class GroupTester:
    """Tests rounds of groups of this job's nodes; its `test_round` is what `find_bad` of bisect.py wants.

    worker: the program of a rank. floor: the share of the median by which a slow group is below it, at least. report:
    gets a text before each round, and one for each of its tests. tests: all of them. devices: by node.
    """

    def __init__(
        self,
        *,
        timeout_s: float,
        worker: Sequence[str] = WORKER,
        ranks_per_node: int = 1,
        floor: float = GROUP_FLOOR,
        report: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._timeout_s, self._ranks_per_node = timeout_s, ranks_per_node
        self._worker = [*worker, f"--timeout={timeout_s:g}"]
        self._floor, self._report = floor, report
        self.tests: list[GroupTest] = []
        self.devices: dict[str, str] = {}
        self._rounds = 0
        # Of daemon threads: an interrupt does not wait for the steps, which end by their own time-outs.
        self._pool = DaemonPool(_MAX_STEPS, "pit-bench")

    def test_round(self, groups: Sequence[Group]) -> list[bool]:
        """Return whether each group passed. Raises ClusterError if the ranks run nowhere: that is no fault of nodes."""
        self._rounds += 1
        sizes = ", ".join(f"{count} of {size} nodes" for size, count in Counter(map(len, groups)).items())
        self._report(f"round {self._rounds}: groups: {sizes}, each within {limit_s(self._timeout_s):g} s")
        runs = [future.result() for future in [self._pool.submit(self._run_group, group) for group in groups]]
        # One group may be of a node whose ranks die, but not before any of them has begun.
        is_one = len(runs) == 1 and runs[0].is_started
        if not self.tests and not is_one and not any(run.ranks for run in runs):
            hint = "check on a node that this Python has pitools and numpy there"
            raise ClusterError(f"no rank has a result: {runs[0].problem}", where=" ".join(self._worker[:3]), hint=hint)
        judged = judge(runs, self.tests, self._ranks_per_node, self._floor)
        self.devices |= {rank.node: rank.device for run in runs for rank in run.ranks}
        self.tests += judged
        for test in judged:
            speed = "-" if test.bytes_per_s is None else f"{test.bytes_per_s / 1e9:.3g} GB/s"
            verdict = f"{test.verdict}: {test.problem}" if test.problem else test.verdict
            self._report(f"round {self._rounds}: {test.nodes}: {speed}: {verdict}")
        return [test.verdict == "ok" for test in judged]

    def _run_group(self, group: Group) -> GroupRun:
        return run_group(group, self._worker, self._ranks_per_node, self._timeout_s)


def run_group(group: Group, worker: Sequence[str], ranks_per_node: int, timeout_s: float) -> GroupRun:
    """Run a step on a group, and repeat each rank's address on the stdin of all its ranks."""
    ranks: dict[int, RankResult] = {}
    addresses: list[bytes] = []

    def read(line: bytes, to_ranks: BinaryIO) -> None:
        if line.startswith(b'{"rank":'):
            addresses.append(line)
            with contextlib.suppress(OSError):  # the step has ended
                to_ranks.write(line)
        with contextlib.suppress(msgspec.DecodeError):
            result = decode_json(line, RankResult)
            sizes = (*ranks[result.rank].sizes, *result.sizes) if result.rank in ranks else result.sizes
            ranks[result.rank] = msgspec.structs.replace(result, sizes=sizes)

    problem = _run_step([*srun_argv(group, ranks_per_node, timeout_s), *worker], timeout_s, read)
    return GroupRun(group, tuple(ranks.values()), problem, bool(addresses))


def without_result(run: GroupRun, ranks_per_node: int) -> str:
    """Return which nodes of a group have no result, and why; "" if each rank has one."""
    if not run.problem and len(run.ranks) == len(run.group) * ranks_per_node:
        return ""
    silent = set(run.group) - {rank.node for rank in run.ranks}
    of_nodes = f" of {hostlist.fold(silent)}" if silent else ""
    return f"no result{of_nodes}: {run.problem or 'the step ended without an error'}"


def limit_s(timeout_s: float) -> float:
    """Return how long a step with this time-out can take, until it is left behind."""
    return timeout_s + 2 * job_step.GRACE_S


def _run_step(argv: Sequence[str], timeout_s: float, on_line: Callable[[bytes, BinaryIO], None]) -> str:
    """Run a step, and return how it failed; "" if it did not.

    on_line: gets each line of its stdout, and its stdin. That ends with this process, and the ranks with their stdin.
    """
    output_end, output = os.pipe()
    step_input, input_end = os.pipe()
    with open(input_end, "wb", buffering=0) as to_step:

        def read() -> None:
            with open(output_end, "rb") as lines:
                for line in lines:
                    on_line(line, to_step)

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        with open(step_input, "rb") as stdin, open(output, "wb") as stdout:
            try:
                done = subprocesses.run(
                    argv, timeout_s=limit_s(timeout_s), unset=NO_VARIABLES, stdin=stdin, stdout=stdout
                )
                problem = f"exit code {done.code}: {failure_reason(done.stderr)}" if done.code else ""
            except Unreachable:
                problem = f"did not end within {limit_s(timeout_s):g} s"
        reader.join(job_step.GRACE_S)  # a process that waits for a dead mount cannot be killed, and holds stdout open
    return problem


def judge(
    runs: Sequence[GroupRun], earlier: Sequence[GroupTest], ranks_per_node: int = 1, floor: float = GROUP_FLOOR
) -> list[GroupTest]:
    """Return the tests of a round. earlier: those of the rounds before, whose bandwidths count, too."""
    by_size: dict[int, list[float]] = {}
    for n_nodes, speed in [
        *((test.n_nodes, test.bytes_per_s) for test in earlier),
        *((len(run.group), _bandwidth(run)) for run in runs),
    ]:
        if speed is not None:
            by_size.setdefault(n_nodes, []).append(speed)
    tests = []
    for run in runs:
        speed = _bandwidth(run)
        verdict: Verdict = "ok"
        problem = ""
        if wrong := sum(size.wrong for rank in run.ranks for size in rank.sizes):
            verdict, problem = "wrong", f"{wrong} wrong elements"
        elif missing := without_result(run, ranks_per_node):
            verdict, problem = "failed", missing
        elif speed is not None and _is_slow(speed, by_size[len(run.group)], floor):
            verdict, problem = "slow", f"{speed / 1e9:.3g} GB/s"
        tests.append(GroupTest(hostlist.fold(run.group), len(run.group), verdict, speed, problem))
    return tests


def _is_slow(speed: float, speeds: Sequence[float], floor: float = GROUP_FLOOR) -> bool:
    return is_low(speed, speeds, min_values=_MIN_GROUPS, floor=floor)


def _bandwidth(run: GroupRun) -> float | None:
    """Return the bus bandwidth of the largest size, by the slowest rank; None for a group that did not finish."""
    largest = [max(rank.sizes, key=lambda size: size.bytes) for rank in run.ranks if rank.sizes]
    if run.problem or not largest:
        return None
    return bus_bandwidth(largest[0].bytes, max(size.wall_s for size in largest), len(run.ranks))


def to_results(
    found: Bisection, nodes: Sequence[str], tests: Sequence[GroupTest], devices: Mapping[str, str]
) -> list[BenchResult]:
    """Return a result a node, and one a group that fails only together. value: of a node's fastest pair."""
    pairs_of: dict[str, list[GroupTest]] = {node: [] for node in nodes}
    for test in tests:
        if test.n_nodes == 2:
            for node in hostlist.expand(test.nodes):
                pairs_of[node].append(test)
    bad = {*found.bad, *found.undecided}
    rows = [_node_result(found, node, pairs_of[node], bad - {node}, devices.get(node, "")) for node in nodes]
    failed = {test.nodes: test for test in tests if test.verdict != "ok"}
    for group in found.only_together:
        test = failed[hostlist.fold(group)]
        # Against all tests of the run, not only those before it: one of few may be slow by chance.
        speeds = [each.bytes_per_s for each in tests if each.n_nodes == test.n_nodes and each.bytes_per_s is not None]
        if test.verdict == "slow" and not _is_slow(test.bytes_per_s or 0.0, speeds):
            continue
        problem = f"only together: {test.problem}"
        row = BenchResult(
            node=test.nodes, measure=ALL_REDUCE, value=test.bytes_per_s, verdict=test.verdict, problem=problem
        )
        rows.append(row)
    at = timestamps.now_rfc3339()
    return [msgspec.structs.replace(row, measured_at=at) for row in rows]


def _node_result(
    found: Bisection, node: str, tests: Sequence[GroupTest], bad_others: set[str], device: str
) -> BenchResult:
    """Return a node's result. tests: of its pairs. bad_others: whose faults may be what a pair failed by."""
    failed = [test for test in tests if test.verdict != "ok"]
    verdict: Verdict = "ok"
    problem = ""
    if node in found.bad:
        own = [test for test in failed if not bad_others.intersection(hostlist.expand(test.nodes))]
        worst = max(own or failed, key=lambda test: _SEVERITY.index(test.verdict))  # partners may turn bad later
        verdict, problem = worst.verdict, worst.problem
    elif node in found.undecided:
        verdict, problem = "undecided", "; ".join(f"{test.nodes}: {test.problem}" for test in failed)
    return BenchResult(
        node=node,
        measure=ALL_REDUCE,
        value=max((test.bytes_per_s for test in tests if test.bytes_per_s is not None), default=None),
        verdict=verdict,
        problem=problem,
        hardware=device,
    )


def measure_nodes(nodes: Sequence[str], folder: Path, timeout_s: float, *, in_job: bool) -> list[BenchResult]:
    """Measure nodes of this job alone, all at the same time, or without a job, this node.

    folder: on their disks, for a file.
    """
    srun = srun_argv(nodes, 1, timeout_s, kill_on_bad_exit=False) if in_job else []
    results: list[BenchResult] = []

    def read(line: bytes, _: BinaryIO) -> None:
        with contextlib.suppress(msgspec.DecodeError):
            results.append(decode_json(line, BenchResult))

    argv = [*srun, *SINGLE, f"--timeout={timeout_s:g}", str(folder)]
    problem = DaemonPool(1, "pit-bench").submit(_run_step, argv, timeout_s, read).result()
    ended = {result.node for result in results if result.measure == single.END}
    results = [result for result in results if result.measure != single.END]
    results += [
        BenchResult(node=node, measure=single.END, value=None, verdict="failed", problem=problem or "no result")
        for node in nodes
        if node not in ended
    ]
    return sorted(results, key=lambda result: result.node)
