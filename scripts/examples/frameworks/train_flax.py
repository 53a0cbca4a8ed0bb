"""Behaviour cloning by Flax: parameters replicated, the batch sharded over every device of every rank."""

import argparse
import os
import time
from contextlib import closing

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import pitools
from pitools.run.steps import StepLog
from pitools.train.checkpointing import make_checkpointer
from pitools.train.distributed import join_jax
from pitools.train.rank import read_rank_env

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
args = parser.parse_args()


class Policy(nnx.Module):
    """Actions from joint angles."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.hidden, self.out = nnx.Linear(7, 64, rngs=rngs), nnx.Linear(64, 7, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.hidden(x)))


def train(rank, group):
    mesh = Mesh(np.array(jax.devices()), ("batch",))
    everywhere = NamedSharding(mesh, PartitionSpec())
    graph, params = nnx.split(Policy(), nnx.Param)
    optimizer = optax.adam(1e-3)
    state = {"params": nnx.to_pure_dict(params)}
    state["optimizer"] = optimizer.init(state["params"])

    @jax.jit
    def step_once(state, x, y):
        def loss_of(pure):
            nnx.replace_by_pure_dict(params, pure)
            return jnp.mean((nnx.merge(graph, params)(x) - y) ** 2)

        loss, gradients = jax.value_and_grad(loss_of)(state["params"])
        updates, optimizer_state = optimizer.update(gradients, state["optimizer"])
        return {"params": optax.apply_updates(state["params"], updates), "optimizer": optimizer_state}, loss

    batches = pitools.load(
        os.environ["PIT_DATA_DEMO"],
        windows={"obs/robot0_proprio": (0, 1), "action": (0, 1)},
        batch_size=64,
        framework="jax",
        device=NamedSharding(mesh, PartitionSpec("batch")),
    )
    checkpointer = make_checkpointer(rank, group, "jax")
    first = 0
    if restored := checkpointer.restore(state):
        first, state = restored.step, jax.tree.map(np.asarray, restored.state)  # of this host, for all of them
        batches.load_state_dict(restored.loader_state)
    state = jax.device_put(state, everywhere)
    log = StepLog(rank.attempt_dir / "steps", rank.rank)
    with closing(batches), checkpointer:
        for step in range(first, args.steps):
            began = time.perf_counter()
            arrays = next(batches).arrays
            state, loss = step_once(state, arrays["obs/robot0_proprio"][:, 0], arrays["action"][:, 0])
            wall = time.perf_counter() - began
            log.write(
                step=step,
                loss=float(loss),
                wall_s=wall,
                input_s=0,
                compute_s=wall,
                comm_s=0,
                rank_samples=64 // rank.world_size,
            )
            if (step + 1) % 10 == 0:
                log.heartbeat()
                checkpointer.save(step + 1, jax.tree.map(lambda x: x.addressable_data(0), state), batches.state_dict())
        log.close()


rank = read_rank_env()
with join_jax(rank) as group:
    train(rank, group)
