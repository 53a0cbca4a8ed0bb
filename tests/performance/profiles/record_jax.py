"""One rank of a data-parallel JAX job on CPUs with a fault, profiled: `record_jax.py RANK PORT FAULT FOLDER`."""

from __future__ import annotations

import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

STEPS = 5


def main(rank: int, port: int, fault: str, folder: str) -> None:
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank, cluster_detection_method="deactivate")
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    shared, split = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
    weights = jax.device_put(np.full((256, 256), 0.01, np.float32), shared)
    loops = 12 if fault == "slow-rank" and rank == 1 else 3
    burden = jax.jit(lambda x: jax.lax.fori_loop(0, loops, lambda _, y: y @ y, x))
    local = jnp.full((640, 640), 0.001)

    @jax.jit
    def update(weights: jax.Array, batch: jax.Array) -> jax.Array:
        gradient = jax.grad(lambda w: jnp.square(jnp.tanh(batch @ w)).mean())(weights)
        return weights - 0.1 * gradient

    def step(number: int) -> None:
        nonlocal weights, update
        with jax.profiler.TraceAnnotation("input"):
            if fault == "slow-input":
                time.sleep(0.05)
            rows = np.full((64 + (number if fault == "recompile" else 0), 256), 1.0, np.float32)
            batch = jax.make_array_from_process_local_data(split, rows)
        burden(local).block_until_ready()
        weights = update(weights, batch)
        weights.block_until_ready()

    step(0)
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    jax.profiler.start_trace(folder, profiler_options=options)
    for number in range(1, STEPS + 1):
        with jax.profiler.StepTraceAnnotation("train", step_num=number):
            step(number)
    jax.profiler.stop_trace()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
