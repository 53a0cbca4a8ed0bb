"""Allocate the nodes of jobs, in a pool with a fabric."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from pitools.core.errors import ClusterError, ConfigError
from pitools.place.simulate.model import SimPool
from pitools.topology import fabric_model
from pitools.topology.choose import select_nodes
from pitools.topology.fabric_model import Fabric


class NodeAllocator:
    """The nodes of one pool: a job takes part of one node, or whole ones.

    by_name: whole nodes are taken in the order of their names, and not chosen by the fabric.
    """

    def __init__(self, pool: SimPool, fabric: Fabric, *, by_name: bool = False) -> None:
        every = fabric_model.nodes_of(fabric)
        count, rest = divmod(pool.gpus, pool.gpus_per_node)
        if rest or count > len(every):
            raise ConfigError(
                f'pool "{pool.pool}": {pool.gpus} GPUs are not {len(every)} nodes of {pool.gpus_per_node} or fewer',
                where="fabric",
                hint="set gpus to nodes x gpus_per_node",
            )
        self.fabric, self.gpus_per_node, self.by_name = fabric, pool.gpus_per_node, by_name
        nodes = every[:count]
        self.names = sorted(nodes, key=fabric_model.natural_sort_key)
        self.leaf = {node: leaf.path[-1] for leaf in fabric.leaves for node in leaf.nodes}
        # by_free[n]: nodes with n free GPUs, in the order in which they reached that number.
        self.by_free: list[dict[str, None]] = [{} for _ in range(self.gpus_per_node)] + [dict.fromkeys(nodes)]
        self.free = dict.fromkeys(nodes, self.gpus_per_node)
        self.held: dict[int, tuple[int, tuple[str, ...]]] = {}
        self._could: dict[int, bool] = {}
        self._choice: tuple[str, ...] = ()  # the choice for the current state

    def fits_empty(self, units: int) -> bool:
        """Return whether an empty pool can hold a job of this size: not across unconnected leaves."""
        if units not in self._could:
            self._could[units] = units <= self.gpus_per_node or bool(
                self._choose_whole_nodes(self.names, units // self.gpus_per_node)
            )
        return self._could[units]

    def fits_now(self, units: int) -> bool:
        """Return whether a job of this size can start now."""
        if units <= self.gpus_per_node:
            return any(self.by_free[units:])
        empty, count = self.by_free[-1], units // self.gpus_per_node
        if len(empty) < count:
            return False
        if len(self._choice) != count:
            self._choice = self._choose_whole_nodes([node for node in self.names if node in empty], count)
        return len(self._choice) == count

    def fits_without(self, jobs: Iterable[int], units: int) -> bool:
        """Return whether a job of this size could start if these jobs were gone."""
        free = Counter(self.free)
        for share, nodes in (self.held[job] for job in jobs):
            free.update(dict.fromkeys(nodes, share))
        if units <= self.gpus_per_node:
            return max(free.values()) >= units
        empty, count = [node for node in self.names if free[node] == self.gpus_per_node], units // self.gpus_per_node
        return len(empty) >= count and len(self._choose_whole_nodes(empty, count)) == count

    def allocate(self, job: int, units: int) -> None:
        """Allocate a job that fits: the part of a node that it fills best, or whole nodes near each other."""
        if units <= self.gpus_per_node:
            nodes: tuple[str, ...] = (next(next(iter(nodes)) for nodes in self.by_free[units:] if nodes),)
        else:
            assert self.fits_now(units)
            nodes = self._choice
        share = min(units, self.gpus_per_node)
        for node in nodes:
            self._change(node, -share)
        self.held[job] = share, nodes

    def release(self, job: int) -> None:
        """Free the nodes of a job."""
        share, nodes = self.held.pop(job)
        for node in nodes:
            self._change(node, share)

    def transfer(self, job: int, target: int) -> int:
        """Transfer one node's share of a job that ends to another job. Return its units."""
        share, nodes = self.held[job]
        self.held[job], self.held[target] = (share, nodes[1:]), (share, nodes[:1])
        return share

    def leaf_count(self, job: int) -> int:
        """Return the number of leaf switches that a job's nodes are on."""
        _, nodes = self.held[job]
        return len({self.leaf.get(node, node) for node in nodes})

    def _choose_whole_nodes(self, nodes: Sequence[str], count: int) -> tuple[str, ...]:
        """Return this number of the nodes; none if they are not connected."""
        if self.by_name:
            return tuple(nodes[:count])
        try:
            return select_nodes(self.fabric, nodes, count).nodes
        except ClusterError:
            return ()

    def _change(self, node: str, units: int) -> None:
        self._choice = ()
        del self.by_free[self.free[node]][node]
        self.free[node] += units
        self.by_free[self.free[node]][node] = None
