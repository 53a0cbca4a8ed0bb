"""Join and leave a job: ranks connect to rank 0's host, verify that they belong to one job, and leave together.

A port can still be held by the previous job on the node, or be given to two jobs at the same time. Ranks of two jobs
that connect would train one model from two requests. Therefore, before the first collective, each rank proves to rank
0, and rank 0 to each, that it has the job's secret. Only a hash crosses the network; the secret is neither sent nor
printed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import msgspec

from pitools.checkpoint.coordination.barrier import Delete, Get, Put, store_gone_error
from pitools.core.errors import ClusterError, ConfigError, Unreachable
from pitools.core.record import decode_json
from pitools.loader.loader import LoaderState
from pitools.train.rank import RankEnv

JOIN_TIMEOUT_S = 300  # all ranks have started: nodes read Python from a shared file system at very different speeds
SECRET_TIMEOUT_S = 60  # a rank that has joined only has to write the hash of its secret
COLLECTIVE_TIMEOUT_S = 600  # the slowest rank reaches the same collective: a step, or the rest of a save before it
LEAVE_TIMEOUT_S = 10  # all ranks have finished their steps

Broadcast = Callable[[str, str], str]  # (key, this rank's value) → rank 0's value, at every rank


class RankGroup(NamedTuple):
    """The connected ranks of one job, and the key-value store that they share; a key is written once."""

    rank: int = 0
    put: Put = lambda _, __: None
    get: Get = lambda _, __: ""
    world_size: int = 1
    delete: Delete = lambda _: None

    def broadcast(self, key: str, value: str) -> str:
        """Return rank 0's value at every rank, as late as a collective. Raises Unreachable."""
        if self.world_size == 1:
            return value
        if self.rank == 0:
            self.put(f"pit/{key}", value)
        try:
            return self.get(f"pit/{key}", COLLECTIVE_TIMEOUT_S)
        except TimeoutError as error:
            message = f"{key}: broadcast timed out ({COLLECTIVE_TIMEOUT_S} s), missing: rank 0"
            raise Unreachable(message, where=f"rank {self.rank}", hint="see that rank's log and node") from error


class WrongJob(ClusterError):
    """This rank is connected to a rank of another job."""


@contextmanager
def join_jax(rank: RankEnv) -> Iterator[RankGroup]:
    """Join JAX's distributed runtime for the block. Raises WrongJob, ConfigError.

    Call before anything that starts JAX's backend. One rank drives one device: the GPU of its local rank, or the CPU.
    """
    import jax

    if rank.world_size == 1:
        yield RankGroup()
        return
    coordinator = _variable("JAX_COORDINATOR_ADDRESS")
    # JAX's own preemption service would replace StopSignal's SIGTERM handler.
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        coordinator_address=coordinator,
        num_processes=rank.world_size,
        process_id=rank.rank,
        local_device_ids=_device_ids(rank.local_rank),
        initialization_timeout=JOIN_TIMEOUT_S,
        heartbeat_timeout_seconds=COLLECTIVE_TIMEOUT_S,  # ranks of a suspended job send no heartbeats
        shutdown_timeout_seconds=LEAVE_TIMEOUT_S,
    )
    # The key-value store behind `initialize` has no public name yet.
    from jax._src.distributed import global_state

    client: Any = global_state.client

    def get(key: str, seconds: float) -> str:
        try:
            return str(client.blocking_key_value_get(key, int(seconds * 1000)))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                raise TimeoutError(f"{key} was not set in {seconds:g} s") from error
            raise store_gone_error(error, coordinator) from error

    def put(key: str, value: str) -> None:
        try:
            client.key_value_set(key, value)
        except jax.errors.JaxRuntimeError as error:
            raise store_gone_error(error, coordinator) from error

    def delete(key: str) -> None:
        try:
            client.key_value_delete(key)
        except jax.errors.JaxRuntimeError as error:
            raise store_gone_error(error, coordinator) from error

    check_secret(rank, put, get, where=coordinator)
    try:
        yield RankGroup(rank.rank, put, get, rank.world_size, delete)
    except BaseException:
        # JAX would wait for all ranks at exit, and then abort this rank with a stack that hides the first error.
        _exit_at_once(global_state)
        raise
    client.wait_at_barrier("pit/end", COLLECTIVE_TIMEOUT_S * 1000)
    jax.distributed.shutdown()


