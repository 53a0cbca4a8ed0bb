"""The best nodes of a tree, against every choice there is."""

from __future__ import annotations

import random
from itertools import pairwise, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pitools.core.errors import ClusterError, UsageError
from pitools.topology.choose import CostWeights, NodeChoice, Objective, runner_up_cost, select_nodes
from pitools.topology.fabric_model import Fabric, Leaf
from tests.topology.choose.brute_force import Brute, Cost, forest, plainly

OBJECTIVES: tuple[Objective, ...] = ("pair", "ring", "level", "leaf")


def as_number(cost: Cost, fabric: Fabric, brute: Brute, objective: str) -> float:
    """What `cost` is in a Choice, but for the terms of level and leaf, which only decide between equals."""
    if objective in ("pair", "ring"):
        return cost[0]
    position = [0] * (max(brute.height.values()) + 1)
    for height in brute.height.values():
        position[height] += 1
    tens = [10.0 ** len(str(count)) for count in position]
    weights = [1.0]
    if objective == "level":
        for ten in tens[:-1]:
            weights.append(weights[-1] * ten)
        height, *used = cost[:-1]
        return height * weights[-1] + sum(w * x for w, x in zip(reversed(weights), used, strict=True))
    for ten in reversed(tens[1:]):
        weights.append(weights[-1] * ten)
    return sum(w * x for w, x in zip(reversed(weights), cost[:-1], strict=True))


def judge(fabric: Fabric, rng: random.Random, objective: Objective) -> bool:
    """Whether the choice from random free nodes is as good as brute force's; True where there is one to be made."""
    names = [node for leaf in fabric.leaves for node in leaf.nodes]
    free = rng.sample(names, rng.randint(1, len(names)))
    plain = rng.random() < 0.4
    costs = {node: 0.0 if plain else rng.choice((0.0, 0.25, 1.0, rng.random())) for node in free}
    terms = CostWeights(broken_leaf=0.0 if plain else rng.choice((0.0, 0.5, 3.0)))
    k = rng.randint(1, min(len(free), 6))
    brute = Brute(fabric, costs)
    best = brute.best_two(k, objective, terms.broken_leaf)
    arguments = free if plain else costs
    if not best:
        with pytest.raises(ClusterError):
            select_nodes(fabric, arguments, k, objective=objective, weights=terms)
        return False
    choice = select_nodes(fabric, arguments, k, objective=objective, weights=terms)
    cost = brute.cost(choice.nodes, objective, terms.broken_leaf)
    assert cost == pytest.approx(best[0], rel=1e-9, abs=1e-6), (fabric, costs, k)
    assert len(choice.nodes) == len(set(choice.nodes)) == k
    assert choice.per_leaf == dict(brute.counts(choice.nodes))
    assert choice.leaves == len(choice.per_leaf)
    number = as_number(best[0], fabric, brute, objective)
    assert int(choice.cost + 1e-6) == number if objective in ("level", "leaf") else choice.cost == pytest.approx(number)
    second = runner_up_cost(fabric, arguments, choice, weights=terms)
    if len(best) < 2:
        assert second is None
    else:
        number = as_number(best[1], fabric, brute, objective)
        assert second is not None
        assert second >= choice.cost - 1e-6
        assert int(second + 1e-6) == number if objective in ("level", "leaf") else second == pytest.approx(number)
    return True


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_thousand_trees_by_brute_force(objective: Objective) -> None:
    """No choice of nodes costs less, nor any with other counts per leaf less than what is called the next."""
    created = sum(judge(forest(random.Random(seed)), random.Random(seed + 1), objective) for seed in range(1000))
    assert created == 1000


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_unconnected_roots_are_never_spanned(objective: Objective) -> None:
    """With several roots the best is still found, below one of them; where none has room, it says so."""
    created = [
        judge(forest(random.Random(seed), roots=3), random.Random(seed + 1), objective) for seed in range(2000, 2150)
    ]
    assert 20 < sum(created) < len(created)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_larger_trees_by_plain_recursion(objective: Objective) -> None:
    """Hundreds of nodes, in leaves small and large, at uneven depths: it costs what plain recursion finds."""
    for seed in range(4):
        rng = random.Random(seed)
        leaves, number = [], 0
        for pod in range(rng.randint(1, 4)):
            for leaf in range(rng.randint(1, 14)):
                size = rng.choice((1, 4, 8, 8, 8, 16, 40))
                above = ("core",) if rng.random() < 0.1 else ("core", f"p{pod}")
                names = tuple(f"n{place}" for place in range(number, number + size))
                leaves.append(Leaf(path=(*above, f"p{pod}l{leaf}"), nodes=names))
                number += size
        lengths = {f"p{pod}": float(rng.randint(1, 4)) for pod in range(4)}
        fabric = Fabric(leaves=tuple(leaves), lengths=lengths)
        free = set(rng.sample([f"n{place}" for place in range(number)], round(number * rng.uniform(0.3, 1))))
        k = rng.randint(1, min(len(free), 90))
        choice = select_nodes(fabric, free, k, objective=objective)
        cost = Brute(fabric, dict.fromkeys(free, 0.0)).cost(choice.nodes, objective)
        assert cost is not None
        best = plainly(fabric, free, k, objective)
        assert cost[: len(best)] == pytest.approx(best)


