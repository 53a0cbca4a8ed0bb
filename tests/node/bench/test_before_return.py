"""The bench of a node that is to return: made when it is asked for, and what its results make of the report."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from typing import NoReturn

import msgspec
import pytest

from pitools.core import subprocesses
from pitools.core.errors import Unreachable
from pitools.node import spool
from pitools.node.bench import before_return, history
from pitools.node.bench.compare import BenchResult
from pitools.node.check.config import NodeConfig
from pitools.node.types import BENCH_CHECK, NodeReport

REPORT = NodeReport(node="n1", boot_id="b", checked_at="2026-11-01T00:00:00.000Z", passed=("gpus",))


def idle(_: float) -> str:
    return ""


def result(value: float | None, **more: str) -> bytes:
    return msgspec.json.encode(BenchResult(node="n1", measure="m", value=value, hardware="h", **more)) + b"\n"  # type: ignore[arg-type]


def bench_node(folder: Path) -> tuple[str, str]:
    """Bench, and return the state and message of the finding that the report then has."""
    spool.write_report(folder, REPORT)
    began_s = time.monotonic() - 1.0
    before_return.bench(NodeConfig(spool=str(folder), state=str(folder)), REPORT, None, began_s, idle)
    report = spool.read_report(folder, "n1")
    assert report
    if not report.findings:
        return ("passed" if BENCH_CHECK in report.passed else ""), ""
    (finding,) = report.findings
    assert (finding.check, finding.action) == (BENCH_CHECK, "report")
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
        (b"", "time.sleep(60)", "unknown", "no result within 0 s"),
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


@pytest.mark.parametrize("checked_s", [0.5, 20.0, 44.0, 46.0, 50.0])
def test_a_bench_ends_before_the_script_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repo: Path, checked_s: float
) -> None:
    """However long the checks took; without time for it, the report says so."""
    ends_s = []

    def run(command: list[str], *, timeout_s: float, env: dict[str, str]) -> NoReturn:
        assert float(command[-2].removeprefix("--timeout=")) <= min(30.0, timeout_s)
        ends_s.append(checked_s + timeout_s)
        raise Unreachable("killed")

    monkeypatch.setattr(subprocesses, "run", run)
    spool.write_report(tmp_path, REPORT)
    began_s = time.monotonic() - checked_s
    before_return.bench(NodeConfig(spool=str(tmp_path), state=str(tmp_path)), REPORT, None, began_s, idle)
    (limit,) = re.findall(r"^limit=(\d+)", (repo / "scripts" / "pit-healthcheck").read_text(), re.MULTILINE)
    assert all(end_s <= int(limit) - 5 for end_s in ends_s)
    assert bool(ends_s) is (checked_s < 45)
    report = spool.read_report(tmp_path, "n1")
    assert report
    assert [one.state for one in report.findings] == ["unknown"]


@pytest.mark.parametrize(("state", "is_kept"), [("passed", True), ("failed", True), ("unknown", False)])
def test_a_result_is_kept_until_the_controller_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, is_kept: bool
) -> None:
    """The next reports of the same request do not measure again; that of a later request does."""
    program = {"passed": result(1.0), "failed": result(1.0, verdict="wrong"), "unknown": b""}[state]
    count = tmp_path / "count"
    code = f"import sys; open({str(count)!r}, 'a').write('.'); sys.stdout.buffer.write({program!r})"
    monkeypatch.setattr(before_return, "_PROGRAM", (sys.executable, "-c", code))
    spool.request_benches(tmp_path, {"n1"})
    benched = []
    for number in range(4):
        if number == 3:
            spool.request_benches(tmp_path, set())
            spool.request_benches(tmp_path, {"n1"})
        before = spool.report_since_bench_request(tmp_path, "n1")
        spool.write_report(tmp_path, REPORT)
        config = NodeConfig(spool=str(tmp_path), state=str(tmp_path))
        before_return.bench(config, REPORT, before, time.monotonic(), idle)
        report = spool.read_report(tmp_path, "n1")
        assert report
        benched.append((BENCH_CHECK in report.passed, [one.state for one in report.findings]))
    assert benched == [(state == "passed", [] if state == "passed" else [state])] * 4
    assert len(count.read_text()) == (2 if is_kept else 4)
