"""Which node reads which file from the source, who stands in for it, and in which order a node wants its files.

Every node works this out alone, from the manifest and its own number, and all come to the same answer.

    owner(file)   reads it from the source: the largest files first, each to the node that has least so far
    chain(file)   all nodes, the owner first: where a node is gone, the next of the chain reads from the source
    order         files by this node's own place in their chains

The order is what keeps nodes from waiting for one another in a circle. A node that waits for a file of which it is
number r in the chain waits for a node of a lower number in that chain, and that node, as it too goes by its numbers, is
at a file of a number below r. So along any line of waiting nodes the number falls, whoever has died.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator, Sequence

from pitools.store.manifest import FileEntry


def assign_owners(files: Sequence[FileEntry], nodes: int) -> array[int]:
    """For each file the node that reads it from the source; the nodes' bytes are as equal as whole files allow."""
    owners = array("H", bytes(2 * len(files)))
    # Equal bytes are dealt out by the number of files, so that empty files do not all go to one node.
    loads = [(0, 0, node) for node in range(nodes)]
    for index in sorted(range(len(files)), key=lambda index: (-files[index].bytes, index)):
        n_bytes, count, node = loads[0]
        heapq.heapreplace(loads, (n_bytes + files[index].bytes, count + 1, node))
        owners[index] = node
    return owners


def sender_chain(index: int, owner: int, nodes: int) -> Iterator[int]:
    """All nodes in the order in which they answer for a file. A lost owner's files fall to all others in turn."""
    yield owner
    others = nodes - 1
    for step in range(others):
        yield (owner + 1 + (index + step) % others) % nodes


def place_in_chain(index: int, owner: int, nodes: int, node: int) -> int:
    """A node's number in a file's chain: 0 for its owner."""
    if node == owner:
        return 0
    others = nodes - 1
    return 1 + ((node - owner - 1) % nodes - index) % others


def file_order(files: Sequence[FileEntry], owned_by: Sequence[int], nodes: int, rank: int) -> list[int]:
    """File indexes as node `rank` wants them: its own share, then by its place in their chains, large files first.

    Within one place the owners follow in a circle that begins behind `rank`, so that nodes ask different ones.
    """
    return sorted(
        range(len(files)),
        key=lambda index: (
            place_in_chain(index, owned_by[index], nodes, rank),
            (owned_by[index] - rank) % nodes,
            -files[index].bytes,
            index,
        ),
    )
