"""Tiers are those of the sites' QOS."""

from __future__ import annotations

import pytest

from pitools.capacity.today import with_tiers, without_shared_nodes
from pitools.core.errors import ConfigError
from pitools.place.simulate.model import Scenario, SimPool
from pitools.slurm.records import Partition, Qos

TODAY = Scenario(name="today", pools=(SimPool(pool="a", gpus=8),))


def test_qos_become_tiers_by_priority_and_by_whom_they_preempt() -> None:
    """One that preempts is above its equals; of two sites' priorities the higher counts; without QOS, no tiers."""
    qos = [
        Qos(qos="normal", priority=10),
        Qos(qos="scavenger"),
        Qos(qos="long", priority=10),
        Qos(qos="urgent", priority=10, preempt=("scavenger", "normal", "of-another-cluster")),
        Qos(qos="long", priority=20),
    ]
    world = with_tiers(TODAY, qos)
    assert world.tiers == {"scavenger": 0, "normal": 1, "urgent": 2, "long": 3}
    assert world.preempts == {"urgent": {"scavenger", "normal"}}
    assert with_tiers(TODAY, []) == TODAY


def test_a_qos_preempts_those_that_it_names() -> None:
    """Another QOS of the same priority is not among them."""
    world = with_tiers(TODAY, [Qos(qos="urgent", preempt=("scavenger",)), Qos(qos="scavenger"), Qos(qos="normal")])
    assert (world.tiers, world.preempts) == (
        {"urgent": 1, "scavenger": 0, "normal": 0},
        {"urgent": {"scavenger"}},
    )


def test_equals_stay_equal_whatever_they_preempt() -> None:
    """Neither their names nor a QOS of another cluster rank them; one of higher priority stays above them."""
    low = [Qos(qos=name, priority=1) for name in ("low", "mid")]
    first, second = (Qos(qos=f"u{each[0].upper()}", priority=10, preempt=(each,)) for each in ("low", "mid"))
    alone = Qos(qos="alone", priority=10, preempt=("elsewhere",))
    top = Qos(qos="top", priority=20)
    assert with_tiers(TODAY, [*low, first, second, alone, top]).tiers == {
        "low": 0, "mid": 0, "uL": 1, "uM": 1, "alone": 1, "top": 2
    }  # fmt: skip


def test_nodes_of_several_partitions_are_counted_once() -> None:
    """A partition within larger ones is no pool of its own; one that shares only a part is an error."""
    world = Scenario(name="x", pools=tuple(SimPool(pool=f"s/{name}", gpus=8) for name in ("debug", "all", "far")))
    parts = [
        Partition(partition=name, state="UP", node_list=nodes)
        for name, nodes in (
            ("debug", "n[1-2]"),
            ("all", "n[1-8]"),
            ("far", "m1"),
            ("empty", "(null)"),
            ("not-in-the-file", "n[1-9]"),
        )
    ]
    assert [pool.pool for pool in without_shared_nodes(world, "s", parts).pools] == ["s/all", "s/far"]
    with pytest.raises(ConfigError, match="shares some nodes"):
        without_shared_nodes(world, "s", [*parts[:2], Partition(partition="far", state="UP", node_list="n[8-9]")])


def test_qos_that_preempt_each_other_are_an_error() -> None:
    """Jobs would take each other's places without end."""
    with pytest.raises(ConfigError, match="preempt each other"):
        with_tiers(TODAY, [Qos(qos="a", preempt=("b",)), Qos(qos="b", preempt=("a",))])