def test_ring_is_the_shortest_round_trip() -> None:
    """What ring costs is the least of all cyclic orders, and the nodes come in such an order."""
    for seed in range(60):
        rng = random.Random(seed)
        fabric = forest(rng)
        names = [node for leaf in fabric.leaves for node in leaf.nodes]
        k = min(6, len(names))
        choice = select_nodes(fabric, names, k, objective="ring")
        brute = Brute(fabric, dict.fromkeys(names, 0.0))
        paths = {node: brute.path[node] for node in choice.nodes}

        def tour(nodes: tuple[str, ...], paths: dict[str, tuple[str, ...]] = paths, brute: Brute = brute) -> float:
            return sum(brute._apart(paths[a], paths[b]) for a, b in pairwise((*nodes, nodes[0])))

        assert tour(choice.nodes) == pytest.approx(choice.cost)
        first, *others = choice.nodes
        assert min(tour((first, *order)) for order in permutations(others)) == pytest.approx(choice.cost)


def even(pods: int, leaves: int, size: int) -> Fabric:
    """Pods of leaves of nodes n0, n1 …, one core above."""
    created = [
        Leaf(
            path=("core", f"p{pod}", f"p{pod}l{leaf}"),
            nodes=tuple(f"n{(pod * leaves + leaf) * size + place}" for place in range(size)),
        )
        for pod in range(pods)
        for leaf in range(leaves)
    ]
    return Fabric(leaves=tuple(created))


@settings(max_examples=60, deadline=None)
@given(st.sets(st.integers(0, 47), min_size=9), st.integers(1, 6), st.integers(0, 3), st.sampled_from(OBJECTIVES))
def test_spares_keep_both_optimal(free: set[int], k: int, spares: int, objective: Objective) -> None:
    """All nodes and spares cost what the best so many cost; the active ones what the best k of them cost."""
    fabric, names = even(3, 4, 4), [f"n{number}" for number in sorted(free)]
    selection = select_nodes(fabric, names, k, objective=objective, spares=spares)
    every = (*selection.nodes, *selection.spares)
    assert (len(selection.nodes), len(selection.spares), len(set(every))) == (k, spares, k + spares)
    assert selection.cost == select_nodes(fabric, names, k + spares, objective=objective).cost
    alone = Brute(fabric, dict.fromkeys(every, 0.0))
    assert alone.cost(selection.nodes, objective) == pytest.approx(alone.best_two(k, objective)[0])


