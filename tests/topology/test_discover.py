"""Fabrics as files, recorded answers and sites describe them; and what is wrong with those that cannot be."""

from __future__ import annotations

import contextlib
import random
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pitools.core import subprocesses
from pitools.core.errors import ConfigError, DataError, PitError, UsageError
from pitools.site.schema import Site, Topology
from pitools.slurm.client import Client
from pitools.topology import discover
from pitools.topology.fabric_model import (
    Fabric,
    Leaf,
    Torus,
    block_fabric,
    expand_ordered,
    natural_sort_key,
    nodes_of,
    torus_fabric,
    tree_fabric,
)
from pitools.topology.formats import conf, yaml


@pytest.fixture(scope="module")
def lingjun(repo: Path) -> Fabric:
    """The real Clos of 847 hosts."""
    path = repo.parent / "shared" / "data" / "topology" / "lingjun_2023.csv"
    if not path.is_file():
        pytest.skip("the Lingjun table is not beside the checkout (../shared/data/topology)")
    return discover.read_fabric(path)


@st.composite
def fabrics(draw: st.DrawFn) -> Fabric:
    """Forests of uneven depth with scrambled host names, some links longer than others; or blocks."""
    seed = draw(st.integers(0, 2**32))
    deal = random.Random(seed)
    names = deal.sample([f"{deal.choice('abx')}{i:03d}{deal.choice(['', '-ib', 'z9'])}" for i in range(400)], 120)
    leaves: list[Leaf] = []
    for root in range(draw(st.integers(1, 3))):
        for pod in range(draw(st.integers(1, 3))):
            above = (f"core{root}", f"core{root}/P{pod}") if pod else (f"core{root}",)
            for leaf in range(draw(st.integers(1, 3))):
                own_part, names = names[: deal.randint(1, 5)], names[5:]
                leaves.append(Leaf(path=(*above, f"s{root}.{pod}-{leaf}"), nodes=tuple(own_part)))
    if draw(st.booleans()):
        return block_fabric(leaves=[Leaf(path=leaf.path[-1:], nodes=leaf.nodes) for leaf in leaves], block_sizes=(4, 8))
    switches = sorted({name for leaf in leaves for name in leaf.path})
    return tree_fabric(leaves, {name: deal.choice([1.0, 0.125, 2.5]) for name in switches})


@given(fabrics())
def test_what_is_written_is_read_again(fabric: Fabric) -> None:
    """Any tree or block topology survives topology.conf and topology.yaml whole, lengths of links included."""
    assert conf.read_conf(conf.write_conf(fabric), "topology.conf") == fabric
    assert yaml.read_yaml(yaml.write_yaml(fabric), "topology.yaml") == fabric


@given(fabrics(), st.randoms())
def test_the_order_of_lines_says_nothing_of_a_tree(fabric: Fabric, shuffle: random.Random) -> None:
    """Switches may be named before or after those below them."""
    lines = conf.write_conf(fabric).splitlines()
    if fabric.kind == "tree":
        shuffle.shuffle(lines)
    assert conf.read_conf("\n".join(lines), "topology.conf") == fabric


def test_the_real_clos(lingjun: Fabric) -> None:
    """847 hosts in 3 pods and 119 leaves of at most 8, each leaf with a name of its own though pods repeat them."""
    assert len(nodes_of(lingjun)) == len(set(nodes_of(lingjun))) == 847
    assert len(lingjun.leaves) == len({leaf.path[-1] for leaf in lingjun.leaves}) == 119
    assert {leaf.path[:2] for leaf in lingjun.leaves} == {("G6", "P8"), ("G6", "P10"), ("G6", "P12")}
    assert max(len(leaf.nodes) for leaf in lingjun.leaves) == 8
    assert lingjun.leaves[0].path[-1] == "G6/P8/S1"
    assert (
        conf.read_conf(conf.write_conf(lingjun), "conf") == yaml.read_yaml(yaml.write_yaml(lingjun), "yaml") == lingjun
    )


