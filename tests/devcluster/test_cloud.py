from __future__ import annotations

import pytest
from ClusterShell.NodeSet import NodeSet
from devcluster_parts.cloud import convert_topology, expand_hosts, generate_topology
from devcluster_parts.errors import FileProblem, UsageProblem
from hypothesis import given
from hypothesis import strategies as st


@given(st.sets(st.integers(0, 300), min_size=1, max_size=40), st.integers(1, 4))
def test_folded_lists_expand_as_clustershell_expands_them(numbers, width):
    """Any list that ClusterShell folds is read back to the same names."""
    names = NodeSet.fromlist([f"n{number:0{width}d}" for number in numbers])
    assert set(expand_hosts(str(names), "here")) == set(names)


def test_two_brackets_in_a_name():
    """A rack and a node number may both be folded."""
    assert list(expand_hosts("r[1-2]n[08-10],x", "here")) == [
        *("r1n08", "r1n09", "r1n10", "r2n08", "r2n09", "r2n10"),
        "x",
    ]


@pytest.mark.parametrize("count", [1, 8, 9, 128, 129, 4096])
def test_generated_topology_holds_every_node_once(count):
    """Each node is under exactly one leaf of at most 8, and each switch but the core under one other."""
    folded, text = generate_topology(count)
    nodes, switches, names = [], [], []
    for line in text.splitlines():
        fields = dict(field.split("=") for field in line.split())
        names.append(fields["SwitchName"])
        if "Nodes" in fields:
            leaf = list(expand_hosts(fields["Nodes"], "here"))
            assert len(leaf) <= 8
            nodes += leaf
        else:
            switches += expand_hosts(fields["Switches"], "here")
    assert nodes == list(expand_hosts(folded, "here"))
    assert len(nodes) == count
    assert sorted([*switches, "core"]) == sorted(names)


def test_generated_count_is_bounded():
    """slurmctld holds no more than 65,536 nodes."""
    with pytest.raises(UsageProblem):
        generate_topology(1_000_000)


def test_a_site_file_is_converted():
    """Comments, folded lines, lower-case keys and a node under two leaves are all found in real files."""
    text = """
# racks
SwitchName=s1 Nodes=a[1-4] LinkSpeed=100  # first
switchname=s2 nodes=a[3-6],b1
SwitchName=top \\
  Switches=s[1-2]
"""
    folded, retained = convert_topology(text, "topology.conf")
    assert folded == "a[1-4],a5,a6,b1"
    assert retained.splitlines() == [
        "SwitchName=s1 Nodes=a[1-4] LinkSpeed=100",
        "switchname=s2 nodes=a[3-6],b1",
        "SwitchName=top Switches=s[1-2]",
    ]


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("SwitchName=a Nodes=n[1-2]\nBlockName=b1 Nodes=n[1-18]", "t:2"),
        ("SwitchName=a Nodes=n[2-1]", "t:1"),
        ("SwitchName=a Nodes=n[1-999999999]", "t:1"),
        ("SwitchName=a Nodes=n$(reboot)", "t:1"),
        ("SwitchName=a Switches=b", "t"),
        ("", "t"),
    ],
)
def test_a_wrong_file_is_refused_with_its_line(text, where):
    """A file of another plugin, or with nodes that cannot be read, is the file's fault: exit 3."""
    with pytest.raises(FileProblem) as caught:
        convert_topology(text, "t")
    assert caught.value.where == where
    assert caught.value.exit_code == 3