def test_equals_use_up_leaves() -> None:
    """Of choices that cost the same, one that leaves no leaf in part; else the one that leaves the least over."""
    fabric = even(1, 4, 8)
    free = [f"n{number}" for number in (*range(3), *range(8, 13), *range(16, 22), *range(24, 31))]
    assert select_nodes(fabric, free, 5).per_leaf == {"p0l1": 5}
    assert select_nodes(fabric, free, 4).per_leaf == {"p0l1": 4}
    assert select_nodes(fabric, free, 9).per_leaf == {"p0l0": 3, "p0l2": 6}
    assert select_nodes(fabric, free, 5) == select_nodes(fabric, list(reversed(free)), 5)


def test_equal_pods_are_spared_by_size() -> None:
    """Of pods that cost the same, the one with the fewest free nodes is taken."""
    fabric = even(3, 3, 4)
    free = [f"n{number}" for number in (*range(12), *range(12, 20), *range(24, 36))]
    assert select_nodes(fabric, free, 8).per_leaf == {"p1l0": 4, "p1l1": 4}


def test_a_term_keeps_whole_leaves_whole() -> None:
    """A leaf that was wholly free is not broken where that costs more than another link."""
    fabric = even(1, 3, 4)
    free = ["n0", "n1", "n2", "n4", "n5", "n8", "n9", "n10", "n11"]
    assert select_nodes(fabric, free, 3, objective="ring").per_leaf == {"p0l0": 3}
    free.remove("n0")
    assert select_nodes(fabric, free, 3, objective="ring").per_leaf == {"p0l2": 3}
    selection = select_nodes(fabric, free, 3, objective="ring", weights=CostWeights(broken_leaf=9.0))
    assert selection.per_leaf == {"p0l0": 2, "p0l1": 1}
    assert (selection.cost, selection.extra_cost) == (4.0, 0.0)


def test_costs_of_nodes_choose_within_and_among_leaves() -> None:
    """A node at risk is passed over; one whose cost is infinite is never taken."""
    fabric = even(1, 2, 4)
    free = {f"n{number}": 0.0 for number in range(8)} | {"n1": 5.0, "n6": 0.5, "n7": float("inf")}
    assert select_nodes(fabric, free, 3).nodes == ("n0", "n2", "n3")
    assert select_nodes(fabric, free, 3, objective="ring").extra_cost == 0
    with pytest.raises(ClusterError, match=r"8 nodes requested, 7 free on this fabric \(1 "):
        select_nodes(fabric, free, 8)
    for bad in (-1.0, float("nan"), 1e308):
        with pytest.raises(UsageError, match='cost of node "n3"'):
            select_nodes(fabric, {**free, "n3": bad}, 3)


def test_nodes_it_does_not_know_are_not_chosen() -> None:
    """Except on a flat fabric: there by cost, then by name."""
    fabric = even(1, 2, 2)
    assert select_nodes(fabric, ["x1", "n0", "n3"], 2).nodes == ("n0", "n3")
    with pytest.raises(ClusterError, match="3 nodes requested, 2 free on this fabric"):
        select_nodes(fabric, ["x1", "n0", "n3"], 3)
    flat = select_nodes(Fabric(), {"x10": 0.0, "x9": 0.0, "x2": 1.0}, 2, spares=1)
    assert (flat.nodes, flat.spares, flat.objective) == (("x9", "x10"), ("x2",), "flat")
    with pytest.raises(ClusterError, match="4 nodes requested, 3 free"):
        select_nodes(Fabric(), ["a", "b", "c"], 4)


def test_slurms_subtree_spares_the_large_ones() -> None:
    """Of the lowest switches with room, only the one with the fewest free nodes is looked at."""
    fabric = even(3, 4, 4)
    free = [f"n{number}" for number in (*range(16), *range(16, 20), 20, 24, 28, *range(32, 44))]
    assert select_nodes(fabric, free, 5).per_leaf.keys() == {
        "p1l0",
        "p1l1",
    }  # a leaf used up, another of which one was left
    like = select_nodes(fabric, free, 8, slurms_subtree=True)
    assert set(like.per_leaf) <= {"p2l0", "p2l1", "p2l2"}
    assert select_nodes(fabric, free, 14, slurms_subtree=True).pods == 1
    second = runner_up_cost(fabric, free, like, slurms_subtree=True)
    assert second == like.cost  # two leaves of three: the other pair
    assert select_nodes(fabric, free, 20, slurms_subtree=True) == select_nodes(fabric, free, 20)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("sizes", [(2,), (2, 4), (2, 4, 16), (3, 6)])
