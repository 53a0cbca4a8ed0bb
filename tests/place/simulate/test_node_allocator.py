"""Jobs on nodes, not only counted."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pitools.core.errors import ConfigError
from pitools.place.simulate import engine, metrics
from pitools.place.simulate.model import Scenario
from pitools.place.simulate.node_allocator import NodeAllocator
from pitools.topology.fabric_model import Fabric, Leaf, tree_fabric
from tests.place.simulate.small_scenario import scenario, trace


def fabric(*sizes: int) -> Fabric:
    """Leaves of so many nodes under one root; the names go across the leaves, as names do."""
    leaves = [
        (f"leaf{number}", [f"n{number + len(sizes) * index:03d}" for index in range(n)])
        for number, n in enumerate(sizes)
    ]
    return tree_fabric(Leaf(path=("root", name), nodes=tuple(nodes)) for name, nodes in leaves)


def world(wiring: Fabric, gpus: int, **more: object) -> Scenario:
    """One pool of nodes with 4 GPUs each."""
    plain = scenario(gpus, **more)
    pool = msgspec.structs.replace(plain.pools[0], fabric=wiring, gpus_per_node=4)
    return msgspec.structs.replace(plain, pools=(pool,))


def test_small_jobs_share_the_fullest_node_that_has_room() -> None:
    """Parts of nodes are filled up before a whole one is broken, and come back whole."""
    pool = world(fabric(2, 2), 16).pools[0]
    packing = NodeAllocator(pool, fabric(2, 2))
    for job, units in enumerate((3, 2, 1)):
        packing.allocate(job, units)
    nodes = [packing.held[job][1] for job in range(3)]
    assert nodes[0] == nodes[2] != nodes[1]
    assert packing.fits_now(8)
    assert not packing.fits_now(12)
    for job in range(3):
        packing.release(job)
    assert packing.fits_now(16)


@pytest.mark.parametrize(
    ("queues", "sizes", "started", "evicted"),
    [("snssu", (3, 3, 1, 1, 3), 4, 1), ("snssu", (3, 3, 1, 1, 4), 4, 2), ("nsnsu", (2, 2, 2, 2, 4), 500, 1)],
)
def test_what_is_preempted_makes_room_on_nodes(queues: str, sizes: tuple[int, ...], started: int, evicted: int) -> None:
    """Only jobs on the node that becomes free are evicted; none while a job on each node is not to be preempted."""
    jobs = trace(*((float(at), size, 500.0, 500.0) for at, size in enumerate(sizes)), queues=queues)
    rules = {"tiers": {"u": 1}, "preempts": {"u": frozenset("s")}}
    result = engine.simulate(jobs, world(fabric(2), 8, **rules), "federation")
    assert (result.start_s[4], len(result.spans.job) - len(jobs)) == (started, evicted)


def test_each_job_has_nodes_of_its_own() -> None:
    """Whatever was looked up before; of a job that leaves, one node may stay with another."""
    packing = NodeAllocator(world(fabric(2, 2), 16).pools[0], fabric(2, 2))
    assert packing.fits_now(12)
    packing.allocate(0, 8)
    packing.allocate(1, 8)
    first, second = packing.held[0][1], packing.held[1][1]
    assert (len(first), len(second), len({*first, *second})) == (2, 2, 4)
    packing.release(0)
    packing.release(1)
    packing.allocate(2, 12)
    assert (packing.transfer(2, -2), len(packing.held[-2][1])) == (4, 1)
    packing.release(2)
    assert packing.fits_now(12)
    assert not packing.fits_now(16)


def test_free_gpus_in_pieces_are_no_node() -> None:
    """A job of a whole node waits while every node is in part use, and starts when one is whole."""
    jobs = trace((0, 3, 100, 100), (0, 3, 50, 50), (1, 4, 10, 10))
    result = engine.simulate(jobs, world(fabric(2), 8), "federation")
    assert list(result.start_s) == [0, 0, 50]
    assert list(engine.simulate(jobs, scenario(10), "federation").start_s) == [0, 0, 1]


@pytest.mark.parametrize(("nodes", "leaves", "end_s"), [("choose", 1, 100.0), ("by-name", 2, 150.0)])
def test_leaves_slow_a_job_down(nodes: str, leaves: int, end_s: float) -> None:
    """Two nodes by name lie under two leaves and cost half as much again; chosen ones lie under one."""
    result = engine.simulate(
        trace((0, 8, 100, 100)), world(fabric(3, 3), 24, nodes=nodes, extra_leaf=0.5), "federation"
    )
    assert list(result.spans.leaves) == [leaves]
    assert list(result.end_s) == [end_s]
    assert metrics.summarize(result, trace((0, 8, 100, 100))).leaves == leaves


def test_what_is_slower_than_its_limit_holds_its_nodes_until_it_ends() -> None:
    """The reservation is for when it will end, 150, so that a job may run beside it until 140."""
    jobs = trace((0, 8, 100, 100), (1, 12, 10, 10), (110, 8, 20, 30))
    fleet = world(fabric(2, 2), 16, nodes="by-name", extra_leaf=0.5)
    assert list(engine.simulate(jobs, fleet, "federation").start_s) == [0, 150, 110]


JOBS = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=30)


@settings(max_examples=60, deadline=None)
@given(JOBS, st.booleans())
def test_nodes_are_never_held_twice(rows: list[tuple[int, int, int]], by_name: bool) -> None:
    """Whatever comes, each job runs once; nodes' GPUs are counted out and back exactly."""
    jobs = trace(*sorted((float(position), gpus, float(run), 2.0 * run) for position, gpus, run in rows))
    fleet = world(fabric(2, 3), 20, nodes="by-name" if by_name else "choose", extra_leaf=0.3)
    replay = engine.Simulator(jobs, fleet, "federation", "", 60.0, None, lambda _: None)
    result = replay.replay()
    assert sorted(result.spans.job) == list(range(len(jobs)))
    _, used = metrics.timeline(result)
    assert (used <= 20).all()
    packing = replay.schedulers[0].packing
    assert packing is not None
    assert not packing.held
    assert set(packing.free.values()) == {4}


def test_a_pool_is_whole_nodes_of_its_fabric() -> None:
    """GPUs that make no whole number of nodes, or more than there are, are refused."""
    for gpus in (6, 40):
        with pytest.raises(ConfigError, match="nodes of 4"):
            engine.simulate(trace((0, 1, 1, 1)), world(fabric(2, 2), gpus), "federation")


def test_leaves_without_a_common_root_are_two_clusters() -> None:
    """A job of three nodes starts when one leaf has them, and one of four, that no leaf has, is never queued."""
    apart = tree_fabric([Leaf(path=("x",), nodes=("n0", "n1", "n2")), Leaf(path=("y",), nodes=("n3", "n4", "n5"))])
    jobs = trace((0, 4, 50, 50), (0, 4, 80, 80), (0, 8, 60, 60), (1, 16, 1, 1), (2, 12, 1, 1))
    result = engine.simulate(jobs, world(apart, 24), "federation")
    assert [job for job, pool in enumerate(result.pool) if pool < 0] == [3]
    assert result.start_s[4] == 60
    assert metrics.summarize(result, jobs).unplaced == 1
