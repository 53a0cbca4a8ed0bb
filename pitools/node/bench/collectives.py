"""All-reduces between ranks: by sockets on nodes without a GPU, else by torch or jax as installed.

A framework takes seconds of CPU to import, and between CPUs sends by sockets, too.
"""

from __future__ import annotations

import importlib.util
import socket
import time
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from pitools.core.daemon_pool import DaemonPool
from pitools.node.bench import gpu

PERIOD = 251
"""Of the pattern; prime."""

ExchangeAddress = Callable[[int, int], tuple[str, int]]
"""Takes the port that this rank listens on, 0 for none, and a rank; returns where that rank listens."""


class RankPosition(msgspec.Struct, frozen=True, kw_only=True):
    """Where this process is in its group. launch_ip: of the host that srun runs on."""

    rank: int
    world_size: int
    local_rank: int
    node: str
    launch_ip: str


class Collective(Protocol):
    """What connects a group of ranks. device: `cpu`, or the GPU's name. software: the framework's version."""

    name: str
    device: str
    software: str

    def connect(self, position: RankPosition, exchange_address: ExchangeAddress) -> None:
        """Join the group."""

    def pattern(self, n_elements: int) -> Any:
        """Return float32 of (index % PERIOD), where the sums are compared."""

    def all_reduce(self, buffer: Any) -> tuple[float, Any]:
        """Return the seconds, and the sums over all ranks; the buffer may be changed. Begins with a barrier."""

    def close(self) -> None:
        """Leave the group."""


def choose_collective() -> Collective:
    """Return that of torch, or else jax, on a node with a GPU; without one, or neither, that by sockets."""
    if gpu.has_device() and importlib.util.find_spec("torch"):
        return TorchCollective()
    return JaxCollective() if gpu.has_device() and importlib.util.find_spec("jax") else SocketCollective()


class SocketCollective:
    """A ring of ranks, each of which sends to the next one: as many bytes as any all-reduce must."""

    name, device, software = "sockets", "cpu", ""

    def __init__(self) -> None:
        import numpy

        self._numpy: Any = numpy

    def connect(self, position: RankPosition, exchange_address: ExchangeAddress) -> None:
        """Listen on a port that the kernel chooses, and connect to the next rank."""
        self._rank, self._count = position.rank, position.world_size
        family = socket.AF_INET6 if ":" in position.launch_ip else socket.AF_INET
        with socket.create_server(("", 0), family=family, backlog=1) as server:
            address = exchange_address(server.getsockname()[1], (self._rank + 1) % self._count)
            self._next = socket.create_connection(address)
            self._previous, _ = server.accept()
        self._next.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sender = DaemonPool(1, "send")

    def pattern(self, n_elements: int) -> Any:
        """As Collective has it."""
        return numpy_pattern(n_elements)

    def all_reduce(self, buffer: Any) -> tuple[float, Any]:
        """As Collective has it. The sum of few elements is the barrier."""
        self._sum(numpy_pattern(self._count))
        begin = time.perf_counter()
        self._sum(buffer)
        return time.perf_counter() - begin, buffer

    def close(self) -> None:
        """As Collective has it."""
        self._next.close()
        self._previous.close()

    def _sum(self, buffer: Any) -> None:
        """Sum in place: each part goes round the ring to be added up, and once more as a sum."""
        parts = self._numpy.array_split(buffer, self._count)
        for step in range(2 * self._count - 2):
            target = parts[(self._rank - step - 1) % self._count]
            received = self._exchange(parts[(self._rank - step) % self._count], target)
            target[:] = received if step >= self._count - 1 else target + received

    def _exchange(self, part: Any, like: Any) -> Any:
        """Send a part to the next rank while one is received from the previous; return that."""
        sent = self._sender.submit(self._next.sendall, part.view("uint8"))
        received = self._numpy.empty_like(like)
        room = memoryview(received.view("uint8"))
        while room and (count := self._previous.recv_into(room)):
            room = room[count:]
        if room:
            raise ConnectionError(f"rank {(self._rank - 1) % self._count} has ended")
        sent.result()
        return received


