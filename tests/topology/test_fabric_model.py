"""Blocks and grids: what the model makes of them."""

from __future__ import annotations

import pytest

from pitools.core.errors import DataError
from pitools.slurm.records import Block
from pitools.topology.fabric_model import Leaf, block_fabric, expand_ordered, from_blocks, torus_fabric, tree_fabric
from pitools.topology.formats import table, yaml
from pitools.topology.formats.conf import fold_nodes
from pitools.topology.ring_cost import min_ring_hops, ring_hops
from pitools.topology.show import score


def test_blocks_are_in_slurms_order() -> None:
    """Their index tells which are neighbours, and not their names; sizes are those of blocks and of aggregates."""
    blocks = [
        Block(block="a", index=2, node_list="n1", size=4),
        Block(block="c", index=0, node_list="n2", size=4),
        Block(block="b", index=1, node_list="n3", size=4),
        Block(block="[a-c]", index=3, node_list="n[1-3]", size=8, is_aggregated=True),
    ]
    fabric = from_blocks(blocks)
    assert [leaf.path for leaf in fabric.leaves] == [("c",), ("b",), ("a",)]
    assert fabric.block_sizes == (4, 8)


def test_aggregates_are_blocks_side_by_side() -> None:
    """Of blocks of 4, two make an aggregate of 8 and four one of 16: a ring pays for each that it leaves."""
    leaves = [Leaf(path=(f"b{i}",), nodes=(f"n{i}",)) for i in range(8)]
    fabric = block_fabric(leaves, (4, 8, 16))
    assert [ring_hops([f"n{a}", f"n{b}"], fabric) for a, b in ((0, 1), (0, 2), (1, 2), (0, 4), (3, 4))] == [
        2 * 2,
        2 * 4,
        2 * 4,
        2 * 6,
        2 * 6,
    ]
    assert min_ring_hops(["n0", "n1", "n2"], fabric) == 2 * 3 + 2 * 2


@pytest.mark.parametrize(
    ("dims", "nodes"), [((), ""), ((2, 2), "abc"), ((2, 2), "abca"), ((4, -1), "abcd"), ((0,), "")]
)
def test_a_grid_has_a_node_for_each_place(dims: tuple[int, ...], nodes: str) -> None:
    """No more, no fewer, none twice."""
    with pytest.raises(DataError):
        torus_fabric(dims, list(nodes))


def test_lists_for_slurm_have_one_bracket_a_name() -> None:
    """Older versions take no more in a topology.conf."""
    assert fold_nodes([f"n{i}" for i in (1, 2, 3, 7)]) == "n[1-3,7]"
    names = [f"r{rack}n{node}" for rack in (1, 2) for node in (1, 2)]
    assert all(item.count("[") < 2 for item in fold_nodes(names).replace(",r", " r").split())
    assert expand_ordered(fold_nodes(names)) == names


def test_a_region_may_lie_over_the_edge_of_a_torus() -> None:
    """Its nodes go on at the other side."""
    text = """- topology: t
  torus3d:
    toruses:
      - name: t
        dims: {x: 3, y: 1, z: 1}
        regions:
          - anchor: {x: 1, y: 0, z: 0}
            dims: {x: 3, y: 1, z: 1}
            nodes: n[1-3]
"""
    torus = yaml.read_yaml(text, "t").torus
    assert torus
    assert torus.nodes == ("n3", "n1", "n2")


def test_columns_that_tell_each_other_are_from_the_root() -> None:
    """A leaf to each pod: the names say nothing of which is above, and the order of the columns counts."""
    (first, second) = table.read_table("host,pod,leaf\nn1,P1,L1\nn2,P2,L2\n", "t").leaves
    assert (first.path, second.path) == (("P1", "L1"), ("P2", "L2"))
    assert table.read_table("host,leaf,pod\nn1,L1,P1\nn2,L2,P1\n", "t").leaves[0].path == ("P1", "L1")


def test_leaves_without_a_pod_need_none() -> None:
    """The best place for as many as they hold has no pod, and one more takes one."""
    fabric = tree_fabric([Leaf(path=("a",), nodes=("a1", "a2")), Leaf(path=("p", "b"), nodes=("b1", "b2"))])
    assert [score.best_possible(k, fabric).pods for k in (2, 3, 4)] == [0, 1, 1]
