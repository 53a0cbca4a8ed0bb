"""Groups are judged by the gate and against others of their size; the nodes' verdicts follow from their own tests."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pitools.node.bench import run
from pitools.node.bench.bisect import Bisection, Group, find_bad, max_rounds
from pitools.node.bench.compare import BenchResult
from pitools.node.bench.run import (
    GroupRun,
    GroupTest,
    judge,
    to_results,
)
from pitools.node.bench.single import END
from pitools.node.bench.worker import RankResult, SizeResult, bus_bandwidth

NODES = [f"n{number:02}" for number in range(16)]


def ran(*group: str, wall_s: float = 0.01, wrong: int = 0, problem: str = "") -> GroupRun:
    """A group whose ranks all took this long for the largest buffer."""
    sizes = (SizeResult(bytes=1 << 10, wall_s=9.0, wrong=0), SizeResult(bytes=1 << 24, wall_s=wall_s, wrong=wrong))
    ranks = tuple(
        RankResult(rank=rank, node=node, framework="torch", device="cpu", sizes=sizes)
        for rank, node in enumerate(group)
    )
    return GroupRun(group, () if problem else ranks, problem)


def verdicts(runs: Sequence[GroupRun], **more: object) -> list[str]:
    return [test.verdict for test in judge(runs, [], **more)]  # type: ignore[arg-type]


def test_a_group_is_judged_by_the_gate_before_its_bandwidth() -> None:
    """One wrong element, a step that failed, or a rank without a result; each named."""
    tests = judge([ran("a", "b", wrong=1), ran("c", "d", problem="exit code 9"), ran("e", "f")], [])
    assert [test.verdict for test in tests] == ["wrong", "failed", "ok"]
    assert tests[0].problem == "2 wrong elements"  # of two ranks
    assert "[c-d]" in tests[1].problem or "c,d" in tests[1].problem
    half = ran("a", "b")
    (test,) = judge([GroupRun(half.group, half.ranks[:1], "")], [])
    assert (test.verdict, "b" in test.problem) == ("failed", True)
    assert verdicts([half], ranks_per_node=2) == ["failed"]


def test_a_slow_group_shows_only_among_others_of_its_size() -> None:
    """In the same round or an earlier one; a few percent, and a larger group, are no reason."""
    assert verdicts([ran("a", "b", wall_s=0.05), ran("c", "d"), ran("e", "f", wall_s=0.011)]) == ["slow", "ok", "ok"]
    assert verdicts([ran("a", "b", "c", wall_s=0.05), ran("d", "e"), ran("f", "g")]) == ["ok", "ok", "ok"]
    earlier = judge([ran("c", "d"), ran("e", "f")], [])
    (test,) = judge([ran("a", "b", wall_s=0.05)], earlier)
    assert (test.verdict, test.problem) == ("slow", "0.336 GB/s")
    half = ran("a", "b", wall_s=0.016)  # more than a half of the others': too slow for a bench, and not for a preflight
    assert [judge([half], earlier, 1, floor)[0].verdict for floor in (run.GROUP_FLOOR, 0.5)] == ["slow", "ok"]


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    """2 (n - 1) / n of the bytes a second, as their doc/PERFORMANCE.md has it."""
    assert bus_bandwidth(1 << 30, 1.0, 8) == 1.75 * (1 << 30)
    assert bus_bandwidth(1 << 30, 1.0, 2) == 1 << 30


@given(st.integers(2, 40), st.data())
def test_rounds_and_verdicts_hold_whatever_is_bad(count: int, data: st.DataObject) -> None:
    """With groups that fail only from some size on, too: no good node is called bad."""
    nodes = [f"n{number}" for number in range(count)]
    bad = data.draw(st.sets(st.sampled_from(nodes)))
    fails_from = data.draw(st.integers(3, 80))

    def run_round(groups: Sequence[Group]) -> list[bool]:
        return [not bad.intersection(group) and len(group) < fails_from for group in groups]

    found = find_bad(nodes, run_round, together=True)
    assert set(found.bad) <= bad
    assert found.rounds <= max_rounds(count)


def test_a_fault_at_scale_is_found_after_the_pairs() -> None:
    """Two good nodes that fail with each other alone, in different halves: their smallest tested group is told."""
    apart = {"n03", "n12"}
    found = find_bad(NODES, lambda groups: [not apart <= set(group) for group in groups], together=True)
    assert (found.bad, found.undecided) == ((), ())
    assert [apart <= set(group) for group in found.only_together] == [True]
    alone = find_bad(NODES, lambda groups: [not apart <= set(group) for group in groups], together=False)
    assert alone == Bisection(bad=(), rounds=1)


def test_a_bad_node_has_the_cause_of_its_own_tests() -> None:
    """Not what it failed by with another bad node."""
    tests = judge([ran("a", "b", wrong=3, wall_s=0.5), ran("c", "d"), ran("e", "f")], [])
    tests += judge([ran("a", "c", wall_s=0.5), ran("b", "d", wrong=3)], tests)
    tests += judge([ran("a", "d", wall_s=0.5), ran("b", "c", wrong=3)], tests)
    rows = to_results(Bisection(bad=("a", "b"), rounds=3), list("abcdef"), tests, {"a": "cpu"})
    assert [row.verdict for row in rows] == ["slow", "wrong", "ok", "ok", "ok", "ok"]
    assert rows[0].hardware == "cpu"
    assert rows[2].value == rows[4].value


def test_partners_that_turn_bad_lose_no_results() -> None:
    """A bad node keeps its verdict when the nodes that it failed with fail later, when all are tested together."""
    tests: list[GroupTest] = []

    def run_round(groups: Sequence[Group]) -> list[bool]:
        is_joint = any(test.n_nodes > 2 for test in tests) or any(len(group) > 2 for group in groups)
        bad = {"n0", "n1", "n2"} if is_joint else {"n0"}
        tests.extend(judge([ran(*group, wrong=bool(bad & set(group))) for group in groups], tests))
        return [not bad.intersection(group) for group in groups]

    nodes = [f"n{number}" for number in range(8)]
    found = find_bad(nodes, run_round, together=True)
    rows = to_results(found, nodes, tests, {})
    assert {row.node for row in rows if row.verdict == "wrong"} == {"n0", "n1", "n2"} == set(found.bad)


def test_a_slow_pair_by_chance_is_no_fault_between_its_nodes() -> None:
    """If later pairs, of good nodes, are as slow; one that stays far below all is."""
    chance = judge([ran("a", "b", wall_s=0.02), ran("c", "d")], [])
    assert [test.verdict for test in chance] == ["slow", "ok"]
    found = Bisection(bad=(), only_together=(("a", "b"),), rounds=2)
    tests = chance + judge([ran("a", "c", wall_s=0.02), ran("b", "d", wall_s=0.02)], chance)
    assert [row.node for row in to_results(found, list("abcd"), tests, {})] == list("abcd")
    tests = chance + judge([ran("a", "c"), ran("b", "d")], chance)
    assert to_results(found, list("abcd"), tests, {})[-1].verdict == "slow"


def test_a_node_that_stops_in_the_middle_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a disk that hangs: what it measured before is kept, and it did not end."""
    row = msgspec.json.encode(BenchResult(node="a", measure="cpu_bytes_per_s", value=1.0)).decode()
    monkeypatch.setattr(run, "SINGLE", (sys.executable, "-c", f"print({row!r}); 1 / 0"))
    rows = run.measure_nodes(["a"], tmp_path, 60, in_job=False)
    assert [(each.measure, each.verdict) for each in rows] == [("cpu_bytes_per_s", "ok"), (END, "failed")]
    assert "ZeroDivisionError" in rows[1].problem
    monkeypatch.setattr(run, "SINGLE", (sys.executable, "-c", "import time; time.sleep(60)"))
    monkeypatch.setattr(run.job_step, "GRACE_S", 0.2)
    (row,) = run.measure_nodes(["a"], tmp_path, 0.1, in_job=False)
    assert (row.verdict, row.problem) == ("failed", "did not end within 0.5 s")


def test_undecided_nodes_say_by_what() -> None:
    """Two nodes that fail together, and no third."""
    tests = judge([ran("a", "b", wrong=1)], [])
    rows = to_results(Bisection(bad=(), undecided=("a", "b"), rounds=1), ["a", "b"], tests, {})
    assert [(row.verdict, bool(row.problem)) for row in rows] == [("undecided", True)] * 2
