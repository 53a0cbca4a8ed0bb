"""Test the nodes of a job before its ranks start: their checks, then all-reduces in pairs of nodes.

    each node      python -m pitools.node.job_check: a line in <attempt>/preflight.jsonl
    first node     find_bad_nodes: all-reduces by the tests of `pit node bench --pairs`
    + result       <attempt>/preflight.json; a node that failed ends the attempt with exit code 97

Whatever cannot be tested says nothing about a node: it is reported, and the ranks start.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from pitools.core import hostlist, subprocesses, timestamps
from pitools.core.errors import PitError, Unreachable
from pitools.core.record import decode_json
from pitools.launch import exit_codes
from pitools.launch.diagnosis import evidence
from pitools.launch.job import job_context
from pitools.launch.plan import Plan, load_plan
from pitools.node.bench import run as bench
from pitools.node.bench.bisect import Group, find_bad
from pitools.run import run_folder
from pitools.run.attempt_records import NodePreflight, Preflight, PreflightFailure
from pitools.slurm import job_step

ALL_REDUCE, WRONG_PAIR = "all-reduce", "all-reduce-pair"
_CHECKS_TIMEOUT_S = 30.0
_TEST_TIMEOUT_S = 10.0  # of an all-reduce; with GPUs, importing torch or jax comes on top
_GROUPS_TIMEOUT_S = 90.0  # no round begins later; without a bad node there are one or two
_SLOW_FLOOR = 0.5  # below the other groups' bandwidth: more is a fault, less may be the network's load


class Tested(NamedTuple):
    """What a test found. problem: what could not be tested, "" for nothing."""

    failures: tuple[PreflightFailure, ...] = ()
    problem: str = ""


class _Stopped(Exception):
    """The job was signalled, or the time for rounds is over."""


def main() -> int:
    """Test the nodes of this job; return 97 if one failed, else 0."""
    try:
        job = job_context.load_context(os.environ)
        # Without recovery there is nobody to replace a node.
        return 0 if job.mode == "none" else _test_job(Path(os.environ["PIT_ATTEMPT_DIR"]), load_plan(job.run_dir))
    except Exception as error:  # noqa: BLE001 (a broken preflight never stops a run)
        _report(f"not completed, the ranks start: {error!r}")
        return 0


def _test_job(attempt: Path, plan: Plan) -> int:
    nodes, began = job_step.nodes_of_job(), time.monotonic()
    _report(f"{len(nodes)} nodes")
    problem = _check_nodes(attempt, nodes, plan.node_config)
    gate = Tested()
    if len(nodes) > 1 and not read_checks(attempt, nodes).failures:
        gate = find_bad_nodes(nodes, is_stopped=lambda: evidence.was_signalled(attempt))
    return conclude(attempt, nodes, began, Tested(gate.failures, "; ".join(filter(None, (problem, gate.problem)))))


def check_command(python: str, node_config: str) -> list[str]:
    """Return the command that makes the checks of the node that it runs on."""
    return [python, "-m", "pitools.node.job_check", *([node_config] if node_config else [])]


def _check_nodes(attempt: Path, nodes: Sequence[str], node_config: str) -> str:
    """Have all nodes make their checks at the same time; return why srun failed, "" if it did not."""
    srun = job_step.srun_argv(nodes, 1, _CHECKS_TIMEOUT_S, kill_on_bad_exit=False)
    with open(attempt / "preflight.jsonl", "wb") as lines:
        try:
            command = [*srun, *check_command(sys.executable, node_config)]
            done = subprocesses.run(command, timeout_s=_CHECKS_TIMEOUT_S, unset=job_step.NO_VARIABLES, stdout=lines)
        except Unreachable as error:
            return error.message
    return _without_srun(job_step.failure_reason(done.stderr)) if done.code else ""


def read_checks(attempt: Path, nodes: Sequence[str]) -> Tested:
    """Return the failures of the nodes' checks. A check that most nodes fail is no fault of a node."""
    reports = read_reports(attempt)
    failures = [failure for node in nodes if node in reports for failure in reports[node].failures]
    nodes_of: dict[str, set[str]] = {}
    for failure in failures:
        nodes_of.setdefault(failure.check, set()).add(failure.node)
    common = {check for check, failed in nodes_of.items() if 2 * len(failed) > len(nodes) > 1}
    problems = [f"{check}: failed on {len(nodes_of[check])} of {len(nodes)} nodes" for check in sorted(common)]
    if silent := [node for node in nodes if node not in reports]:
        problems.append(f"no checks of {hostlist.fold(silent)}")
    return Tested(tuple(failure for failure in failures if failure.check not in common), "; ".join(problems))


