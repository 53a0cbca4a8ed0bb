"""The rank order: no order of the same nodes goes through fewer links."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise, permutations, product
from math import prod
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pitools.site.connect import client
from pitools.site.load import load_site
from pitools.slurm.records import Switch
from pitools.slurm.states import is_final
from pitools.topology import discover
from pitools.topology.fabric_model import Fabric, Torus, from_switches, natural_sort_key
from pitools.topology.rank_order import rank_order
from pitools.topology.ring_cost import min_ring_hops, ring_hops
from pitools.topology.torus_order import torus_order

Pit = Callable[..., subprocess.CompletedProcess[str]]
SHAPES = st.recursive(st.integers(1, 4), lambda below: st.lists(below, min_size=1, max_size=4), max_leaves=10)


def forest(roots: list[object], seed: int) -> Fabric:
    """Trees of these shapes, a number being a leaf of so many nodes; node names say nothing of where nodes are."""
    names = random.Random(seed).sample([f"n{number}" for number in range(999)], 400)
    switches: list[Switch] = []

    def grow(shape: object) -> str:
        name = f"s{len(switches)}"
        switches.append(Switch(switch=name, level=0, node_list=""))
        count = len(switches) - 1
        if isinstance(shape, int):
            nodes = ",".join(names.pop() for _ in range(shape))
            switches[count] = Switch(switch=name, level=0, node_list=nodes)
        else:
            below = ",".join([grow(part) for part in shape])  # type: ignore[attr-defined]
            switches[count] = Switch(switch=name, level=1, node_list="", switches=below)
        return name

    for root in roots:
        grow(root)
    return from_switches(switches)


FORESTS = st.builds(forest, st.lists(SHAPES, min_size=1, max_size=2), st.integers(0, 99))


def drawn(fabric: Fabric, data: st.DataObject, most: int) -> list[str]:
    """Some nodes of a fabric."""
    nodes = [node for leaf in fabric.leaves for node in leaf.nodes]
    return data.draw(st.lists(st.sampled_from(nodes), min_size=1, max_size=most, unique=True))


@settings(max_examples=60, deadline=None)
@given(FORESTS, st.data())
def test_no_permutation_is_better(fabric: Fabric, data: st.DataObject) -> None:
    """Of six nodes, every ring there is goes through as many links or more."""
    chosen = drawn(fabric, data, 6)
    ours = ring_hops([slot.node for slot in rank_order(chosen, fabric)], fabric)
    first, *rest = chosen
    assert (
        ours
        == min(ring_hops([first, *permutation], fabric) for permutation in permutations(rest))
        == min_ring_hops(chosen, fabric)
    )


@settings(max_examples=200, deadline=None)
@given(FORESTS, st.integers(1, 5), st.data())
def test_the_least_there_can_be(fabric: Fabric, group: int, data: st.DataObject) -> None:
    """Each used link out and back once, whatever is kept together, and never more than in order of name."""
    chosen = drawn(fabric, data, 40)
    ours = [slot.node for slot in rank_order(chosen, fabric, group)]
    assert sorted(ours) == sorted(chosen)
    assert (
        ring_hops(ours, fabric)
        == min_ring_hops(chosen, fabric)
        <= ring_hops(sorted(chosen, key=natural_sort_key), fabric)
    )


def test_heavy_pods_come_first() -> None:
    """The pod with more of the nodes leads, and so does the fuller leaf in it; equals stay as the fabric has them."""
    fabric = forest([[[1, 2], [2, 3], [3, 2]]], 1)
    every = [node for leaf in fabric.leaves for node in leaf.nodes]
    assert [slot.path[1] for slot in rank_order(every, fabric)] == ["s4"] * 5 + ["s7"] * 5 + ["s1"] * 3
    sizes = [len(list(leaf)) for leaf in grouped(rank_order(every, fabric))]
    assert sizes == [3, 2, 3, 2, 2, 1]


def grouped(slots: list[object]) -> list[list[object]]:
    """Runs of one leaf."""
    runs: list[list[object]] = []
    for slot in slots:
        if runs and runs[-1][-1].path == slot.path:  # type: ignore[attr-defined]
            runs[-1].append(slot)
        else:
            runs.append([slot])
    return runs


def test_groups_span_leaves_only_where_they_must() -> None:
    """Leaves of 3, 2, 3 and 4 nodes in groups of two: one group spans two leaves, and in order of size two would."""
    fabric = forest([[3, 2, 3, 4]], 2)
    every = [node for leaf in fabric.leaves for node in leaf.nodes]
    slots = rank_order(every, fabric, 2)
    assert sum(a.leaf != b.leaf for a, b in zip(slots[::2], slots[1::2], strict=True)) == 1


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.data())
def test_a_torus_is_walked_from_neighbour_to_neighbour(dims: list[int], data: st.DataObject) -> None:
    """Over any box, across the edge of the grid too; and back to where it began if one side of it is even."""
    torus = Torus(dims=tuple(dims), nodes=tuple(f"n{number}" for number in range(prod(dims))))
    sides = [data.draw(st.integers(1, size)) for size in dims]
    corner = [data.draw(st.integers(0, size - 1)) for size in dims]
    position = dict(zip(product(*map(range, dims)), torus.nodes, strict=True))
    box = [
        position[tuple((a + b) % size for a, b, size in zip(corner, cell, dims, strict=True))]
        for cell in product(*map(range, sides))
    ]
    way = torus_order(box, torus)
    assert sorted(way) == sorted(box)
    fabric = Fabric(kind="torus", torus=torus)
    hops = [ring_hops([a, b], fabric) // 2 for a, b in pairwise(way)]
    assert all(hop == 1 for hop in hops)
    if any(side % 2 == 0 and prod(sides) > side for side in sides):
        assert ring_hops(way, fabric) == len(box)
    assert [slot.node for slot in rank_order(box, fabric)] == way


def test_a_torus_with_holes_keeps_every_node() -> None:
    """Nodes that are no box are all there, and a node of no torus comes last."""
    torus = Torus(dims=(3, 3), nodes=tuple("abcdefghi"))
    assert [slot.node for slot in rank_order("aegx", Fabric(kind="torus", torus=torus))] == ["a", "e", "g", "x"]
    assert torus_order([], torus) == []


SCRIPT = """#!/bin/bash
#SBATCH --output=/dev/null --nodes=4 --ntasks-per-node=1 --time=2 --job-name=test-order
cd {folder}
scontrol show hostnames "$SLURM_JOB_NODELIST" > list
say='echo $SLURM_PROCID $SLURMD_NODENAME'
srun -n4 bash -c "$say" | sort -n > slurm
{python} -m pitools topology order --as hostfile - < list > hosts
SLURM_HOSTFILE=hosts srun --distribution=arbitrary -n4 bash -c "$say" | sort -n > ours
touch done
"""


@pytest.mark.slurm
def test_against_slurms_own_order(clusters: Path, repo: Path) -> None:
    """On a real Slurm: tasks run as our host file says, through half the links of Slurm's own order."""
    site = load_site("alpha")
    slurm = client(site)
    folder = Path(f"/var/tmp/pit-test-order-{time.time_ns()}")
    folder.mkdir()
    script = SCRIPT.format(folder=folder, python=f"env PYTHONPATH={repo} {sys.executable}")
    job = slurm.submit(script, args=["--account=lab", "--nodelist=alpha[01-04]"]).job_id
    try:
        until = time.monotonic() + 60
        while not (folder / "done").exists() and time.monotonic() < until:
            if is_final(slurm.state_of([job])[job]):
                break
            time.sleep(0.2)
        ran = {
            name: [line.split()[1] for line in (folder / name).read_text().splitlines()] for name in ("slurm", "ours")
        }
        hosts = (folder / "hosts").read_text().split()
    finally:
        slurm.cancel([job])
        shutil.rmtree(folder)
    fabric = discover.fabric_of_site(site, slurm)
    assert ran["ours"] == hosts == [slot.node for slot in rank_order(hosts, fabric)]
    assert ring_hops(hosts, fabric) == min_ring_hops(hosts, fabric) == ring_hops(ran["slurm"], fabric) / 2
