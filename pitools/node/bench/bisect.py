"""Find the bad nodes among many by tests of groups, in rounds of disjoint groups that are tested at the same time.

A test of a group, as an all-reduce, fails if any of its nodes is bad. Groups that fail are halved down to single nodes,
and each of these is tested with a node of a group that passed. A node is bad if it fails with two that are good, as one
failure may be of the link between them. So bad nodes, wherever they are, are found within ceil(log2(n)) + 2 rounds, or
within 3 if the first groups are pairs, as long as there are good partners for all suspects. Else suspects are paired
anew with each other: with fewer than half of the nodes bad, none stays undecided after 2 ceil(log2(n)) + 1 rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

Group = tuple[str, ...]
TestRound = Callable[[Sequence[Group]], Sequence[bool]]
"""Tests disjoint groups of two or more nodes at the same time; returns whether each passed."""


class Bisection(NamedTuple):
    """The result. undecided: suspects without a good partner. only_together: groups that fail though their parts pass,
    as with a fault of the network between them. rounds: of tests.
    """

    bad: tuple[str, ...]
    undecided: tuple[str, ...] = ()
    only_together: tuple[Group, ...] = ()
    rounds: int = 0


def max_rounds(n_nodes: int) -> int:
    """Return the most rounds for so many nodes."""
    return 2 * (n_nodes - 1).bit_length() + 1


def pairs(nodes: Sequence[str]) -> list[Group]:
    """Return disjoint pairs of neighbours; the last of an odd number of nodes is in none."""
    return list(zip(nodes[::2], nodes[1::2], strict=False))


def find_bad(nodes: Sequence[str], test_round: TestRound, *, together: bool) -> Bisection:
    """Test nodes by pairs, and then all good ones together, in at most max_rounds(len(nodes)) rounds.

    Of pairs there are many at once, so that those with a slow node show. together: with that last test; where it fails,
    the group is halved, down to the smallest that fails.
    """
    paired = bisect(nodes, test_round, first=pairs(nodes))
    good = [node for node in nodes if node not in paired.bad and node not in paired.undecided]
    rounds_left = max_rounds(len(nodes)) - paired.rounds
    if not together or len(good) < 3 or rounds_left < 1:
        return paired
    joint = bisect(good, test_round, limit=rounds_left)
    bad, undecided = {*paired.bad, *joint.bad}, {*paired.undecided, *joint.undecided}
    return Bisection(
        bad=tuple(node for node in nodes if node in bad),
        undecided=tuple(node for node in nodes if node in undecided),
        only_together=paired.only_together + joint.only_together,
        rounds=paired.rounds + joint.rounds,
    )


def bisect(
    nodes: Sequence[str], test_round: TestRound, *, first: Sequence[Group] = (), limit: int | None = None
) -> Bisection:
    """Return the bad nodes of two or more distinct ones.

    first: the disjoint groups of the first round; by default one of all nodes. limit: of rounds, at least 1.
    """
    tested = list(first) or [tuple(nodes)]
    grouped = {node for group in tested for node in group}
    singles = [node for node in nodes if node not in grouped]
    parts = tested
    good, bad, ever_failed, rounds = set[str](), set[str](), list[Group](), 0
    while tested and rounds < (limit or max_rounds(len(nodes))):
        passed = dict(zip(tested, test_round(tested), strict=True))
        rounds += 1
        good.update(node for group, is_good in passed.items() if is_good for node in group)
        ever_failed += [group for group, is_good in passed.items() if not is_good]
        failed_with = _failed_with(ever_failed)
        bad.update(node for node in singles if node not in good and len(failed_with.get(node, set()) & good) > 1)
        failed = [half for half in parts if passed.get(half) is False]
        parts = [half for group in failed for half in _halves(group)]
        singles = [node for node in singles if node not in good and node not in bad]
        suspects = singles + [half[0] for half in parts if len(half) == 1]
        tested = [half for half in parts if len(half) > 1]
        tested += _pair(suspects, [node for node in nodes if node in good], failed_with)
        singles = suspects
    apart = {frozenset(group): group for group in ever_failed if good.issuperset(group)}
    undecided = {*singles, *(node for half in parts for node in half)}
    return Bisection(
        bad=tuple(node for node in nodes if node in bad),
        undecided=tuple(node for node in nodes if node in undecided),
        only_together=tuple(group for members, group in apart.items() if not any(members > other for other in apart)),
        rounds=rounds,
    )


def _halves(group: Group) -> list[Group]:
    middle = (len(group) + 1) // 2
    return [group[:middle], group[middle:]]


def _failed_with(failed: Sequence[Group]) -> dict[str, set[str]]:
    """Return for each node of a pair that failed those that it failed with."""
    others: dict[str, set[str]] = {}
    for one, other in (group for group in failed if len(group) == 2):
        others.setdefault(one, set()).add(other)
        others.setdefault(other, set()).add(one)
    return others


def _pair(suspects: Sequence[str], good: Sequence[str], failed_with: Mapping[str, set[str]]) -> list[Group]:
    """Pair each suspect with a good node, or else with another suspect, and with none that it failed with."""
    chosen: list[Group] = []
    left, free = list(suspects), list(good)
    for partners in (free, left):
        for node in suspects:
            partner = next((one for one in partners if one != node and one not in failed_with.get(node, ())), "")
            if node in left and partner:
                left.remove(node)
                partners.remove(partner)
                chosen.append((node, partner))
    return chosen
