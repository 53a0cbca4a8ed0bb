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


def bisect(
    nodes: Sequence[str], test_round: TestRound, *, first: Sequence[Group] = (), limit: int | None = None
) -> Bisection:
    """Return the bad nodes of two or more distinct ones.

    first: the disjoint groups of the first round; by default one of all nodes. limit: of rounds, at least 1.
    """
    first = first or [tuple(nodes)]
    failed = [group for group, passed in zip(first, test_round(first), strict=True) if not passed]
    grouped = {node for group in first for node in group}
    good = grouped.difference(*failed)
    bad, ever_failed = set[str](), list(failed)
    singles = [node for node in nodes if node not in grouped]
    rounds = 1
    while (failed or singles) and rounds < (limit or max_rounds(len(nodes))):
        parts = [half for group in failed for half in _halves(group)]
        singles += [half[0] for half in parts if len(half) == 1]
        partner_of = _choose_partners(singles, [node for node in nodes if node in good], _failed_with(ever_failed))
        tested = [half for half in parts if len(half) > 1]
        tested += list(partner_of.items())
        tested += _pair_anew([node for node in singles if node not in partner_of], _failed_with(ever_failed))
        if not tested:
            break
        passed = dict(zip(tested, test_round(tested), strict=True))
        rounds += 1
        good.update(node for group, is_good in passed.items() if is_good for node in group)
        ever_failed += [group for group, is_good in passed.items() if not is_good]
        failed_with = _failed_with(ever_failed)
        bad.update(node for node in singles if node not in good and len(failed_with.get(node, set()) & good) > 1)
        singles = [node for node in singles if node not in good and node not in bad]
        failed = [half for half in parts if passed.get(half) is False]
    apart = {frozenset(group): group for group in ever_failed if good.issuperset(group)}
    return Bisection(
        bad=tuple(node for node in nodes if node in bad),
        undecided=tuple(node for node in nodes if node in singles or any(node in group for group in failed)),
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


def _choose_partners(
    suspects: Sequence[str], good: Sequence[str], failed_with: Mapping[str, set[str]]
) -> dict[str, str]:
    """Return a partner of its own for each suspect that can have one, and none that it failed with."""
    free, chosen = list(good), dict[str, str]()
    for node in suspects:
        if partner := next((one for one in free if one not in failed_with.get(node, ())), ""):
            free.remove(partner)
            chosen[node] = partner
    return chosen


def _pair_anew(suspects: Sequence[str], failed_with: Mapping[str, set[str]]) -> list[Group]:
    """Pair suspects with each other as in a round of a tournament, the one with most pairs that have not failed yet."""
    circle = [*suspects, *[""] * (len(suspects) % 2)]
    half = len(circle) // 2
    best: list[Group] = []
    for _ in circle[1:]:
        met = zip(circle[:half], reversed(circle[half:]), strict=True)
        new: list[Group] = [pair for pair in met if all(pair) and pair[1] not in failed_with.get(pair[0], ())]
        best = max(best, new, key=len)
        circle.insert(1, circle.pop())
    return best
