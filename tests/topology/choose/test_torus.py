"""The best free box of a torus, against every box there is."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise, product
from math import prod

import pytest

from pitools.core.errors import ClusterError, UsageError
from pitools.topology.choose import runner_up_cost, select_nodes
from pitools.topology.fabric_model import Fabric, Torus
from tests.topology.choose.brute_force import boxes

DIMS = [(7,), (2, 3), (4, 4), (5, 3), (2, 2, 2), (3, 4, 2), (4, 4, 4), (3, 2, 2, 2)]


def torus(dims: Sequence[int]) -> Fabric:
    """Nodes named by their place."""
    names = ("-".join(map(str, place)) for place in product(*map(range, dims)))
    return Fabric(kind="torus", torus=Torus(dims=tuple(dims), nodes=tuple(names)))


def places(names: Sequence[str]) -> list[tuple[int, ...]]:
    return [tuple(map(int, name.split("-"))) for name in names]


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_boxes_by_brute_force(dims: tuple[int, ...]) -> None:
    """No free box of k nodes costs less, wherever it begins; without one, a note says which larger one is taken."""
    fabric = torus(dims)
    for seed in range(25):
        rng = random.Random(seed)
        names = rng.sample(fabric.torus.nodes if fabric.torus else (), rng.randint(1, prod(dims)))
        free = set(places(names))
        k = rng.randint(1, min(len(names), 12))
        volume = next((v for v in range(k, len(names) + 1) if boxes(dims, free, v)), None)
        if volume is None:
            with pytest.raises(ClusterError, match=f"{k} nodes requested, .* no free box"):
                select_nodes(fabric, names, k)
            continue
        reference = boxes(dims, free, volume)
        choice = select_nodes(fabric, names, k)
        used = frozenset(places([*choice.nodes, *choice.spares]))
        assert reference[used] == choice.cost == min(reference.values())
        assert runner_up_cost(fabric, names, choice) == (sorted(reference.values())[1] if len(reference) > 1 else None)
        assert (len(choice.nodes), prod(choice.shape)) == (k, volume)
        assert bool(choice.warning) == (volume > k)
        inner = boxes(dims, set(used), k)
        assert not inner or frozenset(places(choice.nodes)) in inner


def test_ranks_follow_the_links() -> None:
    """Each rank of a box is beside the one before."""
    choice = select_nodes(torus((4, 4, 4)), [f"{a}-{b}-{c}" for a in range(4) for b in (3, 0) for c in range(4)], 32)
    assert choice.shape == (4, 2, 4)
    for first, second in pairwise(places(choice.nodes)):
        assert sum(min((a - b) % 4, (b - a) % 4) for a, b in zip(first, second, strict=True)) == 1


def test_spares_and_costs() -> None:
    """The box holds the spares too, and the active nodes are a box within it; cheap nodes are preferred."""
    fabric = torus((4, 4))
    names = list(fabric.torus.nodes) if fabric.torus else []
    choice = select_nodes(fabric, names, 6, spares=2)
    assert (len(choice.nodes), len(choice.spares), choice.shape) == (6, 2, (2, 4))
    risky = {name: 1.0 if name.startswith(("0", "1")) else 0.0 for name in names}
    assert {name[0] for name in select_nodes(fabric, risky, 8).nodes} == {"2", "3"}
    with pytest.raises(UsageError, match=r"^segment: "):
        select_nodes(fabric, names, 4, segment=2)