def read_reports(attempt: Path) -> dict[str, NodePreflight]:
    """Return the nodes that have made their checks so far. Raises OSError."""
    reports = {}
    for line in (attempt / "preflight.jsonl").read_bytes().splitlines():
        try:
            report = decode_json(line, NodePreflight)
        except msgspec.DecodeError:
            continue
        reports[report.node] = report
    return reports


def find_bad_nodes(
    nodes: Sequence[str],
    *,
    worker: Sequence[str] = bench.WORKER,
    timeout_s: float = _TEST_TIMEOUT_S,
    is_stopped: Callable[[], bool] = lambda: False,
) -> Tested:
    """Return the nodes that fail all-reduces with two good partners each.

    And, as less certain, all nodes of pairs whose data were wrong, if there are no good partners to tell which it was.

    worker: the program of a rank. timeout_s: of a test. is_stopped: whether no further round may begin.
    """
    ranks = job_step.gpus_per_node() or 1
    tester = bench.GroupTester(timeout_s=timeout_s, worker=worker, ranks_per_node=ranks, floor=_SLOW_FLOOR)
    deadline = time.monotonic() + _GROUPS_TIMEOUT_S

    def test_round(groups: Sequence[Group]) -> list[bool]:
        if is_stopped() or time.monotonic() > deadline:
            raise _Stopped
        return tester.test_round(groups)

    try:
        found = find_bad(nodes, test_round, together=False)
    except (_Stopped, PitError) as error:
        failed = [f"{test.nodes}: {test.problem}" for test in tester.tests if test.verdict != "ok"]
        reason = error.message if isinstance(error, PitError) else "stopped early"
        return Tested(problem=_without_srun("; ".join([f"no all-reduce: {reason}", *failed[:1]])))
    rows = bench.to_results(found, nodes, tester.tests, tester.devices)
    wrong = {node for test in tester.tests if test.verdict == "wrong" for node in hostlist.expand(test.nodes)}
    checks = dict.fromkeys(wrong.intersection(found.undecided), WRONG_PAIR) | dict.fromkeys(found.bad, ALL_REDUCE)
    failures = [
        PreflightFailure(node=row.node, check=checks[row.node], message=_without_srun(row.problem))
        for row in rows
        if row.node in checks
    ]
    unclear = [f"{row.node}: {row.problem}" for row in rows if row.verdict != "ok" and row.node not in checks]
    return Tested(tuple(failures), _without_srun("; ".join(f"{ALL_REDUCE}: {text}" for text in unclear)))


def conclude(attempt: Path, nodes: Sequence[str], began: float, gate: Tested | None = None) -> int:
    """Write and report the result; return the exit code. began: time.monotonic(). gate: of the all-reduces.

    Raises OSError without preflight.jsonl, ClusterError, NoSpace.
    """
    checks, gate = read_checks(attempt, nodes), gate or Tested()
    failures = checks.failures + gate.failures
    result = Preflight(
        t=timestamps.now_rfc3339(),
        wall_s=round(time.monotonic() - began, 3),
        nodes=len(nodes),
        answered=sum(node in read_reports(attempt) for node in nodes),
        failures=failures,
        problem="; ".join(filter(None, (checks.problem, gate.problem))),
    )
    run_folder.write_record(attempt / "preflight.json", result)
    tested = f"{result.answered} of {result.nodes} nodes, {result.wall_s:.1f} s"
    _report(tested + (f"; not tested: {result.problem}" if result.problem else ""))
    for failure in failures:
        _report(f"{failure.node}: {failure.check}: {failure.message}")
    return exit_codes.PREFLIGHT_FAILED if failures else 0


def _without_srun(text: str) -> str:
    """Return a text that the job's log may hold: srun's own words would be taken for those of the ranks' step."""
    return text.replace("srun: error:", "srun:")


def _report(text: str) -> None:
    print(f"pit: preflight: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
