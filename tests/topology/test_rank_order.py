"""Rank order over a switch tree."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pitools.core.errors import DataError
from pitools.slurm.records import Block, Switch
from pitools.topology.fabric_model import Fabric, from_blocks, from_switches, natural_sort_key
from pitools.topology.rank_order import rank_order

Pit = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def write_conf(tmp_path: Path) -> Path:
    """A slurm.conf whose controller is not there."""
    path = tmp_path / "slurm.conf"
    path.write_text(
        "ClusterName=none\nSlurmctldHost=localhost(127.0.0.1)\nSlurmctldPort=19\nMessageTimeout=5\n"
        "AuthType=auth/none\nCredType=cred/none\nNodeName=n1\nPartitionName=p Nodes=n1\n"
    )
    return path


def tree(fanout: list[list[int]]) -> Fabric:
    """Pods of leaves of so many nodes, node names dealt out at random so that they say nothing of the tree."""
    total = sum(sum(pod) for pod in fanout)
    names = [f"n{number:03d}" for number in random.Random(total).sample(range(1000), total)]
    switches, pods = [], []
    for pod, leaves in enumerate(fanout):
        held = []
        for leaf, size in enumerate(leaves):
            own_part, names = names[:size], names[size:]
            held.append(f"leaf{pod}x{leaf}")
            switches.append(Switch(switch=held[-1], level=0, node_list=",".join(own_part)))
        pods.append(f"pod{pod}")
        switches.append(Switch(switch=pods[-1], level=1, node_list="", switches=",".join(held)))
    switches.append(Switch(switch="core", level=2, node_list="", switches=",".join(pods)))
    return from_switches(random.Random(1).sample(switches, len(switches)))


FANOUTS = st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=4)


@given(FANOUTS, st.data())
def test_every_subtree_is_one_run_of_ranks(fanout: list[list[int]], data: st.DataObject) -> None:
    """Whatever nodes are chosen, each switch's nodes are consecutive: a ring crosses its uplink twice at most."""
    fabric = tree(fanout)
    nodes = [node for leaf in fabric.leaves for node in leaf.nodes]
    assert len(set(nodes)) == len(nodes) == sum(map(sum, fanout))  # every node is under one leaf
    chosen = data.draw(st.lists(st.sampled_from(nodes), min_size=1, unique=True))
    slots = rank_order(chosen, fabric)
    assert sorted(slot.node for slot in slots) == sorted(chosen)
    assert all(len(slot.path) == 3 for slot in slots)
    for depth in range(3):
        position = [slot.path[: depth + 1] for slot in slots]
        changes = sum(a != b for a, b in pairwise(position))
        assert changes == len(set(position)) - 1


def test_nodes_the_fabric_does_not_know_come_last() -> None:
    """They keep their natural order, and name no leaf."""
    fabric = from_switches([Switch(switch="s", level=0, node_list="n[1-2]")])
    assert [(s.node, s.leaf) for s in rank_order(["x10", "n2", "x9", "n1"], fabric)] == [
        ("n1", "s"),
        ("n2", "s"),
        ("x9", ""),
        ("x10", ""),
    ]


def test_a_flat_network_is_name_order() -> None:
    """Without a topology, ranks follow names as people count."""
    assert [slot.node for slot in rank_order(["n10", "n9", "n1"], Fabric(leaves=()))] == ["n1", "n9", "n10"]


def test_blocks_follow_their_index() -> None:
    """Base blocks stand in Slurm's order; aggregated ones are not leaves."""
    blocks = [
        Block(block="b2", index=1, node_list="n[3-4]", size=2),
        Block(block="b[1-2]", index=2, node_list="n[1-4]", size=4, is_aggregated=True),
        Block(block="b1", index=0, node_list="n[1-2]", size=2),
    ]
    assert [slot.leaf for slot in rank_order(["n4", "n1"], from_blocks(blocks))] == ["b1", "b2"]


def test_separate_trees_stay_apart() -> None:
    """Two roots that nothing connects are two runs of ranks."""
    fabric = from_switches(
        [Switch(switch="b", level=0, node_list="n[1,3]"), Switch(switch="a", level=0, node_list="n[2,4]")]
    )
    assert [slot.node for slot in rank_order(["n1", "n2", "n3", "n4"], fabric)] == ["n2", "n4", "n1", "n3"]


def leaf(name: str, nodes: str = "", switches: str = "") -> Switch:
    return Switch(switch=name, level=0 if nodes else 1, node_list=nodes, switches=switches)


@pytest.mark.parametrize(
    ("switches", "what"),
    [
        ([leaf("a", switches="b"), leaf("b", switches="a")], "below itself"),
        ([leaf("a", "n1"), leaf("b", "n1")], 'under "a" and "b"'),
    ],
)
def test_an_impossible_fabric_is_refused(switches: list[Switch], what: str) -> None:
    """A cycle, or a node under two leaves, is data that is not what it claims."""
    with pytest.raises(DataError, match=what):
        from_switches(switches)


def test_natural_order_counts() -> None:
    """Digits compare as numbers, wherever they stand."""
    assert sorted(["r2n10", "r10n1", "r2n9"], key=natural_sort_key) == ["r2n9", "r2n10", "r10n1"]


def test_orders_pipe_into_each_other(pit: Pit, write_conf: Path) -> None:
    """Records with a node are read like lists, `hosts` keeps the order, and a fabric out of reach stops no job."""
    lines = '{"node":"n2"}\nn10,n9\n'
    done = pit("topology", "order", "-", "--as", "hostfile", "--gpus", "2", stdin=lines, SLURM_CONF=str(write_conf))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["n2", "n2", "n9", "n9", "n10", "n10"]
    assert "ordered by node name" in done.stderr
    done = pit("topology", "order", "-", stdin='{"nodes":3}\n', SLURM_CONF=str(write_conf))
    assert done.returncode == 2


@pytest.mark.slurm
def test_hosts_keep_their_order(clusters: Path, pit: Pit) -> None:
    """`--format hosts` of an order is not sorted by folding."""
    done = pit("topology", "order", "alpha[01-04]", "--site", "alpha", "--format", "hosts")
    assert done.stdout == "alpha01,alpha03,alpha02,alpha04\n"


def test_groups_stay_below_a_switch() -> None:
    """With groups of 4, switches that hold whole groups come first: one group is over two switches, and not two."""
    sizes = {"a": 6, "b": 4, "c": 2}
    fabric = from_switches([leaf(name, ",".join(f"{name}{i}" for i in range(size))) for name, size in sizes.items()])
    ranks = [slot.leaf for slot in rank_order([node for leaf in fabric.leaves for node in leaf.nodes], fabric, group=4)]
    assert [len(set(ranks[position : position + 4])) for position in (0, 4, 8)] == [1, 1, 2]


def test_one_node_needs_no_topology(pit: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    """Its hostfile is written without a query: here a slurm.conf that does not exist."""
    done = pit(
        "topology", "order", "-", "--as", "hostfile", "--gpus", "2", stdin="n7\n", SLURM_CONF=str(tmp_path / "missing")
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "n7\nn7\n", "")
