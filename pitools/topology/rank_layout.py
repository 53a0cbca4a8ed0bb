"""Assign ranks to ordered nodes, and write them for srun, torchrun, Open MPI and JAX.

With g GPUs per node, rank = node position * g + GPU, and rank = (data * P + pipeline) * T + tensor. So the T ranks of
a tensor group are consecutive on a node, pipeline stages are T ranks apart, and replica d + 1 starts where replica d
ends: data-parallel rings follow the order of the nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pitools.core.errors import UsageError
from pitools.core.record import Record
from pitools.topology.rank_order import NodeSlot


class RankPlacement(Record, frozen=True, kw_only=True, tag="pit.rank-placement/1"):
    """One rank. local_rank: its GPU. data, pipeline, tensor: its index along each axis of parallelism."""

    rank: int
    node: str
    local_rank: int
    data: int
    pipeline: int
    tensor: int
    leaf: str


class JaxMesh(Record, frozen=True, kw_only=True, tag="pit.jax-mesh/1"):
    """Arguments of `jax.sharding.Mesh`: `np.array(jax.devices())[devices].reshape(shape)`, and the axis names."""

    axes: tuple[str, ...]
    shape: tuple[int, ...]
    devices: tuple[int, ...]


def nodes_per_replica(gpus: int, tensor: int, pipeline: int) -> int:
    """Return the nodes per model replica: the `group` of `rank_order`."""
    return max(1, -(-tensor * pipeline // gpus))


def place_ranks(slots: Sequence[NodeSlot], gpus: int, tensor: int = 1, pipeline: int = 1) -> list[RankPlacement]:
    """Return all ranks, in order. gpus: GPUs and ranks per node.

    A tensor group larger than a node must fill whole nodes of one leaf (an NVLink domain).
    Raises UsageError for axes that do not fit the nodes.
    """
    rank_count, replica_size = len(slots) * gpus, tensor * pipeline
    if gpus % tensor and tensor % gpus:
        hint = "choose a divisor, or a multiple, of the GPUs per node"
        raise UsageError(f"tensor groups of {tensor} do not fit nodes of {gpus} GPUs", where="--tensor", hint=hint)
    if rank_count % replica_size:
        problem = f"{len(slots)} nodes of {gpus} GPUs do not divide into replicas of {tensor} x {pipeline}"
        raise UsageError(problem, where="--tensor, --pipeline", hint=f"use a multiple of {replica_size} GPUs")
    for first in range(0, len(slots), tensor // gpus) if tensor > gpus else ():
        group = slots[first : first + tensor // gpus]
        if len({slot.path for slot in group}) > 1:
            problem = f"the tensor group of {group[0].node} to {group[-1].node} spans several leaves"
            hint = f"choose whole groups: pit topology choose --segment {tensor // gpus}"
            raise UsageError(problem, where="--tensor", hint=hint)
    return [
        RankPlacement(
            rank=rank,
            node=slots[rank // gpus].node,
            leaf=slots[rank // gpus].leaf,
            local_rank=rank % gpus,
            data=rank // replica_size,
            pipeline=rank // tensor % pipeline,
            tensor=rank % tensor,
        )
        for rank in range(rank_count)
    ]


def format_hostfile(slots: Sequence[NodeSlot], tasks: int) -> str:
    """Return the SLURM_HOSTFILE for `srun --distribution=arbitrary`: task i runs on the host of line i."""
    return "".join(f"{slot.node}\n" * tasks for slot in slots)


def format_torchrun(slots: Sequence[NodeSlot], gpus: int, addresses: Mapping[str, str] = {}) -> str:
    """Return a line per node: its name, then its torchrun flags. addresses: node → address, by default its name.

    The flags select torchrun's static rendezvous, which keeps these ranks; `--rdzv-backend` would reassign them.
    """
    if not slots:
        return ""
    master = addresses.get(slots[0].node, slots[0].node)
    fixed = f"--nnodes={len(slots)} --nproc-per-node={gpus} --master-addr={master}"
    return "".join(f"{slot.node} --node-rank={rank} {fixed}\n" for rank, slot in enumerate(slots))


def format_rankfile(slots: Sequence[NodeSlot], tasks: int, cpus: int = 1) -> str:
    """Return Open MPI's rankfile. cpus: cores per rank; a node's ranks are bound to consecutive cores."""
    lines = []
    for rank in range(len(slots) * tasks):
        first = rank % tasks * cpus
        cores = f"{first}-{first + cpus - 1}" if cpus > 1 else f"{first}"
        lines.append(f"rank {rank}={slots[rank // tasks].node} slot={cores}\n")
    return "".join(lines)


def jax_mesh(placements: Sequence[RankPlacement], launched: Sequence[str]) -> JaxMesh:
    """Return the mesh with each rank's index in `jax.devices()`. launched: nodes in the order of JAX's processes.

    JAX numbers devices by process, and processes in the order in which srun or mpirun started them: the order of the
    host file if one was used (the indices are then 0, 1, 2, …), else of Slurm's node list.
    """
    gpus = 1 + max(seat.local_rank for seat in placements)
    first_device = {node: number * gpus for number, node in enumerate(launched)}
    shape = tuple(1 + max(getattr(seat, axis) for seat in placements) for axis in ("data", "pipeline", "tensor"))
    devices = tuple(first_device[seat.node] + seat.local_rank for seat in placements)
    return JaxMesh(axes=("data", "pipeline", "tensor"), shape=shape, devices=devices)
