"""A slow node is found, by its peers or by its own past; a slow day is not, nor what varies anyway."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pitools.node.bench.compare import BenchResult, compare, compare_twice, is_low

NODES = [f"n{number:02}" for number in range(16)]


def results(values: dict[str, float], hardware: str = "h") -> list[BenchResult]:
    return [BenchResult(node=node, measure="m", value=value, hardware=hardware) for node, value in values.items()]


def past_of(noise: random.Random, *, days: int = 10) -> list[BenchResult]:
    """Days on which every node had 100, give or take 2 %."""
    return [row for _ in range(days) for row in compare(results({node: noise.gauss(100, 2) for node in NODES}), [])]


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


TAILS: dict[str, Callable[[random.Random], float]] = {  # what a healthy node measures, as a share of its own mean
    "student t3": lambda d: 1 + 0.025 * d.gauss(0, 1) / math.sqrt(sum(d.gauss(0, 1) ** 2 for _ in range(3)) / 3),
    "log-normal, slow side": lambda d: 1.025 - 0.025 * d.lognormvariate(0, 1),
    "disturbed, 1 of 50": lambda d: d.gauss(1, 0.02) * (d.uniform(0.3, 0.9) if d.random() < 0.02 else 1),
}


def simulate(tail: str, seed: int, *, share: float = 1.0, days: int = 12) -> set[str]:
    """Return the slow nodes of a day after others, all of them of other speeds; n03 has `share` of its speed then."""
    dice = random.Random(f"{tail} {seed}")
    speeds = {node: 100 * dice.gauss(1, 0.02) for node in NODES}

    def measure(nodes: Sequence[str], day: float) -> list[BenchResult]:
        return results({node: speeds[node] * day * max(0.02, TAILS[tail](dice)) for node in nodes})

    past: list[BenchResult] = []
    for number in range(days + 1):
        day = dice.lognormvariate(0, 0.1) * (0.6 if dice.random() < 0.15 else 1)
        speeds["n03"] *= share if number == days else 1
        rows = compare_twice(measure(NODES, day), past, functools.partial(measure, day=day))
        past += rows
    return set(slow(rows))


@pytest.mark.parametrize("tail", TAILS)
def test_of_heavy_tails_a_slow_node_is_found_and_a_healthy_one_is_not(tail: str) -> None:
    """Of 640 healthy ones at most 3, on slow days, too; of 20 that have 70 % of their speed at least 19."""
    assert sum(len(simulate(tail, seed)) for seed in range(40)) <= 3
    assert sum("n03" in simulate(tail, seed, share=0.7) for seed in range(20)) >= 19


def test_a_node_that_is_slow_once_is_measured_again() -> None:
    """The better result counts, unless one of them is wrong; what fails only then is told, too."""
    rows = results({**dict.fromkeys(NODES, 100.0), "n03": 50.0, "n05": 40.0})
    asked: list[list[str]] = []

    def again(nodes: list[str]) -> list[BenchResult]:
        asked.append(nodes)
        wrong = msgspec.structs.replace(results({"n05": 99.0})[0], verdict="wrong")
        failed = BenchResult(node="n05", measure="all", value=None, verdict="failed")
        return [*results({"n03": 98.0}), wrong, failed]

    compared = compare_twice(rows, [], again)
    assert asked == [["n03", "n05"]]
    assert [(row.node, row.verdict) for row in compared if row.verdict != "ok"] == [("n05", "wrong"), ("n05", "failed")]
    assert compared[3].value == 98.0


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


def test_a_fault_of_the_first_measurement_stays_one() -> None:
    """Of a node that is measured again as it is slow: data that were wrong once are wrong, whatever comes after."""
    past = results({"n00": 100.0}) * 6
    wrong = BenchResult(node="n00", measure="disk", value=1.0, verdict="wrong", hardware="h")
    again = [*results({"n00": 100.0}), msgspec.structs.replace(wrong, verdict="ok")]
    compared = compare_twice([*results({"n00": 50.0}), wrong], past, lambda _: again)
    assert [(row.measure, row.value, row.verdict) for row in compared] == [("m", 100.0, "ok"), ("disk", 1.0, "wrong")]
