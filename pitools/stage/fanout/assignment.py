"""Assign files to nodes: which node reads a file from the source, its substitutes, and each node's file order.

Every node computes this from the manifest and its rank alone, and all get the same result.

    owner(file)   reads it from the source: the largest files first, each to the node with the fewest bytes so far
    chain(file)   all nodes, the owner first: when a node fails, the next of the chain reads from the source
    order         files by this node's position in their chains

This order prevents circular waits. A node that waits for a file at whose chain it has position r waits for a node of a
lower position in that chain; that node, which follows its own order, works on a file at whose chain its position is
below r. So positions fall along any line of waiting nodes, whichever nodes have died.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator, Sequence

from pitools.store.manifest import FileEntry


def assign_owners(files: Sequence[FileEntry], nodes: int) -> array[int]:
    """Return for each file the node that reads it from the source. Bytes per node are as equal as whole files allow."""
    owners = array("H", bytes(2 * len(files)))
    # Ties are broken by the number of files, so that empty files do not all go to one node.
    loads = [(0, 0, node) for node in range(nodes)]
    for index in sorted(range(len(files)), key=lambda index: (-files[index].bytes, index)):
        n_bytes, count, node = loads[0]
        heapq.heapreplace(loads, (n_bytes + files[index].bytes, count + 1, node))
        owners[index] = node
    return owners


def sender_chain(index: int, owner: int, nodes: int) -> Iterator[int]:
    """Yield all nodes in the order in which they serve a file. A lost owner's files are spread over all other nodes."""
    yield owner
    n_others = nodes - 1
    for step in range(n_others):
        yield (owner + 1 + (index + step) % n_others) % nodes


def chain_position(index: int, owner: int, nodes: int, node: int) -> int:
    """Return a node's position in a file's chain: 0 for its owner."""
    if node == owner:
        return 0
    n_others = nodes - 1
    return 1 + ((node - owner - 1) % nodes - index) % n_others


def file_order(files: Sequence[FileEntry], owners: Sequence[int], nodes: int, rank: int) -> list[int]:
    """Return the file indexes in the order of node `rank`: by its position in their chains, large files first.

    Files of equal position are ordered by owner, starting after `rank`, so that nodes query different owners.
    """
    return sorted(
        range(len(files)),
        key=lambda index: (
            chain_position(index, owners[index], nodes, rank),
            (owners[index] - rank) % nodes,
            -files[index].bytes,
            index,
        ),
    )