@pytest.mark.parametrize("version", ["22.05", "23.11", "25.05"])
def test_recorded_trees(repo: Path, version: str) -> None:
    """What every version of Slurm prints is one tree of uneven depth."""
    fabric = discover.read_fabric(repo / "tests" / "replay" / f"slurm-{version}" / "topology.txt")
    assert [(leaf.path, len(leaf.nodes)) for leaf in fabric.leaves] == [
        (("core", "leaf3"), 4),
        (("core", "spine1", "leaf1"), 4),
        (("core", "spine1", "leaf2"), 4),
    ]


def test_recorded_blocks(repo: Path) -> None:
    """Slurm's answer and the file it came from are one fabric, aggregates included."""
    folder = repo / "tests" / "replay" / "slurm-25.05-block"
    fabric = discover.read_fabric(folder / "topology.txt")
    assert fabric.block_sizes == (4, 8)
    assert [leaf.path for leaf in fabric.leaves] == [("b1",), ("b2",), ("b3",)]
    assert discover.read_fabric(folder / "topology.conf") == fabric


TOPOLOGIES = """---
- topology: main
  cluster_default: false
  flat: true
- topology: gpu
  cluster_default: true
  tree:
    switches:
      - switch: sw_root
        children: s[1-2]
      - {switch: s1, nodes: 'node[01-02]'}
      - switch: s2
        nodes: node[03-04]
- topology: nvl
  block:
    block_sizes:
      - 2
      - 4
    blocks: [{block: b1, nodes: 'node[01-02]'}, {block: b2, nodes: 'node[03-04]'}]
- topology: tpu
  torus3d:
    toruses:
      - name: pod1
        dims: {x: 4, y: 2, z: 2}
        regions:
          - {anchor: {x: 0, y: 0, z: 1}, dims: {x: 4, y: 2, z: 1}, nodes: 'node[9-16]'}
          - {anchor: {x: 0, y: 0, z: 0}, dims: {x: 4, y: 2, z: 1}, nodes: 'node[1-8]'}
        placements:
          - dims: {x: 2, y: 2, z: 2}
"""


def test_several_topologies_in_one_file(tmp_path: Path) -> None:
    """The cluster's default is taken, or the one that a partition names; x runs fastest in a torus."""
    path = tmp_path / "topology.yaml"
    path.write_text(TOPOLOGIES)
    assert [leaf.path for leaf in discover.read_fabric(path).leaves] == [("sw_root", "s1"), ("sw_root", "s2")]
    assert discover.read_fabric(Path(f"{path}#main")) == Fabric(kind="flat")
    assert discover.read_fabric(Path(f"{path}#nvl")).block_sizes == (2, 4)
    assert discover.read_fabric(Path(f"{path}#tpu")).torus == Torus(
        dims=(2, 2, 4), nodes=tuple(f"node{i}" for i in range(1, 17))
    )
    with pytest.raises(UsageError) as error:
        discover.read_fabric(Path(f"{path}#tpv"))
    assert "tpu" in error.value.hint


def test_a_torus_is_written_and_read_again() -> None:
    """Its nodes keep their places whatever their names."""
    names = random.Random(3).sample([f"n{i}" for i in range(24)], 24)
    torus = torus_fabric((2, 3, 4), names)
    assert yaml.read_yaml(yaml.write_yaml(torus), "yaml") == torus
    assert yaml.read_yaml(yaml.write_yaml(Fabric(kind="flat")), "yaml") == Fabric(kind="flat")
    with pytest.raises(UsageError, match="torus"):
        conf.write_conf(torus)
    with pytest.raises(UsageError, match="2 dimensions"):
        yaml.write_yaml(torus_fabric((2, 2), names[:4]))


