"""The bisection finds every bad node, in as few rounds as it promises, whatever nodes are bad."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from pitools.node.bench.bisect import Bisection, Group, bisect, max_rounds, pairs


def run(nodes: Sequence[str], bad: set[str], first: Sequence[Group] = ()) -> Bisection:
    """Bisect with a test that fails for any group with a bad node; each round's groups must be disjoint."""

    def run_round(groups: Sequence[Group]) -> list[bool]:
        members = [node for group in groups for node in group]
        assert len(members) == len(set(members))
        assert all(len(group) > 1 for group in groups)
        return [not bad.intersection(group) for group in groups]

    return bisect(nodes, run_round, first=first)


def test_one_and_two_bad_of_sixteen() -> None:
    """All 136 cases, within log2(16) + 2 rounds."""
    nodes = [f"n{number:02}" for number in range(16)]
    for count in (1, 2):
        for bad in itertools.combinations(nodes, count):
            result = run(nodes, set(bad))
            assert (result.bad, result.undecided) == (bad, ())
            assert result.rounds <= 6


@given(st.integers(2, 64), st.data())
def test_no_good_node_is_called_bad_and_no_bad_one_good(count: int, data: st.DataObject) -> None:
    """However many are bad; with fewer than a half bad, none stays undecided."""
    nodes = [f"n{number}" for number in range(count)]
    bad = data.draw(st.sets(st.sampled_from(nodes)))
    result = run(nodes, bad)
    assert set(result.bad) <= bad
    assert bad <= {*result.bad, *result.undecided}
    assert result.rounds <= max_rounds(count)
    if not bad:
        assert result == Bisection(bad=(), rounds=1)
    if 2 * len(bad) < count:
        assert not result.undecided


@given(st.integers(3, 32), st.data())
def test_a_fault_between_two_good_nodes_is_told(count: int, data: st.DataObject) -> None:
    """As of a link: the smallest tested group that fails though its nodes are good; no node is called bad."""
    nodes = [f"n{number}" for number in range(count)]
    pair = data.draw(st.sets(st.sampled_from(nodes), min_size=2, max_size=2))
    result = bisect(nodes, lambda groups: [not pair <= set(group) for group in groups])
    assert result.bad == ()
    assert any(pair <= set(group) for group in result.only_together)


def test_pairs_first_find_up_to_two_of_sixteen_in_three_rounds() -> None:
    """In two, if they are of different pairs; fifteen nodes leave one without a first partner."""
    for count in (15, 16):
        nodes = [f"n{number:02}" for number in range(count)]
        for bad in [(node,) for node in nodes] + list(itertools.combinations(nodes, 2)):
            result = run(nodes, set(bad), pairs(nodes))
            assert (result.bad, result.undecided) == (bad, ())
            assert result.rounds <= (2 if count == 16 and bad not in pairs(nodes) else 3)


@given(st.integers(2, 64), st.data())
def test_pairs_first_call_no_good_node_bad(count: int, data: st.DataObject) -> None:
    """However many are bad, and within the rounds promised."""
    nodes = [f"n{number}" for number in range(count)]
    bad = data.draw(st.sets(st.sampled_from(nodes)))
    result = run(nodes, bad, pairs(nodes))
    assert set(result.bad) <= bad <= {*result.bad, *result.undecided}
    assert result.rounds <= max_rounds(count)


def test_suspects_without_a_good_node_meet_in_new_pairs() -> None:
    """One bad of three is found whichever it is, though the first group leaves no good partner."""
    nodes = ["a", "b", "c"]
    for bad in nodes:
        for first in ([], pairs(nodes)):
            result = run(nodes, {bad}, first)
            assert (result.bad, result.undecided) == ((bad,), ())


def test_every_size_within_its_rounds() -> None:
    """One bad node, wherever it is, of 2 to 64 nodes; with any of them a second one in another place."""
    for count in range(2, 65):
        nodes = [f"n{number}" for number in range(count)]
        for number in range(count):
            for bad in ({nodes[number]}, {nodes[number], nodes[number * 7 % count]}):
                for first in ([], pairs(nodes)):
                    result = run(nodes, bad, first)
                    assert set(result.bad) <= bad <= {*result.bad, *result.undecided}
                    assert result.rounds <= min(max_rounds(count), 3 if first and count > 8 else 99)
                    assert not result.undecided or count <= 2 * len(bad)


def test_no_pair_is_tested_twice_in_vain() -> None:
    """Two nodes that fail together, and no third: nothing is new in a second test."""
    tests: list[Group] = []
    result = bisect(["a", "b"], lambda groups: [tests.append(group) is not None for group in groups])  # type: ignore[func-returns-value]
    assert (result.undecided, result.rounds, tests) == (("a", "b"), 1, [("a", "b")])


def test_a_limit_of_rounds_leaves_suspects_undecided() -> None:
    """Nothing is called bad, or good, that was not tested alone."""
    result = bisect(["a", "b", "c", "d"], lambda groups: ["a" not in group for group in groups], limit=2)
    assert (result.bad, result.undecided, result.rounds) == ((), ("a", "b"), 2)
