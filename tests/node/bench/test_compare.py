"""A slow node is found, by its peers or by its own past; a slow day is not, nor what varies anyway."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pitools.node.bench.compare import BenchResult, compare, is_low

NODES = [f"n{number:02}" for number in range(16)]


def results(values: dict[str, float], hardware: str = "h") -> list[BenchResult]:
    return [BenchResult(node=node, measure="m", value=value, hardware=hardware) for node, value in values.items()]


def past_of(noise: random.Random, *, days: int = 10) -> list[BenchResult]:
    """Days on which every node had 100, give or take 2 %."""
    return [row for _ in range(days) for row in results({node: noise.gauss(100, 2) for node in NODES})]


def slow(rows: list[BenchResult]) -> list[str]:
    return [row.node for row in rows if row.verdict == "slow"]


@pytest.mark.parametrize("today", [1.0, 0.5, 1.5])
def test_a_slow_node_is_found_and_a_slow_day_is_not(today: float) -> None:
    """Whatever the day does to all, by its peers alone, or by its past as well."""
    noise = random.Random(7)
    values = {node: noise.gauss(100, 2) * today for node in NODES}
    assert slow(compare(results(values), past_of(noise))) == []
    values["n03"] *= 0.7
    for past in (past_of(noise), []):
        rows = compare(results(values), past)
        assert slow(rows) == ["n03"]
        assert rows[3].of_peers == pytest.approx(0.7, abs=0.06)
    assert rows[3].of_past is None


def test_a_node_alone_is_compared_with_its_past() -> None:
    """As in a run on one node; a node that was always slower than others is as it was."""
    noise = random.Random(7)
    past = [row for row in past_of(noise) if row.node == "n00"]
    assert slow(compare(results({"n00": 80.0}), past)) == ["n00"]
    assert slow(compare(results({"n00": 97.0}), past)) == []
    assert slow(compare(results({"n00": 80.0}), past[:4])) == []


def test_a_node_that_stays_slow_does_not_become_its_own_norm() -> None:
    """Slow results are no past to compare with, and results of other hardware neither."""
    past = results({"n00": 100.0}) * 6
    for _ in range(30):
        rows = compare(results({"n00": 60.0}), past)
        past += rows
    assert slow(rows) == ["n00"]
    assert slow(compare(results({"n00": 60.0}, "another"), past)) == []


def test_other_hardware_is_no_peer() -> None:
    """Half of the nodes are of an older model."""
    rows = results(dict.fromkeys(NODES[:8], 100.0)) + results(dict.fromkeys(NODES[8:], 40.0), "old")
    assert slow(compare(rows, [])) == []


def test_what_is_wrong_or_missing_stays_so_and_is_no_peer() -> None:
    """A verdict that was made is kept."""
    rows = results(dict.fromkeys(NODES[:4], 100.0))
    rows[0] = msgspec.structs.replace(rows[0], verdict="wrong", value=1.0)
    rows[1] = msgspec.structs.replace(rows[1], verdict="failed", value=None)
    compared = compare(rows, [])
    assert [row.verdict for row in compared] == ["wrong", "failed", "ok", "ok"]
    assert [row.of_peers for row in compared] == [None] * 4


@given(st.lists(st.floats(0, 1e15), max_size=40), st.floats(0, 1e15))
def test_nothing_at_or_above_the_median_is_low(values: list[float], value: float) -> None:
    """Zeros and equal values included."""
    if is_low(value, values, min_values=2):
        assert value < sorted(values)[len(values) // 2]


def test_noise_of_healthy_nodes_is_rarely_low() -> None:
    """Of 10,000 nodes whose values spread by 10 %, compared among 16: at most 1 in 1,000."""
    noise = random.Random(7)
    found = sum(
        is_low(value, values, min_values=4)
        for values in ([noise.gauss(100, 10) for _ in range(16)] for _ in range(625))
        for value in values
    )
    assert found <= 10
