"""In how many rounds of tests the bad nodes are found, against the promise of 2 ceil(log2 n) + 1 rounds.

perf/run node_bisect [--quick]

Every size to 64 nodes with each one and each two of its nodes bad; and 100 draws of up to an eighth bad of 256 to 4,096
nodes. Of each case the worst is taken. A node that is called bad and is not, or the reverse, ends the benchmark. A
round is of disjoint groups, tested at the same time: the tests of real ranks are in tests/cluster/test_node_bench.py.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Iterable, Sequence

from perf.harness.harness import Case, from_ratios, report
from perf.harness.workspace import arguments
from pitools.node.bench.bisect import Group, bisect, find_bad, max_rounds


def rounds(nodes: Sequence[str], bad: frozenset[str], *, by_pairs: bool) -> int:
    """Return how many rounds it takes to find exactly the bad nodes. Exits if others are found."""

    def test_round(groups: Sequence[Group]) -> list[bool]:
        return [bad.isdisjoint(group) for group in groups]

    found = find_bad(nodes, test_round, together=True) if by_pairs else bisect(nodes, test_round)
    if frozenset(found.bad) != bad or found.undecided or found.only_together:
        sys.exit(f"{len(nodes)} nodes, bad: {sorted(bad)}: {found}")
    return found.rounds


def case(name: str, trials: Iterable[tuple[list[str], frozenset[str]]], *, by_pairs: bool) -> Case:
    """Return the promised rounds over those needed, of the trial that comes nearest to them."""
    pairs = [(max_rounds(len(nodes)), rounds(nodes, bad, by_pairs=by_pairs)) for nodes, bad in trials]
    worst = max(needed for _, needed in pairs)
    way = "--bisect" if by_pairs else "halving alone"
    text = f"{name}, {way}: rounds promised ÷ needed, least of {len(pairs)} trials (most rounds: {worst})"
    return from_ratios(text, "promise", "", [min(promised / needed for promised, needed in pairs)], target=1.0)


def small(most: int, count: int) -> Iterable[tuple[list[str], frozenset[str]]]:
    """Yield all ways in which so many of each number of nodes are bad; fewer than half."""
    for size in range(2 * count + 1, most + 1):
        nodes = [f"n{number}" for number in range(size)]
        yield from ((nodes, frozenset(bad)) for bad in itertools.combinations(nodes, count))


def large(size: int, trials: int) -> Iterable[tuple[list[str], frozenset[str]]]:
    """Yield draws of up to an eighth of the nodes."""
    dice = random.Random(size)
    nodes = [f"n{number}" for number in range(size)]
    for _ in range(trials):
        yield nodes, frozenset(dice.sample(nodes, dice.randint(0, size // 8)))


def main() -> int:
    quick = arguments(__doc__).quick
    most, trials = (24, 3) if quick else (64, 100)
    cases = []
    for by_pairs in (True, False):
        cases += [case(f"{n} bad of {2 * n + 1} to {most}", small(most, n), by_pairs=by_pairs) for n in (1, 2)]
        cases += [
            case(f"up to {n // 8} bad of {n}", large(n, trials), by_pairs=by_pairs)
            for n in (256, 1024, 4096)[: 3 - quick]
        ]
    return report(cases)


if __name__ == "__main__":
    sys.exit(main())