@contextmanager
def join_torch(rank: RankEnv, backend: str) -> Iterator[RankGroup]:
    """Join torch's default process group for the block. Raises WrongJob, ConfigError.

    backend: `nccl` or `gloo`.
    """
    import torch.distributed as dist

    from pitools.checkpoint.coordination.torch_store import torch_store

    if rank.world_size == 1:
        yield RankGroup()
        return
    host, port = _variable("MASTER_ADDR"), int(_variable("MASTER_PORT"))
    store = dist.TCPStore(
        host, port, rank.world_size, is_master=rank.rank == 0, timeout=timedelta(seconds=JOIN_TIMEOUT_S)
    )

    put, get, delete = torch_store(store)
    check_secret(rank, put, get, where=f"{host}:{port}")
    timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    dist.init_process_group(backend, store=store, rank=rank.rank, world_size=rank.world_size, timeout=timeout)
    yield RankGroup(rank.rank, put, get, rank.world_size, delete)
    # The store is in rank 0: without the barrier its end could look like a fault to a rank that is still leaving.
    dist.barrier()
    dist.destroy_process_group()


def check_secret(rank: RankEnv, put: Put, get: Get, *, where: str) -> None:
    """Compare secrets, each rank with rank 0 and rank 0 with each; then wait for its verdict. Raises WrongJob."""
    digest = hashlib.sha256(b"pit/job-secret\0" + rank.secret.encode()).hexdigest()

    def read(key: str, other: int) -> str:
        try:
            return get(key, SECRET_TIMEOUT_S)
        except TimeoutError as error:
            message = f"rank {other}: no answer in {SECRET_TIMEOUT_S:g} s"
            raise Unreachable(message, where=where, hint="see that rank's log and node") from error

    if rank.rank == 0:
        put("pit/job-secret/0", digest)
        digests = {number: read(f"pit/job-secret/{number}", number) for number in range(1, rank.world_size)}
    else:
        # Read before writing: rank 0 waits for this key, and may end right after it, and the store with it.
        digests = {0: read("pit/job-secret/0", 0)}
        put(f"pit/job-secret/{rank.rank}", digest)
    mismatches = [
        f"rank {other} of job {other_digest[:8]}" for other, other_digest in digests.items() if other_digest != digest
    ]
    own = f"rank {rank.rank} of job {digest[:8]}"
    verdict = f"{own}: secret mismatch (got {', '.join(mismatches[:4])})" if mismatches else ""
    if rank.rank == 0:
        put("pit/verdict", verdict)
    if verdict := verdict or read("pit/verdict", 0):
        hint = "two jobs share a coordinator address: end the older one, then resume this run"
        raise WrongJob(verdict, where=where, hint=hint)


def require_same_order(broadcast: Broadcast, loader: LoaderState) -> None:
    """Refuse ranks whose loaders have other samples or another order: samples of a batch would be missing or repeated.

    Causes: a node has only a part of the dataset, or another quarantine. Raises ConfigError at each rank that differs.
    """
    rank0_state = decode_json(broadcast("order", msgspec.json.encode(loader).decode()), LoaderState)
    for name in sorted(rank0_state.identity.keys() | loader.identity.keys()):
        if (own := loader.identity.get(name)) != (first := rank0_state.identity.get(name)):
            hint = "stage the whole dataset on all nodes, with the same quarantine"
            raise ConfigError(
                f"{name} differs from rank 0's (expected {first!r}, got {own!r})", where="dataset", hint=hint
            )


def _exit_at_once(global_state: Any) -> None:
    """End a failed process immediately, its own error last in its log; its peers detect the closed connection."""
    import ctypes

    for connection in (global_state.client, global_state.service):
        # Never destroyed, not even at exit: the destructor waits and aborts.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))
    global_state.client = global_state.service = None


def _device_ids(local_rank: int) -> list[int]:
    if text := os.environ.get("JAX_LOCAL_DEVICE_IDS"):
        return [int(part) for part in text.split(",")]
    # If Slurm binds GPUs to tasks, each rank has one, number 0; otherwise every rank of a node has all GPUs.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [local_rank % len(visible.split(","))] if visible else [local_rank]


def _variable(name: str) -> str:
    if not os.environ.get(name):
        hint = "the launcher sets it for each rank; alone, unset PIT_WORLD_SIZE"
        raise ConfigError(f"{name} is not set, and there is more than one rank", where="environment", hint=hint)
    return os.environ[name]
