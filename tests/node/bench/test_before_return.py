"""The bench of a node that is to return: made when it is asked for, and what its results make of the report."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

from pitools.node import spool
from pitools.node.bench import before_return, history
from pitools.node.bench.compare import BenchResult
from pitools.node.check.config import NodeConfig
from pitools.node.types import BENCH_CHECK, NodeReport

REPORT = NodeReport(node="n1", boot_id="b", checked_at="2026-11-01T00:00:00.000Z", passed=("gpus",))


def result(value: float | None, **more: str) -> bytes:
    return msgspec.json.encode(BenchResult(node="n1", measure="m", value=value, hardware="h", **more)) + b"\n"  # type: ignore[arg-type]


def bench_node(folder: Path) -> tuple[str, str]:
    """Bench, and return the state and message of the finding that the report then has."""
    spool.write_report(folder, REPORT)
    before_return.bench(NodeConfig(spool=str(folder), state=str(folder)), REPORT)
    report = spool.read_report(folder, "n1")
    assert report
    if not report.findings:
        return ("passed" if BENCH_CHECK in report.passed else ""), ""
    (finding,) = report.findings
    assert (finding.check, finding.action) == (BENCH_CHECK, "watch")
    return finding.state, finding.message


def test_a_bench_that_is_asked_for(tmp_path: Path) -> None:
    """By the real program; its results are kept."""
    assert bench_node(tmp_path) == ("passed", "")
    measures = {one.measure for one in history.read_past(tmp_path, {"n1"})}
    assert {"cpu_bytes_per_s", "memory_bytes_per_s"} <= measures


@pytest.mark.parametrize(
    ("lines", "end", "state", "message"),
    [
        (result(100.0), "", "passed", ""),
        (result(10.0), "", "failed", "m is slow: 0.1 of its past"),
        (result(100.0, verdict="wrong", problem="3 wrong blocks"), "", "failed", "m is wrong: 3 wrong blocks"),
        (result(None, verdict="failed", problem="I/O error"), "", "failed", "m is failed: I/O error"),
        (result(100.0), "sys.exit('no numpy')", "unknown", "no numpy"),
        (b"nonsense\n", "", "unknown", "no result"),
        (b"", "time.sleep(60)", "unknown", "no result within 0.1 s"),
    ],
    ids=["good", "slow", "wrong", "failed", "cut short", "nonsense", "hung"],
)
def test_only_a_whole_and_good_bench_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: bytes, end: str, state: str, message: str
) -> None:
    """Against the node's own past; without a result it is unknown, which returns nothing and blames nothing."""
    program = f"import sys, time; sys.stdout.buffer.write({lines!r}); sys.stdout.flush(); {end or 'pass'}"
    monkeypatch.setattr(before_return, "_PROGRAM", (sys.executable, "-c", program))
    if "sleep" in end:
        monkeypatch.setattr(before_return, "_TIMEOUT_S", 0.1)
        monkeypatch.setattr(before_return, "_GRACE_S", 0.1)
    history.append_results(tmp_path, [msgspec.json.decode(result(100.0), type=BenchResult)] * 5)
    assert bench_node(tmp_path) == (state, message)