LEAF = "SwitchName={} Nodes={}\n"
DEEP = "".join(f"SwitchName=s{i} Switches=s{i + 1}\n" for i in range(80)) + LEAF.format("s80", "n")
BAD = {
    "cycle": (LEAF.format("r", "n1") + "SwitchName=a Switches=b\nSwitchName=b Switches=a", ":[23]: .* below itself"),
    "two leaves": (LEAF.format("a", "n[1-2]") + LEAF.format("b", "n2"), ':2: node "n2" is under "a" and "b"'),
    "two parents": ("SwitchName=a Switches=c\nSwitchName=b Switches=c\n" + LEAF.format("c", "n"), ':2: switch "c" is'),
    "nowhere": (LEAF.format("a", "n1") + "SwitchName=r Switches=a,b", ':2: switch "b" below "r" is not defined'),
    "brackets": (LEAF.format("a", "n1") + "SwitchName=b Switches=[a,c]", ":2: "),
    "both": ("SwitchName=a Nodes=n1 Switches=b", ":1: .* both nodes and switches"),
    "twice": ("# a\n" + LEAF.format("a", "n1") + LEAF.format("a", "n2"), ":3: .* twice, first at .*:2"),
    "key": ("SwitchName=a Node=n1", ':1: unknown key "Node"'),
    "words": ("SwitchName=a Nodes=n1 n2", ":1: 'n2' is not KEY=VALUE"),
    "list": ("SwitchName=a Nodes=n[1-", ":1: .* is not a host list"),
    "name": ("SwitchName=$(reboot) Nodes=n1", ":1: .* is not a valid name"),
    "sizes": ("BlockName=b Nodes=n1\nBlockSizes=4,12", ":2: block sizes 4, 12"),
    "mixed": ("BlockName=b Nodes=n1\n" + LEAF.format("s", "n2"), "switches and blocks"),
    "two blocks": ("BlockName=b Nodes=n1\nBlockName=c Nodes=n1", ':2: node "n1" is under "b" and "c"'),
    "length": ("SwitchName=a Nodes=n1  # length=-2", ":1: length=-2"),
    "empty": ("# nothing\n\n", "empty"),
    "deep": (DEEP, ":65: .*64 levels"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_file_that_cannot_be(tmp_path: Path, case: str) -> None:
    """Each error names the file, the line and the switch."""
    text, message = BAD[case]
    path = tmp_path / "topology.conf"
    path.write_text(text)
    with pytest.raises((ConfigError, DataError)) as error:
        discover.read_fabric(path)
    assert str(error.value).startswith(str(path))
    with pytest.raises(type(error.value), match=message):
        raise error.value


TREE = "- topology: a\n  tree:\n    switches:\n"
TORUS = "- topology: a\n  torus3d:\n    toruses:\n      - {name: t, dims: {x: 2, y: 2, z: 1}, nodes: 'n[1-3]'}\n"
BOMB = "- topology: &a [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"  {here}: &{here} [{','.join([f'*{below}'] * 10)}]\n" for below, here in pairwise("abcdefghi")
)
BAD_YAML = {
    "syntax": ("- topology: [a\n", ":2: not YAML"),
    "no list": ("---\ntopology: a\n", "is not a list"),
    "kinds": ("- topology: a\n  flat: true\n  tree: {switches: []}\n", ":1: 2 kinds"),
    "ring": ("- topology: a\n  ring: {rings: []}\n", ":1: ring "),
    "key": (TREE + "      - switch: s\n        node: n1\n", ':4: unknown key "node"'),
    "cycle": (TREE + "      - {switch: a, children: b}\n      - {switch: b, children: a}\n", "below itself"),
    "torus": (TORUS, "3 nodes for a torus of 1 by 2 by 2"),
    "bomb": (BOMB, "more than 1000000 values"),
    "deep": ("- " * 3000, "nested too deep|not YAML"),
    "nothing": ("[]", "no topology"),
}


@pytest.mark.parametrize("case", BAD_YAML)
def test_a_yaml_that_cannot_be(case: str) -> None:
    """Wrong types, keys and shapes are told with their lines, and a file of few lines cannot fill the memory."""
    text, message = BAD_YAML[case]
    with pytest.raises((ConfigError, DataError), match=message):
        yaml.read_yaml(text, "topology.yaml")


def test_what_is_no_topology_at_all(tmp_path: Path) -> None:
    """A missing file, bytes, and half an answer are errors of ours, not of Python."""
    with pytest.raises(ConfigError, match="no such file"):
        discover.read_fabric(tmp_path / "none.conf")
    bad = tmp_path / "bytes"
    bad.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="UTF-8"):
        discover.read_fabric(bad)
    bad.write_text("SwitchName=a Level=0 LinkSpeed=1 Nodes=n[1-4]\nSwitchName=b Level=1 LinkSp")
    with pytest.raises(PitError, match=str(bad)):
        discover.read_fabric(bad)
    bad.write_text("SwitchName=a Level=0 Nodes=n[1-2]\nSwitchName=r Level=1 Nodes=n[1-4] Switches=a,b\n")
    with pytest.raises(DataError, match='node "n3" is under "r" but under none of its switches'):
        discover.read_fabric(bad)


