"""Behaviour cloning in JAX, data-parallel over processes. Copy this file as your start.

    PIT_DATA_DEMO=<root>/<name>/<version> python -m pitools.train.jax_bc

One process drives one device. Every rank computes the gradients of its share of the global batch, one all-reduce sums
them, and every rank makes the same update, so that the parameters are the same everywhere without being sent.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pitools.loader.jax import jax_batches
from pitools.loader.loader import Loader
from pitools.run.steps import StepLog, Stopwatch
from pitools.train import rank as ranks
from pitools.train.checkpointing import make_checkpointer, should_save
from pitools.train.dataset import DemonstrationDataset
from pitools.train.distributed import RankGroup, join_jax, require_same_order
from pitools.train.preemption import SIGNALS, StopSignal, combine_votes
from pitools.train.rank import RankEnv

MOMENTUM = 0.9
CONVOLUTIONS = ((8, 4, 16), (4, 2, 32), (3, 2, 32))  # (kernel, stride, channels)
HIDDEN = 128

Params = dict[str, Any]
Inputs = dict[str, Any]  # each camera's frames (b, H, W, C) uint8, proprio (b, P), action (b, A)


def init(seed: int, data: DemonstrationDataset) -> Params:
    """Parameters by name, drawn from the seed: a convolutional net a camera, and two dense layers for the rest."""
    shapes: dict[str, tuple[int, ...]] = {}
    (features,), (actions,) = data.fields["proprio"].shape, data.fields["action"].shape
    for camera in data.cameras:
        height, width, channels = data.fields[camera].shape
        for i, (kernel, stride, out) in enumerate(CONVOLUTIONS):
            shapes[f"{camera}/conv{i}"] = (kernel, kernel, channels, out)
            height, width, channels = -(-height // stride), -(-width // stride), out
        features += height * width * channels
    shapes |= {"hidden": (features, HIDDEN), "action": (HIDDEN, actions)}
    # Drawn by NumPy: JAX would compile one program a shape, at every rank.
    generator = np.random.default_rng(seed)
    params: Params = {}
    for name, shape in shapes.items():
        spread = (2.0 / np.prod(shape[:-1])) ** 0.5
        params[f"{name}/w"] = (spread * generator.standard_normal(shape)).astype(np.float32)
        params[f"{name}/b"] = np.zeros(shape[-1], np.float32)
    return params


def predict(params: Params, inputs: Inputs) -> Any:
    """Normalised actions (b, A).

    GELU and not ReLU: near 0 a rounding error selects ReLU's branch, and within a hundred steps the loss
    would depend on how many ranks made the sum.
    """
    features = [inputs["proprio"]]
    for camera in sorted(inputs.keys() - {"proprio", "action"}):
        x = inputs[camera].astype(jnp.float32) / 255.0 - 0.5
        for i, (_, stride, _) in enumerate(CONVOLUTIONS):
            kernel, bias = params[f"{camera}/conv{i}/w"], params[f"{camera}/conv{i}/b"]
            layout = ("NHWC", "HWIO", "NHWC")
            x = jax.lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=layout)
            x = jax.nn.gelu(x + bias)
        features.append(x.reshape(len(x), -1))
    x = jnp.concatenate(features, axis=1)
    x = jax.nn.gelu(x @ params["hidden/w"] + params["hidden/b"])
    return x @ params["action/w"] + params["action/b"]


def loss_of(params: Params, inputs: Inputs, global_batch_size: int) -> Any:
    """This rank's part of the global batch's mean squared error: the parts of all ranks sum to it."""
    error = predict(params, inputs) - inputs["action"]
    return jnp.sum(jnp.mean(error**2, axis=1)) / global_batch_size


def make_compute(global_batch_size: int) -> Callable[[Params, Inputs, Any], Any]:
    """Return compute(params, inputs, votes) → this rank's share of the sums over ranks, in one vector."""

    def compute(params: Params, inputs: Inputs, votes: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(params, inputs, global_batch_size)
        return jnp.concatenate([loss[None], votes, ravel_pytree(gradients)[0]])[None]

    return jax.jit(compute)  # type: ignore[no-any-return]


def make_all_reduce() -> Callable[[Any], Any]:
    """(1, n) on this rank's device, its row of an array that spans all ranks → sum of the rows, (n,) on this device."""
    first = {device.process_index: device for device in reversed(jax.devices())}
    mesh = Mesh(np.array([first[process] for process in sorted(first)]), ("rank",))
    rows = NamedSharding(mesh, PartitionSpec("rank"))
    total = jax.jit(
        jax.shard_map(
            lambda row: jax.lax.psum(row[0], "rank"), mesh=mesh, in_specs=rows.spec, out_specs=PartitionSpec()
        )
    )

    def all_reduce(row: Any) -> Any:
        stacked = jax.make_array_from_single_device_arrays((mesh.size, row.size), rows, [row])
        return total(stacked).addressable_data(0)

    return all_reduce


def make_update(learning_rate: float) -> Callable[[Params, Params, Any], tuple[Params, Params]]:
    """Return update(params, momentum, summed) → parameters and momentum after one step of SGD."""

    def update(params: Params, momentum: Params, summed: Any) -> tuple[Params, Params]:
        gradients = ravel_pytree(params)[1](summed[1 + len(SIGNALS) :])  # the vector in the parameters' shapes
        momentum = jax.tree.map(lambda m, g: MOMENTUM * m + g, momentum, gradients)
        return jax.tree.map(lambda p, m: p - learning_rate * m, params, momentum), momentum

    return jax.jit(update)  # type: ignore[no-any-return]


def main(
    *,
    steps: int = 200,
    global_batch_size: int = 64,
    learning_rate: float = 0.02,
    seed: int = 0,
    checkpoint_every: int = 0,
    dataset: str = "demo",
) -> None:
    """Train up to step `steps`, from the newest checkpoint if there is one.

    global_batch_size: over all ranks. checkpoint_every: in steps; 0: only at the end. Raises SystemExit(128 + signal)
    after the checkpoint that SIGTERM or SIGUSR2 caused.
    """
    rank = ranks.read_rank_env()
    if threads := ranks.cpu_threads():
        os.environ.setdefault("NPROC", str(threads))  # the size of XLA's CPU thread pools
    # Without this a GPU multiplies in TF32, and the sum would depend on how the batch is cut.
    jax.config.update("jax_default_matmul_precision", "highest")
    data = DemonstrationDataset(ranks.dataset_path(dataset), seed=seed)
    with join_jax(rank) as group:
        stopped = train(rank, group, data, steps, global_batch_size, learning_rate, seed, checkpoint_every)
    if stopped:
        raise SystemExit(128 + stopped)


def train(
    rank: RankEnv,
    group: RankGroup,
    data: DemonstrationDataset,
    steps: int,
    global_batch_size: int,
    learning_rate: float,
    seed: int,
    checkpoint_every: int,
) -> int:
    """The loop. Returns the signal it stopped for, or 0."""
    device, *idle = jax.local_devices()
    if idle:
        print(f"rank {rank.rank} leaves {len(idle)} devices idle: start one rank a device", flush=True)
    params = init(seed, data)
    momentum = jax.tree.map(np.zeros_like, params)
    loader = Loader(data, global_batch_size=global_batch_size, rank=rank.rank, world_size=rank.world_size)
    batches = jax_batches(loader, device)
    require_same_order(group.broadcast, batches.state())
    checkpointer = make_checkpointer(rank, group, "jax")
    done = 0
    if checkpointer and (restored := checkpointer.restore(as_state(params, momentum))):
        done = restored.step
        params, momentum = restored.state["params"], restored.state["momentum"]
        batches.load_state_dict(restored.loader_state)
    params, momentum = jax.device_put((params, momentum), device)
    compute, all_reduce, update = make_compute(global_batch_size), make_all_reduce(), make_update(learning_rate)
    log = StepLog(rank.attempt_dir / "steps", rank.rank) if rank.attempt_dir else None
    stopped = 0
    with StopSignal() as stop, closing(batches), checkpointer or nullcontext():
        for step in range(done, steps):
            if checkpointer:
                checkpointer.poll()
            began, watch = time.perf_counter(), Stopwatch()
            batch = next(batches)
            input_s = watch.lap()
            row = jax.block_until_ready(compute(params, batch.arrays, np.array(stop.votes(), np.float32)))
            compute_s = watch.lap()
            summed = jax.block_until_ready(all_reduce(row))
            comm_s = watch.lap()
            params, momentum = jax.block_until_ready(update(params, momentum, summed))
            loss, *votes = np.asarray(summed)[: 1 + len(SIGNALS)].tolist()
            compute_s += watch.lap()
            stopped, checkpoint_s = combine_votes(votes), 0.0
            if checkpointer and should_save(step + 1, steps, checkpoint_every, stopped):
                if log:
                    log.heartbeat()  # a save waits for the one before
                checkpointer.save(step + 1, as_state(params, momentum), batches.state())
                checkpoint_s = watch.lap()
            wall_s = time.perf_counter() - began
            if log:
                log.write(
                    step=step,
                    loss=loss,
                    wall_s=wall_s,
                    input_s=input_s,
                    compute_s=compute_s,
                    comm_s=comm_s,
                    rank_samples=len(batch.sample_indices),
                    bytes_read=batch.bytes_read,
                    checkpoint_s=checkpoint_s,
                )
            if rank.rank == 0 and (step % 10 == 0 or step + 1 == steps or stopped):
                print(f"step {step} loss {loss:.6f} {1e3 * wall_s:.0f} ms", flush=True)
            if stopped:
                break
        if log:
            log.close()  # before the last save is waited for: the hang watch allows it more time than a step
    return stopped


def as_state(params: Params, momentum: Params) -> dict[str, Params]:
    """Return the training state that a checkpoint contains."""
    return {"params": params, "momentum": momentum}


if __name__ == "__main__":
    main()
