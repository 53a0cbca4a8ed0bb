"""Ranks over ordered nodes: tensor groups inside a node, pipeline neighbours near, data rings over the order.

With g GPUs a node, rank = position of the node * g + GPU, and also rank = (data * P + pipeline) * T + tensor. So the
T ranks of a tensor group are consecutive on one node, a pipeline's stages are T apart, and replica d + 1 stands where
d ends: the data rings go round the fabric as the order of the nodes does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pitools.core.errors import UsageError
from pitools.core.record import Record
from pitools.topology.rank_order import NodeSlot


class RankPlacement(Record, frozen=True, kw_only=True, tag="pit.rank-placement/1"):
    """One rank. local_rank: its GPU. data, pipeline, tensor: its place along each axis of parallelism."""

    rank: int
    node: str
    local_rank: int
    data: int
    pipeline: int
    tensor: int
    leaf: str


class JaxMesh(Record, frozen=True, kw_only=True, tag="pit.jax-mesh/1"):
    """Devices for `jax.sharding.Mesh`: `np.array(jax.devices())[devices].reshape(shape)` with the names `axes`."""

    axes: tuple[str, ...]
    shape: tuple[int, ...]
    devices: tuple[int, ...]


def nodes_per_replica(gpus: int, tensor: int, pipeline: int) -> int:
    """How many nodes one replica of the model takes; what `order` keeps together."""
    return max(1, -(-tensor * pipeline // gpus))


def place_ranks(slots: Sequence[NodeSlot], gpus: int, tensor: int = 1, pipeline: int = 1) -> list[RankPlacement]:
    """Every rank in order. gpus: of a node, and ranks on it. Raises UsageError for axes that do not fit the nodes.

    A tensor group larger than a node must be whole nodes of one leaf: an NVLink domain.
    """
    world, replica = len(slots) * gpus, tensor * pipeline
    if gpus % tensor and tensor % gpus:
        hint = "a tensor group stays inside a node: choose a divisor of its GPUs"
        raise UsageError(f"tensor groups of {tensor} do not fit nodes of {gpus} GPUs", where="--tensor", hint=hint)
    if world % replica:
        what = f"{len(slots)} nodes of {gpus} GPUs cannot be cut into replicas of {tensor} x {pipeline}"
        raise UsageError(what, where="--tensor, --pipeline", hint=f"ask for a multiple of {replica} GPUs")
    for first in range(0, len(slots), tensor // gpus) if tensor > gpus else ():
        group = slots[first : first + tensor // gpus]
        if len({slot.path for slot in group}) > 1:
            what = f"the tensor group of {group[0].node} to {group[-1].node} would span several leaves"
            raise UsageError(what, where="--tensor", hint="choose nodes in whole groups: pit topology choose --segment")
    return [
        RankPlacement(
            rank=rank,
            node=slots[rank // gpus].node,
            leaf=slots[rank // gpus].leaf,
            local_rank=rank % gpus,
            data=rank // replica,
            pipeline=rank // tensor % pipeline,
            tensor=rank % tensor,
        )
        for rank in range(world)
    ]


def format_hostfile(slots: Sequence[NodeSlot], tasks: int) -> str:
    """SLURM_HOSTFILE for `srun --distribution=arbitrary`: task i runs on line i."""
    return "".join(f"{slot.node}\n" * tasks for slot in slots)


def format_torchrun(slots: Sequence[NodeSlot], gpus: int, addresses: Mapping[str, str] = {}) -> str:
    """A line a node: its name, then the flags of its torchrun. addresses: of the nodes, where not their names.

    These flags choose the static rendezvous, which keeps the ranks as given; `--rdzv-backend` would deal them anew.
    """
    if not slots:
        return ""
    master = addresses.get(slots[0].node, slots[0].node)
    fixed = f"--nnodes={len(slots)} --nproc-per-node={gpus} --master-addr={master}"
    return "".join(f"{slot.node} --node-rank={rank} {fixed}\n" for rank, slot in enumerate(slots))


def format_rankfile(slots: Sequence[NodeSlot], tasks: int, cpus: int = 1) -> str:
    """Open MPI's rankfile. cpus: cores that each rank is bound to, the node's first rank to its first ones."""
    lines = []
    for rank in range(len(slots) * tasks):
        first = rank % tasks * cpus
        cores = f"{first}-{first + cpus - 1}" if cpus > 1 else f"{first}"
        lines.append(f"rank {rank}={slots[rank // tasks].node} slot={cores}\n")
    return "".join(lines)


def jax_mesh(placements: Sequence[RankPlacement], launched: Sequence[str]) -> JaxMesh:
    """Where in `jax.devices()` each rank's device is. launched: the nodes in the order of JAX's processes.

    JAX numbers devices by process, and processes are numbered as srun or mpirun started them: in the order of the host
    file where one was used, which makes these 0, 1, 2, …, and in that of Slurm's node list where none was.
    """
    gpus = 1 + max(seat.local_rank for seat in placements)
    first = {node: number * gpus for number, node in enumerate(launched)}
    shape = tuple(1 + max(getattr(seat, axis) for seat in placements) for axis in ("data", "pipeline", "tensor"))
    devices = tuple(first[seat.node] + seat.local_rank for seat in placements)
    return JaxMesh(axes=("data", "pipeline", "tensor"), shape=shape, devices=devices)