@given(st.text(st.sampled_from("SwitchNameNodes=,[]-1ab#\\\n \t{}:"), max_size=60))
def test_garbage_is_refused_in_words(text: str) -> None:
    """Whatever a file holds, reading it ends in a fabric or in an error of ours."""
    for read in (conf.read_conf, yaml.read_yaml):
        with contextlib.suppress(PitError):
            assert isinstance(read(text, "file"), Fabric)


def test_a_site_says_where_its_fabric_is(tmp_path: Path) -> None:
    """Its file goes first, then its torus, then its Slurm; without any, nothing is known."""
    path = tmp_path / "hosts.csv"
    path.write_text("node,leaf\nn1,a\nn2,b\n")
    client = Client(
        run=lambda argv, **_: subprocesses.Completed(tuple(argv), 0, "SwitchName=s Level=0 Nodes=n[1-2]\n", "")
    )
    assert [leaf.path for leaf in discover.fabric_of_site(Site(name="x"), client).leaves] == [("s",)]
    assert discover.fabric_of_site(Site(name="x"), None) == Fabric(kind="flat")
    site = Site(name="x", topology=Topology(file=str(path), dims=(2, 1), nodes="n[1-2]"))
    assert [leaf.path for leaf in discover.fabric_of_site(site, client).leaves] == [("a",), ("b",)]
    torus = discover.fabric_of_site(Site(name="x", topology=Topology(dims=(2, 2), nodes="n[3-4],n[1-2]")), client)
    assert torus.torus == Torus(dims=(2, 2), nodes=("n3", "n4", "n1", "n2"))
    with pytest.raises(DataError, match=r"x: topology.dims: 2 nodes for a torus of 2 by 2"):
        discover.fabric_of_site(Site(name="x", topology=Topology(dims=(2, 2), nodes="n[1-2]")), None)


def test_a_flat_slurm_and_nodes_without_a_switch() -> None:
    """No topology is a flat fabric; nodes that it does not know are told in the order given."""
    silent = Client(
        run=lambda argv, **_: subprocesses.Completed(tuple(argv), 1, "", "No topology information available\n")
    )
    assert discover.query_fabric(silent) == Fabric(kind="flat")
    fabric = tree_fabric([Leaf(path=("a",), nodes=("n1", "n2"))])
    assert discover.unknown_nodes(fabric, ["n3", "n1", "m", "n3"]) == ["n3", "m"]


def test_lists_keep_their_order() -> None:
    """A list is read as it is written, with slashes in the names of switches."""
    assert expand_ordered("b2,a[3,1-2],G6/P10/S[1-2],b2") == ["b2", "a1", "a2", "a3", "G6/P10/S1", "G6/P10/S2"]
    assert expand_ordered("") == []
    with pytest.raises(UsageError):
        expand_ordered("a[1-2")


@given(st.lists(st.text(st.sampled_from("ab012٣²"), min_size=1, max_size=6), unique=True), st.randoms())
def test_natural_order_tells_all_names_apart(names: list[str], shuffle: random.Random) -> None:
    """The order does not depend on the order before, leading zeros and odd digits included."""
    ordered = sorted(names, key=natural_sort_key)
    shuffle.shuffle(names)
    assert sorted(names, key=natural_sort_key) == ordered
    assert len({tuple(natural_sort_key(name)) for name in names}) == len(names)
