"""Bench this node before it returns, when the controller asks for it, and right before, Slurm has it drained and idle.

By the node's own report, as Slurm starts no job on a drained node: to bench in a job, the node would have to be resumed
first, in a reservation, by a user with an account.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from pitools.core import subprocesses, timestamps
from pitools.core.errors import PitError, Unreachable
from pitools.core.record import decode_json
from pitools.node import spool
from pitools.node.bench import history
from pitools.node.bench.compare import BenchResult, compare
from pitools.node.check.config import NodeConfig
from pitools.node.types import BENCH_CHECK, Finding, NodeReport, State

_PROGRAM = (sys.executable, "-P", "-m", "pitools.node.bench.single")
_TIMEOUT_S = 30.0
_ASK_S = 5.0  # of Slurm, whether the node is idle
_END_S = 45.0  # after the start of `pit node check`, which `pit-healthcheck` ends after 55 s
_GRACE_S = 5.0  # until a process that does not end itself then is killed


def bench(
    config: NodeConfig,
    report: NodeReport,
    before: NodeReport | None,
    began_s: float,
    why_not_idle: Callable[[float], str],
) -> None:
    """Replace a node's report by one that also has its bench. Raises PitError.

    before: the last report, if it is of after the request: a result that it has is kept until the controller reads it.
    began_s: when the checks began, of the monotonic clock. why_not_idle: says within a time why this node may not be
    measured now, "" if it may.
    """
    if not (with_bench := before and _keep_result(report, before)):
        with_bench = _add_result(config, report, began_s, why_not_idle)
    spool.write_report(Path(config.spool), with_bench)


def _keep_result(report: NodeReport, before: NodeReport) -> NodeReport | None:
    """Return the report with the bench's result of the one before; None if that has none."""
    if BENCH_CHECK in before.passed:
        return msgspec.structs.replace(report, passed=(*report.passed, BENCH_CHECK))
    failed = tuple(one for one in before.findings if one.check == BENCH_CHECK and one.state == "failed")
    return msgspec.structs.replace(report, findings=(*report.findings, *failed)) if failed else None


def _add_result(
    config: NodeConfig, report: NodeReport, began_s: float, why_not_idle: Callable[[float], str]
) -> NodeReport:
    """Bench this node, and return its report with the result."""
    results: list[BenchResult] = []
    if not (problem := why_not_idle(min(_ASK_S, max(1.0, _left_s(began_s))))):
        results, problem = _measure(Path(config.state), report.node, min(_TIMEOUT_S, _left_s(began_s)))
    with contextlib.suppress(PitError):  # without its past, what is wrong or failed is still found
        past = history.read_past(Path(config.spool), {report.node})
        results = compare(results, past)
        history.append_results(Path(config.spool), results)
    bad = [one for one in results if one.verdict != "ok"]
    state: State = "failed" if bad else "unknown" if problem or not results else "passed"
    if state == "passed":
        return msgspec.structs.replace(report, passed=(*report.passed, BENCH_CHECK))
    texts = [f"{one.measure} is {one.verdict}: {one.problem or f'{one.of_past} of its past'}" for one in bad]
    finding = Finding(
        node=report.node,
        check=BENCH_CHECK,
        state=state,
        level="warning",
        action="report",  # of a drained node; the controller leaves it to a person
        message="; ".join(texts) or problem or "no result",
        evidence_at=timestamps.now_rfc3339(),
    )
    return msgspec.structs.replace(report, findings=(*report.findings, finding))


def _left_s(began_s: float) -> float:
    return _END_S - (time.monotonic() - began_s)


def _measure(folder: Path, node: str, timeout_s: float) -> tuple[list[BenchResult], str]:
    """Return this node's results, and why there are not all, "" if there are. folder: on the disk to measure."""
    if timeout_s <= 0:
        return [], f"its checks leave no time: they took {_END_S - timeout_s:.0f} s"
    command = [*_PROGRAM, f"--timeout={timeout_s:g}", str(folder)]
    results: list[BenchResult] = []
    try:
        done = subprocesses.run(command, timeout_s=timeout_s + _GRACE_S, env={"SLURMD_NODENAME": node})
    except Unreachable:
        return [], f"no result within {timeout_s:.0f} s"
    for line in done.stdout.splitlines():
        with contextlib.suppress(msgspec.DecodeError):
            results.append(decode_json(line, BenchResult))
    last = (done.stderr.strip().splitlines() or [f"exit code {done.code}"])[-1]
    return results, last if done.code else ""