class TorchCollective:
    """The all-reduces of a group of ranks by torch.distributed: NCCL on GPUs, else gloo."""

    name = "torch"

    def __init__(self) -> None:
        import torch

        self._torch: Any = torch
        self.software = f"torch {torch.__version__}"
        self._on_gpu = bool(torch.cuda.is_available())
        self.device = torch.cuda.get_device_name() if self._on_gpu else "cpu"

    def connect(self, position: RankPosition, exchange_address: ExchangeAddress) -> None:
        """As Collective has it. The store of rank 0 listens on a port that the kernel chose."""
        from torch import distributed

        if self._on_gpu:
            self._torch.cuda.set_device(position.local_rank % self._torch.cuda.device_count())
        count = position.world_size
        if position.rank == 0:
            store = distributed.TCPStore("0.0.0.0", 0, count, is_master=True, wait_for_workers=False)  # noqa: S104
            exchange_address(store.port, 0)
        else:
            store = distributed.TCPStore(*exchange_address(0, 0), count, is_master=False)
        backend = "nccl" if self._on_gpu else "gloo"
        distributed.init_process_group(backend, store=store, rank=position.rank, world_size=count)
        self._distributed: Any = distributed

    def pattern(self, n_elements: int) -> Any:
        """As Collective has it, on the device."""
        device = "cuda" if self._on_gpu else "cpu"
        return (self._torch.arange(n_elements, device=device, dtype=self._torch.int32) % PERIOD).float()

    def all_reduce(self, buffer: Any) -> tuple[float, Any]:
        """As Collective has it."""
        self._distributed.barrier()
        self._synchronize()
        begin = time.perf_counter()
        self._distributed.all_reduce(buffer)
        self._synchronize()
        return time.perf_counter() - begin, buffer

    def close(self) -> None:
        """As Collective has it."""
        self._distributed.destroy_process_group()

    def _synchronize(self) -> None:
        if self._on_gpu:
            self._torch.cuda.synchronize()


class JaxCollective:
    """The same by jax; between CPUs for `pit perf collectives` alone."""

    name = "jax"

    def __init__(self) -> None:
        import jax

        self._jax: Any = jax
        self.software = f"jax {jax.__version__}"
        self.device = "cpu"

    def connect(self, position: RankPosition, exchange_address: ExchangeAddress) -> None:
        """As Collective has it. A port that is free now: jax has no way to listen on one that the kernel chooses."""
        jax, port = self._jax, 0
        if position.rank == 0:
            with socket.socket() as probe:
                probe.bind(("", 0))
                port = probe.getsockname()[1]
        host, port = exchange_address(port, 0)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            f"{host}:{port}",
            num_processes=position.world_size,
            process_id=position.rank,
            local_device_ids=[position.local_rank],
        )
        mesh = jax.sharding.Mesh(jax.devices(), ("rank",))
        by_rank = jax.sharding.PartitionSpec("rank")
        self._sharding = jax.sharding.NamedSharding(mesh, by_rank)
        self._sum = jax.jit(
            jax.shard_map(lambda part: jax.lax.psum(part, "rank"), mesh=mesh, in_specs=by_rank, out_specs=by_rank)
        )
        device = jax.local_devices()[0]
        self.device = "cpu" if device.platform == "cpu" else device.device_kind

    def pattern(self, n_elements: int) -> Any:
        """As Collective has it, on the host."""
        return numpy_pattern(n_elements)

    def all_reduce(self, buffer: Any) -> tuple[float, Any]:
        """As Collective has it. An all-reduce of one element is the barrier."""
        import numpy

        part = self._distribute(buffer)
        self._jax.block_until_ready((part, self._sum(self._distribute(numpy_pattern(1)))))
        begin = time.perf_counter()
        sums = self._sum(part).block_until_ready()
        return time.perf_counter() - begin, numpy.asarray(sums.addressable_data(0))

    def close(self) -> None:
        """As Collective has it."""
        self._jax.distributed.shutdown()

    def _distribute(self, part: Any) -> Any:
        return self._jax.make_array_from_process_local_data(self._sharding, part)


def numpy_pattern(n_elements: int) -> Any:
    """Return float32 of (index % PERIOD)."""
    import numpy

    return (numpy.arange(n_elements, dtype=numpy.int32) % PERIOD).astype(numpy.float32)
