"""A rank of a small job that restores, checks, saves, restores again.

rank_process.py jax|torch FOLDER STEP,STEP,… SECONDS
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from pitools.checkpoint.checkpointer import Checkpointer
from pitools.train import rank as ranks
from pitools.train.distributed import RankGroup, join_jax, join_torch

ROWS = 8


def halves(step: int) -> np.ndarray[Any, Any]:
    """Every pattern of 16 bits, as they would be of a bfloat16: zeros of both signs, all that is not a number."""
    return np.roll(np.arange(1 << 16, dtype=np.uint16), step)


def full(step: int) -> np.ndarray[Any, Any]:
    """What the sharded array holds after this step."""
    return np.arange(ROWS * 3, dtype=np.float32).reshape(ROWS, 3) + 100 * step


def run(folder: Path, peers: RankGroup, steps: list[int], adapter: Any, state: Any, check: Any, spoil: Any) -> None:
    """Restore and check, then save each step, and spoil each state as soon as it has been copied."""
    store = {"put": peers.put, "get": peers.get, "delete": peers.delete}
    options = {"rank": peers.rank, "world_size": peers.world_size, **store}
    with Checkpointer(folder, adapter, **options, run="r", timeout_s=float(sys.argv[4])) as guard:
        if restored_state := guard.restore(state(0)):
            check(restored_state.state, restored_state.step)
            assert (restored_state.loader_state, restored_state.custom_metadata) == (
                {"position": restored_state.step},
                {"lr": 0.5},
            )
        print("restored", restored_state.step if restored_state else None, flush=True)
        for step in steps:
            now = state(step)
            guard.save(step, now, {"position": step}, {"lr": 0.5})
            spoil(now)
        if steps:
            again = guard.restore(state(0))
            assert again
            assert again.step == steps[-1], again.step
            check(again.state, again.step)


def jax_state(step: int) -> Any:
    """Sharded over all devices, replicated over them, one device's own, NumPy's, a key, and a number."""
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()), ("x",))
    split, same = NamedSharding(mesh, PartitionSpec("x")), NamedSharding(mesh, PartitionSpec())
    rows = full(step)
    return {
        "sharded": jax.make_array_from_callback(rows.shape, split, lambda index: rows[index]),
        "replicated": jax.make_array_from_callback((3,), same, lambda index: rows[0][index]),
        "own": [jax.device_put(rows, jax.local_devices()[0]), rows.copy()],
        "halves": jax.device_put(halves(step).view(jax.numpy.bfloat16), jax.local_devices()[0]),
        "key": jax.device_put(jax.random.key(step), jax.local_devices()[0]),
        "count": step,
    }


def check_jax(state: Any, step: int) -> None:
    """Every part is that of the step, where it belongs."""
    import jax

    expected = jax_state(step)
    assert state["sharded"].sharding.is_equivalent_to(expected["sharded"].sharding, 2)
    for name in ("sharded", "replicated"):
        for mine, theirs in zip(state[name].addressable_shards, expected[name].addressable_shards, strict=True):
            np.testing.assert_array_equal(mine.data, theirs.data)
    assert state["own"][0].devices() == {jax.local_devices()[0]}
    for array in state["own"]:
        np.testing.assert_array_equal(array, full(step))
    np.testing.assert_array_equal(np.asarray(state["halves"]).view(np.uint16), halves(step))
    assert jax.random.key_data(state["key"]).tolist() == jax.random.key_data(jax.random.key(step)).tolist()
    assert state["count"] == step


def spoil_jax(state: Any) -> None:
    """Give the buffers away, as a training step does, and write over NumPy's."""
    import jax

    donate = jax.jit(lambda array: array * 0 - 1, donate_argnums=0)
    jax.block_until_ready([donate(state["sharded"]), donate(state["replicated"]), donate(state["own"][0])])
    state["own"][1][:] = -1


def torch_state(step: int) -> Any:
    """A tensor sharded over the ranks, tensors as they are, and an optimizer's nested plain values."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    rows = torch.from_numpy(full(step))
    group = {"lr": 0.1 * step, "betas": (0.9, 0.99), "on": True, "name": "all", "none": None}
    optimizer = {"state": {0: {"step": torch.tensor(float(step))}}, "groups": [group]}
    state = {"plain": rows.clone(), "optimizer": optimizer}
    state["halves"] = torch.from_numpy(halves(step).view(np.int16)).view(torch.bfloat16)
    if dist.is_initialized():
        state["sharded"] = distribute_tensor(
            rows.clone(), init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)]
        )
    else:
        state["sharded"] = rows.clone()
    return state


def check_torch(state: Any, step: int) -> None:
    """Every part is that of the step."""
    import torch

    sharded = state["sharded"]
    np.testing.assert_array_equal(sharded.full_tensor() if hasattr(sharded, "full_tensor") else sharded, full(step))
    np.testing.assert_array_equal(state["plain"], full(step))
    np.testing.assert_array_equal(state["halves"].view(torch.int16).numpy().view(np.uint16), halves(step))
    assert state["optimizer"]["state"][0]["step"].item() == step
    (group,) = state["optimizer"]["groups"]
    assert group == {"lr": 0.1 * step, "betas": (0.9, 0.99), "on": True, "name": "all", "none": None}


def spoil_torch(state: Any) -> None:
    """Write over the tensors, as the next step does."""
    local = state["sharded"].to_local() if hasattr(state["sharded"], "to_local") else state["sharded"]
    for tensor in (local, state["plain"]):
        tensor.fill_(-1)


def main(framework: str, folder: Path, steps: list[int]) -> None:
    """As the module says."""
    rank = ranks.read_rank_env()
    if framework == "jax":
        import jax

        jax.config.update("jax_num_cpu_devices", 2)
        with join_jax(rank) as peers:
            from pitools.checkpoint.adapters.orbax_adapter import OrbaxAdapter

            run(folder, peers, steps, OrbaxAdapter(), jax_state, check_jax, spoil_jax)
    else:
        with join_torch(rank, "gloo") as peers:
            from pitools.checkpoint.adapters.dcp_adapter import DcpAdapter

            run(folder, peers, steps, DcpAdapter(), torch_state, check_torch, spoil_torch)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), [int(step) for step in sys.argv[3].split(",") if step])
