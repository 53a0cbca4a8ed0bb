"""The environment of a rank: what every rank knows, and what JAX and torch read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from pitools.core.errors import ClusterError, DataError
from pitools.launch.rank import rendezvous

# Inside srun, and set by our local mode alike.
_SLURM_VARIABLES = ("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURMD_NODENAME")
_PIT_VARIABLES = ("PIT_ATTEMPT_DIR", "PIT_NONCE", "PIT_COORDINATOR", "PIT_HEAD_NODE", "PIT_PORTS")


class RankContext(msgspec.Struct, frozen=True, kw_only=True):
    """Where this process stands in its job.

    head_node: node of rank 0. head_address: rank 0's own, without a port. gpus_per_node: per node. tasks_per_node: per
    node.
    """

    rank: int
    world_size: int
    local_rank: int
    node: str
    head_node: str
    head_address: str
    job_identity: rendezvous.JobIdentity
    attempt_dir: Path
    tasks_per_node: int
    gpus_per_node: int


def load_rank_context(environ: Mapping[str, str]) -> RankContext:
    """This process's place, from the variables of srun and of the job script. Raises ClusterError."""
    missing = [name for name in (*_SLURM_VARIABLES, *_PIT_VARIABLES) if not environ.get(name)]
    if missing:
        hint = "ranks are started by the script that `pit script render train` prints, or by `pit launch run`"
        raise ClusterError(f"{missing[0]} is not set: this is not a rank", hint=hint)
    first, last = environ["PIT_PORTS"].split("-")
    key = [environ.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")]
    world_size = int(environ["SLURM_NTASKS"])
    return RankContext(
        rank=int(environ["SLURM_PROCID"]),
        world_size=world_size,
        local_rank=int(environ["SLURM_LOCALID"]),
        node=environ["SLURMD_NODENAME"],
        head_node=environ["PIT_HEAD_NODE"],
        head_address=environ["PIT_COORDINATOR"],
        job_identity=rendezvous.JobIdentity(" ".join(key), environ["PIT_NONCE"], world_size, (int(first), int(last))),
        attempt_dir=Path(environ["PIT_ATTEMPT_DIR"]),
        tasks_per_node=int(environ.get("PIT_TASKS_PER_NODE", "1")),
        gpus_per_node=int(environ.get("PIT_GPUS_PER_NODE", "0")),
    )


def dataset_dirs(context: RankContext) -> dict[str, str]:
    """Name → folder of what was staged on this rank's own node. Raises DataError when a folder is gone."""
    found = {}
    for receipt in sorted((context.attempt_dir / "nodes" / context.node).glob("*.json")):
        path = str(msgspec.json.decode(receipt.read_bytes()).get("path", ""))
        if not Path(path).is_dir():
            raise DataError(f'dataset "{receipt.stem}" is no longer on this node', where=f"{context.node}:{path}")
        found[receipt.stem] = path
    return found


def common_variables(context: RankContext, environ: Mapping[str, str], data: Mapping[str, str]) -> dict[str, str]:
    """Variables of every rank, whatever its framework."""
    variables = {
        "PIT_RANK": str(context.rank),
        "PIT_WORLD_SIZE": str(context.world_size),
        "PIT_LOCAL_RANK": str(context.local_rank),
        "PIT_NODE": context.node,
        "PIT_CHECKPOINT_DIR": str(context.attempt_dir.parent.parent / "checkpoints"),
        # A command's Python says where it was when it dies of a signal.
        "PYTHONFAULTHANDLER": environ.get("PYTHONFAULTHANDLER", "1"),
    }
    for name, path in data.items():
        variables[f"PIT_DATA_{name.upper()}"] = path
    # Without a limit every rank starts a thread per core of the whole node.
    if cpus := environ.get("SLURM_CPUS_PER_TASK"):
        variables["OMP_NUM_THREADS"] = environ.get("OMP_NUM_THREADS", cpus)
    return variables


def jax_variables(context: RankContext, environ: Mapping[str, str], coordinator: str) -> dict[str, str]:
    """What `jax.distributed.initialize()` reads; the number of processes and the rank it takes from Slurm's own."""
    variables = {"JAX_COORDINATOR_ADDRESS": coordinator}
    if context.gpus_per_node:
        # Every process sees all GPUs of the node and uses its share: JAX does not work behind --gpus-per-task.
        share = max(1, context.gpus_per_node // context.tasks_per_node)
        ids = range(context.local_rank * share, min((context.local_rank + 1) * share, context.gpus_per_node))
        variables["JAX_LOCAL_DEVICE_IDS"] = ",".join(map(str, ids))
    if any(re.fullmatch(r"(https?|all)_proxy", name, re.IGNORECASE) for name in environ):
        # gRPC would send the coordinator's traffic to the proxy, and hang.
        for name in ("no_proxy", "NO_PROXY"):
            variables[name] = ",".join(filter(None, [environ.get(name, ""), context.head_address]))
    return variables


def torch_variables(context: RankContext, coordinator: str) -> dict[str, str]:
    """What `init_process_group("env://")` reads."""
    host, _, port = coordinator.rpartition(":")
    return {
        "MASTER_ADDR": host.strip("[]"),
        "MASTER_PORT": port,
        "RANK": str(context.rank),
        "WORLD_SIZE": str(context.world_size),
        "LOCAL_RANK": str(context.local_rank),
        "LOCAL_WORLD_SIZE": str(context.tasks_per_node),
    }