def test_segments_of_blocks_by_brute_force(objective: Objective, sizes: tuple[int, ...]) -> None:
    """Each segment is within one base block, aggregates count as the tree above, and no other choice is better."""
    for seed in range(25):
        rng = random.Random(seed)
        names = [f"n{number}" for number in rng.sample(range(99), 12)]
        size = rng.choice((3, 4)) if sizes[0] == 3 else rng.choice((2, 3, 4))
        blocks = [names[start : start + size] for start in range(0, 12, size)]
        fabric = Fabric(
            leaves=tuple(Leaf(path=(f"b{i}",), nodes=tuple(block)) for i, block in enumerate(blocks)),
            kind="block",
            block_sizes=sizes,
        )
        paths = {
            node: ("all", *(f"{size}.{i * sizes[0] // size}" for size in reversed(sizes[1:])), f"b{i}")
            for i, block in enumerate(blocks)
            for node in block
        }
        free = rng.sample(names, rng.randint(6, 12))
        segment = rng.choice((1, 2, 3))
        k = segment * rng.randint(1, 6 // segment)
        brute = Brute(fabric, dict.fromkeys(free, 0.0), paths=paths)
        best = brute.best_two(k, objective, segment=segment)
        if not best:
            with pytest.raises(ClusterError, match="in whole segments"):
                select_nodes(fabric, free, k, objective=objective, segment=segment)
            continue
        choice = select_nodes(fabric, free, k, objective=objective, segment=segment)
        assert all(count % segment == 0 for count in choice.per_leaf.values())
        assert brute.cost(choice.nodes, objective) == pytest.approx(best[0])
        second = runner_up_cost(fabric, free, choice)
        expected = as_number(best[1], fabric, brute, objective) if len(best) > 1 else None
        assert second == (expected if expected is None else pytest.approx(expected))


@pytest.mark.parametrize(
    ("asked", "what"),
    [
        ({"k": 10, "segment": 4}, "nodes: 10 .* segment 4"),
        ({"k": 8, "segment": 4, "spares": 2}, "spares: 2 .* segment 4"),
        ({"k": 0}, "0 nodes, 0 spares"),
        ({"k": 2, "objective": "best"}, 'objective: .*"best"'),
    ],
)
def test_a_wrong_question_is_refused(asked: dict[str, object], what: str) -> None:
    """It says which number is wrong."""
    with pytest.raises(UsageError, match=what):
        select_nodes(even(1, 2, 8), [f"n{number}" for number in range(16)], **asked)  # type: ignore[arg-type]


def test_a_switch_may_have_nodes_of_its_own() -> None:
    """Nodes right under a switch that has others below are a leaf beside them."""
    fabric = Fabric(
        leaves=(
            Leaf(path=("a",), nodes=("n1", "n2")),
            Leaf(path=("a", "b"), nodes=("n3", "n4")),
            Leaf(path=("c",), nodes=("n5", "n6", "n7", "n8")),
        )
    )
    assert select_nodes(fabric, [f"n{number}" for number in range(1, 8)], 4).nodes == ("n1", "n2", "n3", "n4")
    assert select_nodes(fabric, [f"n{number}" for number in range(1, 9)], 3).per_leaf == {"c": 3}


def test_a_choice_is_a_record() -> None:
    """Its numbers are those of its nodes."""
    choice = select_nodes(even(2, 2, 2), [f"n{number}" for number in range(8)], 3)
    assert choice == NodeChoice(
        nodes=("n0", "n1", "n2"),
        objective="level",
        cost=102.0,
        height=1,
        pods=1,
        leaves=2,
        ring_hops=4,
        per_leaf={"p0l0": 2, "p0l1": 1},
        free=8,
    )
