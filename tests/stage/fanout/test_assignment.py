from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pitools.stage.fanout.assignment import assign_owners, chain_position, file_order, sender_chain
from pitools.store.manifest import FileEntry

sizes = st.lists(st.integers(0, 1 << 40), max_size=60)
counts = st.integers(1, 9)


def entries(found: list[int]) -> list[FileEntry]:
    return [FileEntry(path=f"c/{index}", bytes=size, digest="") for index, size in enumerate(found)]


@given(sizes, counts)
def test_shares_differ_by_one_file_at_most(found: list[int], nodes: int):
    """No node reads more than another by more than the largest file, and equal files are dealt out evenly."""
    owned_by = assign_owners(entries(found), nodes)
    loads = [sum(size for size, node in zip(found, owned_by, strict=True) if node == each) for each in range(nodes)]
    assert max(loads) - min(loads) <= max(found, default=0)
    same = assign_owners(entries([7] * len(found)), nodes)
    numbers = [same.tolist().count(node) for node in range(nodes)]
    assert max(numbers) - min(numbers) <= 1


@given(st.integers(0, 1000), counts, st.data())
def test_a_chain_is_everybody_once(index: int, nodes: int, data: st.DataObject):
    """The owner stands first, each node stands once, and `place` says where."""
    owner = data.draw(st.integers(0, nodes - 1))
    actual = list(sender_chain(index, owner, nodes))
    assert actual[0] == owner
    assert sorted(actual) == list(range(nodes))
    assert [chain_position(index, owner, nodes, node) for node in actual] == list(range(nodes))


@given(sizes, counts, st.data())
def test_a_node_takes_every_file_by_its_place_in_the_chains(found: list[int], nodes: int, data: st.DataObject):
    """Its own share first; places never fall along the order, which is what rules out waiting in a circle."""
    me = data.draw(st.integers(0, nodes - 1))
    owned_by = assign_owners(entries(found), nodes)
    own_part = file_order(entries(found), owned_by, nodes, me)
    assert sorted(own_part) == list(range(len(found)))
    places = [chain_position(index, owned_by[index], nodes, me) for index in own_part]
    assert places == sorted(places)


def test_a_lost_nodes_share_falls_to_all_others():
    """The files of one owner have all other nodes as their second, each about as often."""
    seconds = [list(sender_chain(index, 2, 5))[1] for index in range(40)]
    assert {node: seconds.count(node) for node in set(seconds)} == {0: 10, 1: 10, 3: 10, 4: 10}


def test_nodes_ask_different_nodes_first():
    """After its own share, no two nodes begin with files of the same owner."""
    files = entries([100] * 64)
    owned_by = assign_owners(files, 8)
    firsts = [owned_by[file_order(files, owned_by, 8, me)[8]] for me in range(8)]
    assert sorted(firsts) == list(range(8))
